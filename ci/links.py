#!/usr/bin/env python3
"""Checks the Markdown documents: every relative link leads to a file and, with #anchor, to one of its headings; no link
leads out of docs/, because the site contains nothing else; every path of this repository in backticks exists; and the
table of contents of the site lists every page under the title of the page. Opens no address on the network."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)|!\[[^\]]*\]\(([^()\s]+)\)")
# `dray-qemu/pivot.rs` stands for crates/dray-qemu/src/pivot.rs. A part in capitals stands for a name: `docs/PAGE`.
CODE = re.compile(r"`((?:dray-[a-z]+|crates|docs|ci|bench|demo|fuzz|packaging)/[\w./-]*)`")
STANDS_FOR = re.compile(r"(?:^|[/-])[A-Z]+(?:/|$)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def slug(heading):
    """The anchor that GitHub and mdBook give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.replace("`", "").strip().lower())
    return text.replace(" ", "-")


def anchors(path):
    found = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", FENCE.sub("", path.read_text()), re.M):
        anchor = base = slug(heading)
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{base}-{number}"
        found.add(anchor)
    return found


def broken_link(path, target):
    """Why a link leads nowhere; None for one that is good or leads to another site."""
    if re.match(r"[a-z]+:", target):
        return None
    file, _, anchor = target.partition("#")
    to = (path.parent / file).resolve() if file else path
    if not to.exists():
        return f"{target}: no such file"
    docs = ROOT / "docs"
    if path.is_relative_to(docs) and not to.is_relative_to(docs):
        return f"{target}: leads out of docs/, and the site contains nothing else"
    if anchor and to.suffix == ".md" and anchor not in anchors(to):
        return f"{target}: no such heading"
    return None


def is_path(name):
    if STANDS_FOR.search(name) or (ROOT / name).exists():
        return True
    crate, _, rest = name.partition("/")
    base = ROOT / "crates" / crate
    return (base / "src" / rest).exists() or (base / rest).exists()


def contents():
    """What is wrong with docs/SUMMARY.md: pages that it does not list, and titles that the pages do not have."""
    docs = ROOT / "docs"
    listed = {page: title for title, page in re.findall(r"\[(.*)\]\(([^()\s]+)\)", (docs / "SUMMARY.md").read_text())}
    wrong = []
    for path in sorted(docs.rglob("*.md")):
        page = str(path.relative_to(docs))
        title = re.search(r"^# +(.*)$", path.read_text(), re.M)
        if page == "SUMMARY.md":
            continue
        if page not in listed:
            wrong.append(f"docs/SUMMARY.md: {page}: not listed")
        elif title and title[1] != listed[page]:
            wrong.append(f"docs/SUMMARY.md: {page}: the page's title is \"{title[1]}\"")
    return wrong


def main():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )
    wrong = []
    links = 0
    for name in listed.stdout.split():
        path = ROOT / name
        text = FENCE.sub("", path.read_text())
        for one, other in LINK.findall(text):
            links += 1
            why = broken_link(path, one or other)
            if why:
                wrong.append(f"{name}: {why}")
        wrong += [f"{name}: {code}: no such file" for code in CODE.findall(text) if not is_path(code)]
    wrong += contents()
    for line in wrong:
        print(f"links: {line}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"links: {links} links of the documents lead somewhere")


if __name__ == "__main__":
    main()
