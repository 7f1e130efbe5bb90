#!/usr/bin/env python3
"""Draws a terminal as an SVG: what it showed at chosen moments of a session that `script` recorded.

    script -q -e -c "stty rows 50 cols 110; make demo" --log-out demo.log
    docs/images/terminal.py demo.log --columns 110 --begin '^  dray migrate' --end '^The guest on hostb' \
        --panel 'during the copy=copy .* 4. %' --panel 'at the end=' > docs/images/migrate.svg

A panel is CAPTION=PATTERN. It shows the screen as it was when PATTERN, a regular expression, first
matched one of its lines, or at the end of the recording if PATTERN is empty. Of that screen it shows the
lines from the last one that --begin matches to the one before --end. Nothing is drawn that the
recording does not hold.
"""

import argparse
import html
import re

# Foreground colours of SGR codes 30 to 37, chosen for the background below.
COLOURS = ["#484f58", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4"]
TEXT, BACKGROUND, FRAME = "#e6edf3", "#0d1117", "#30363d"
CELL, LINE, MARGIN, TITLE = 8.43, 19, 16, 34
TOKENS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


class Screen:
    """As much of a terminal as dray's output needs: SGR, cursor up and down, erased lines."""

    def __init__(self, columns):
        self.columns, self.row, self.column = columns, 0, 0
        self.style = (None, False, False)  # colour, bold, dim
        self.rows = [{}]

    def put(self, char):
        if self.column == self.columns:
            self.line_feed()
            self.column = 0
        self.rows[self.row][self.column] = (char, self.style)
        self.column += 1

    def line_feed(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append({})

    def rendition(self, codes):
        colour, bold, dim = self.style
        for code in (int(code or 0) for code in codes.split(";")):
            if code == 0:
                colour, bold, dim = None, False, False
            elif code == 1:
                bold = True
            elif code == 2:
                dim = True
            elif 30 <= code <= 37:
                colour = COLOURS[code - 30]
        self.style = (colour, bold, dim)

    def control(self, argument, letter):
        if letter == "m":
            self.rendition(argument)
        elif letter == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif letter == "B":
            self.row = min(len(self.rows) - 1, self.row + int(argument or 1))
        elif letter == "K":
            row = self.rows[self.row]
            for column in [c for c in row if argument == "2" or c >= self.column]:
                del row[column]

    def text(self, row):
        cells = self.rows[row]
        return "".join(cells.get(column, " ")[0] for column in range(max(cells, default=-1) + 1)).rstrip()

    def lines(self):
        return [self.text(row) for row in range(len(self.rows))]


def play(recording, columns, pattern):
    """The screen when a line of it first matches, just before the display is drawn anew."""
    screen = Screen(columns)
    for token in TOKENS.finditer(recording):
        argument, letter = token.groups()
        if letter:
            if letter == "A" and pattern and any(re.search(pattern, line) for line in screen.lines()[-8:]):
                return screen
            screen.control(argument, letter)
        elif token.group() == "\r":
            screen.column = 0
        elif token.group() == "\n":
            screen.line_feed()
        else:
            screen.put(token.group())
    if pattern:
        raise SystemExit(f"terminal: no moment of the recording matches {pattern!r}")
    return screen


def part(screen, begin, end):
    """The rows between two patterns, without empty ones at the end."""
    lines = screen.lines()
    first = max((n for n, line in enumerate(lines) if begin and re.search(begin, line)), default=0)
    last = next((n for n in range(first, len(lines)) if end and re.search(end, lines[n])), len(lines))
    while last > first and not lines[last - 1]:
        last -= 1
    return [screen.rows[n] for n in range(first, last)]


def visible(cells):
    """A row without its spaces."""
    return {column: cell for column, cell in cells.items() if cell[0] != " "}


def spans(cells):
    """Runs of cells of one style: (first column, text, style)."""
    runs = []
    cells = visible(cells)
    for column in sorted(cells):
        char, style = cells[column]
        if runs and runs[-1][2] == style and column - runs[-1][0] - len(runs[-1][1]) <= 1:
            runs[-1][1] += " " * (column - runs[-1][0] - len(runs[-1][1])) + char
        else:
            runs.append([column, char, style])
    return runs


def draw(panels, title):
    """The SVG, its panels one below the other."""
    columns = max(max(cells, default=0) + 1 for _, rows in panels for cells in map(visible, rows))
    width = columns * CELL + 2 * MARGIN
    heights = [TITLE + len(rows) * LINE + MARGIN for _, rows in panels]
    height = sum(heights) + 12 * (len(panels) - 1)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-size="14" '
        "font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\">"
    ]
    out.append(f"<title>{html.escape(title)}</title>")
    top = 0
    for (caption, rows), tall in zip(panels, heights):
        out.append(f'<rect x="0.5" y="{top + 0.5}" width="{width - 1:.0f}" height="{tall - 1}" rx="8" '
                   f'fill="{BACKGROUND}" stroke="{FRAME}"/>')
        out.append(f'<text x="{MARGIN}" y="{top + 22}" fill="#8b949e" font-size="12">{html.escape(caption)}</text>')
        for number, cells in enumerate(rows):
            y = top + TITLE + number * LINE + 13
            for column, text, (colour, bold, dim) in spans(cells):
                look = f' fill="{colour or TEXT}"' + (' font-weight="bold"' if bold else "")
                look += ' opacity="0.6"' if dim else ""
                out.append(f'<text x="{MARGIN + column * CELL:.1f}" y="{y}" xml:space="preserve" '
                           f'textLength="{len(text) * CELL:.1f}"{look}>{html.escape(text)}</text>')
        top += tall + 12
    return "\n".join([*out, "</svg>"])


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("recording")
    args.add_argument("--columns", type=int, default=80)
    args.add_argument("--begin", default="")
    args.add_argument("--end", default="")
    args.add_argument("--panel", action="append", required=True)
    args = args.parse_args()
    recording = open(args.recording, encoding="utf-8", newline="").read()
    panels = []
    for panel in args.panel:
        caption, _, pattern = panel.partition("=")
        panels.append((caption, part(play(recording, args.columns, pattern), args.begin, args.end)))
    print(draw(panels, "dray migrate: " + ", ".join(caption for caption, _ in panels)))


if __name__ == "__main__":
    main()
