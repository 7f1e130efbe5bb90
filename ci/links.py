#!/usr/bin/env python3
"""Checks the Markdown documents: every relative link leads to a file and, with #anchor, to one of its headings; every
file of the code that a document names in backticks is there; every page is in the table of contents of the site."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)|!\[[^\]]*\]\(([^()\s]+)\)")
# `dray-qemu/pivot.rs` stands for crates/dray-qemu/src/pivot.rs.
CODE = re.compile(r"`((?:crates/)?dray-[a-z]+/[\w./-]+)`")
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
    if anchor and to.suffix == ".md" and anchor not in anchors(to):
        return f"{target}: no such heading"
    return None


def is_code(name):
    crate, _, rest = name.removeprefix("crates/").partition("/")
    base = ROOT / "crates" / crate
    return (base / "src" / rest).exists() or (base / rest).exists()


def unlisted():
    """Pages in docs/ that docs/SUMMARY.md does not name."""
    contents = (ROOT / "docs" / "SUMMARY.md").read_text()
    pages = (page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md"))
    return sorted(str(page) for page in pages if page.name != "SUMMARY.md" and f"({page})" not in contents)


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
        wrong += [f"{name}: {code}: no such file" for code in CODE.findall(text) if not is_code(code)]
    wrong += [f"docs/SUMMARY.md does not name {page}" for page in unlisted()]
    for line in wrong:
        print(f"links: {line}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"links: {links} links of the documents lead somewhere")


if __name__ == "__main__":
    main()
