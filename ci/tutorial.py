#!/usr/bin/env python3
"""Does what the pages of docs/tutorial say, command by command.

    ci/tutorial.py [--write] [PAGE]...

A page is first-move or two-hosts; without one, both. first-move is done in one shell with the `dray` in PATH, two-hosts
as root in a shell of each host, where `hosta# ` or `hostb# ` begins a command. Fails where a command fails that
succeeded when the page was written, or the other way round. With --write the pages get the output of this run.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from two_hosts import SOURCE, Hosts

PAGES = SOURCE / "docs/tutorial"
# Of a guest that boots or goes on: the page says that it takes a while.
PATIENCE = 60
# Of a program that makes its socket: it takes no longer than typing.
TYPING = 5
# Said by programs in the background, at any time.
ASIDE = ("qemu-system-x86_64: terminating", "bash: line ")
NO_SOCKET = ("there is no such socket", "No such file or directory")


class Shell:
    """One shell for all steps of a page on one host."""

    def __init__(self, argv=("bash",)):
        self.end = f"end-{os.getpid()}"
        pipe = subprocess.PIPE
        # The programs that it starts in the background outlive a command and must not hold its output.
        self.bash = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
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


def is_whole(typed):
    """Whether the lines are a whole command, not the beginning of one."""
    document = re.search(r"<<'(\w+)'$", typed[0])
    return typed[-1] == document[1] if document else not typed[-1].endswith("\\")


def commands(lines, prompts):
    """Each command of a block of a console: its prompt, what is typed, and the output that the page has."""
    found = []
    for line in lines:
        prompt = next((prompt for prompt in prompts if line.startswith(prompt)), None)
        if found and not found[-1][2] and not is_whole(found[-1][1]):
            found[-1][1].append(line)
        elif prompt:
            found.append((prompt, [line.removeprefix(prompt)], []))
        else:
            found[-1][2].append(line)
    return found


def failed_then(output):
    """Whether the command failed when the page was written."""
    return any(line.startswith("dray: ") for line in output)


def say(shell, typed, output):
    """What the command says now."""
    command = "\n".join(typed)
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


def follow(shells, lines):
    """The page with the output of this run. `shells`: by the prompt of each."""
    written, last = [], 0
    for begin, end, language in blocks(lines):
        written += lines[last:begin]
        last = end
        body = lines[begin:end]
        if language == "console":
            for prompt, typed, output in commands(body, shells):
                written += [prompt + typed[0], *typed[1:]] + say(shells[prompt], typed, output)
            continue
        written += body
        if language != "sh" or "apt-get" in "".join(body) or "$ " not in shells:
            continue
        said, code = shells["$ "].run("\n".join(body))
        if code:
            sys.exit(f"line {begin + 1}: a command ended with {code}:\n{said}")
    return "\n".join(written + lines[last:])


def do(page, write):
    """Does what the page says, in shells that end with it."""
    path, shells, hosts = PAGES / f"{page}.md", {}, Hosts()
    try:
        if page == "two-hosts":
            hosts.make()
            shells = {f"{name}# ": Shell(hosts.enter(name)) for name in hosts.spaces}
            pids = {prompt[:-2]: shell.bash.pid for prompt, shell in shells.items()}
            for shell in shells.values():
                shell.run(hosts.functions(pids))
        else:
            shells = {"$ ": Shell()}
        text = follow(shells, path.read_text().split("\n"))
    finally:
        for shell in shells.values():
            shell.close()
        if page == "two-hosts":
            hosts.close()
    if write:
        path.write_text(text)
    print(f"every command of {page}.md did what the page says")


def main():
    words = [word for word in sys.argv[1:] if word != "--write"]
    for page in words or ["first-move", "two-hosts"]:
        do(page, "--write" in sys.argv[1:])


if __name__ == "__main__":
    main()
