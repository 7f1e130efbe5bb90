#!/usr/bin/env python3
"""Does what docs/tutorial/first-move.md says, command by command, in one shell.

    ci/tutorial.py [--write]

`dray` is the one in PATH. Fails where a command fails that succeeded when the page was written, or the other
way round. With --write the page gets the output of this run.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs/tutorial/first-move.md"
# Of a guest that boots or goes on: the page says that it takes a while.
PATIENCE = 60
# Of a program that makes its socket: it takes no longer than typing.
TYPING = 5
# Said by programs in the background, at any time.
ASIDE = ("qemu-system-x86_64: terminating", "bash: line ")
NO_SOCKET = ("there is no such socket", "No such file or directory")


class Shell:
    """One shell for all steps, as the page asks for."""

    def __init__(self):
        self.end = f"end-{os.getpid()}"
        pipe = subprocess.PIPE
        # The programs that it starts in the background outlive a command and must not hold its output.
        self.bash = subprocess.Popen(
            ["bash"], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def close(self):
        """Ends what the steps have left running."""
        os.killpg(self.bash.pid, signal.SIGKILL)
        self.bash.wait()

    def run(self, command):
        """Its output, and its exit code."""
        self.bash.stdin.write(f"{command}\nprintf '\\n%s %s\\n' {self.end} $?\n")
        self.bash.stdin.flush()
        said = []
        for line in self.bash.stdout:
            if line.startswith(self.end + " "):
                # The newline before the mark is not the command's.
                text = "".join(said)
                return text[:-1], int(line.split()[1])
            said.append(line)
        sys.exit(f"the shell has ended during: {command}")


def blocks(lines):
    """Begin, end and language of each block that is set as code."""
    found, begin = [], None
    for nth, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            if begin is None:
                begin = nth
            else:
                found.append((begin + 1, nth, lines[begin].strip().strip("`")))
                begin = None
    return found


def commands(lines):
    """Each command of a block of a console, with the output that the page has."""
    found = []
    for line in lines:
        goes_on = found and not found[-1][1] and found[-1][0][-1].endswith("\\")
        if line.startswith("$ "):
            found.append(([line], []))
        elif goes_on:
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return found


def failed_then(output):
    """Whether the command failed when the page was written."""
    return any(line.startswith("dray: ") for line in output)


def say(shell, typed, output):
    """What the command says now."""
    command = "\n".join(typed).removeprefix("$ ")
    waits = output and output[-1].endswith(": good")
    until = time.monotonic() + (PATIENCE if waits else TYPING)
    while True:
        said, code = shell.run(command)
        said = [line for line in said.strip("\n").split("\n") if not line.startswith(ASIDE)]
        said = [] if said == [""] else said
        starts = code and not failed_then(output) and any(why in line for line in said for why in NO_SOCKET)
        lacks = waits and (len(said) < len(output) or not all(line.endswith(": good") for line in said))
        if time.monotonic() > until or not starts and not lacks:
            break
        time.sleep(1)
    if (code != 0) != failed_then(output) or lacks:
        sys.exit(f"`{command}` ended with {code}:\n" + "\n".join(said))
    return said


def follow(shell, lines):
    """The page with the output of this run."""
    written, last = [], 0
    for begin, end, language in blocks(lines):
        written += lines[last:begin]
        last = end
        body = lines[begin:end]
        if language == "console":
            for typed, output in commands(body):
                written += typed + say(shell, typed, output)
            continue
        written += body
        if "apt-get" in "".join(body):
            continue
        said, code = shell.run("\n".join(body))
        if code:
            sys.exit(f"line {begin + 1}: a command ended with {code}:\n{said}")
    return "\n".join(written + lines[last:])


def main():
    shell = Shell()
    try:
        page = follow(shell, PAGE.read_text().split("\n"))
    finally:
        shell.close()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page)
    print("every command of the tutorial did what the page says")


if __name__ == "__main__":
    main()
