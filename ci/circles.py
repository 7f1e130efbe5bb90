#!/usr/bin/env python3
"""No crate has a circle of modules: of two modules at the top of a crate, at most one uses the other.

A module is a file or a folder directly in `src/`; what a folder has inside is one module here. Tests may use
anything, and the crate's root may be used by nobody.
"""

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# `crate::a` and `crate::{a, b::c}`; `super::a` where the file is itself at the top.
FROM_ROOT = re.compile(r"\bcrate::(?:\{([^}]*)\}|(\w+))")
FROM_PARENT = re.compile(r"\bsuper::(\w+)")
NAMES = re.compile(r"(?<![:\w])[a-z_]\w*")


def code(path):
    """A file without its comments and without the tests at its end."""
    text = path.read_text().split("#[cfg(test)]\nmod ", 1)[0]
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//"))


def is_test(path):
    return any(part in ("tests", "tests.rs", "fixtures", "fixtures.rs") for part in path.parts)


def uses(text, at_top):
    """The modules at the top that a file names, and other names."""
    for group, single in FROM_ROOT.findall(text):
        yield from NAMES.findall(group) if group else [single]
    if at_top:
        yield from FROM_PARENT.findall(text)


def graph(src):
    """Each module of a crate, with those that it uses."""
    modules = {path.stem for path in src.iterdir()} - {"lib", "main"}
    edges = {module: set() for module in modules}
    for path in src.rglob("*.rs"):
        inside = path.relative_to(src)
        module = Path(inside.parts[0]).stem
        if module in modules and not is_test(inside):
            edges[module] |= set(uses(code(path), len(inside.parts) == 1)) & modules - {module}
    return edges


def main():
    crates = sorted(Path(__file__).resolve().parent.parent.glob("crates/*/src"))
    failed = False
    for src in crates:
        try:
            TopologicalSorter(graph(src)).prepare()
        except CycleError as circle:
            failed = True
            print(f"circles: {src.parent.name}: {' <- '.join(circle.args[1])}", file=sys.stderr)
    if not failed:
        print(f"circles: none among the modules of {len(crates)} crates")
    return failed


sys.exit(main())
