"""Record a command in a terminal as an animated SVG: what a person sees, at the pace of the real run.

    python scripts/record_terminal.py docs/demo.svg -- rest-local demo

- The command runs in a pseudo terminal of `--columns` by `--rows`. A terminal emulator (pyte) reads its output, and the
  screen is kept at every change, at most ten times a second.
- The picture is one SVG without scripts, fonts or references to other files. Browsers and README pages show it.
- The pace is that of the run; `--speed 2` shows it twice as fast, and the picture says so.
- The exit code is that of the command. A command that fails leaves no picture.

Needs a POSIX system and the package `pyte` (in `rest-local[test]`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

PAUSE = 0.1  # seconds between two frames
LAST = 3.0  # seconds for which the last frame stays
CELL_WIDTH, CELL_HEIGHT, MARGIN, BAR = 8.4, 18, 14, 30  # of the picture, in its units
INK, PAPER = "#d8dee9", "#1e222a"
COLOURS = {
    "black": "#3b4252", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d8dee9", "brightblack": "#6b7488", "brightred": "#f08a92",
    "brightgreen": "#b5dd9a", "brightbrown": "#f2d08d", "brightblue": "#88c5f7", "brightmagenta": "#d99be8",
    "brightcyan": "#7fd0da", "brightwhite": "#ffffff",
}  # fmt: skip
Line = tuple[tuple[str, str], ...]
"""The pieces of a line of the screen: text, and its style as attributes of SVG."""


@dataclass(frozen=True)
class Frame:
    """The screen from `begin` on, in seconds since the start of the command."""

    begin: float
    lines: tuple[Line, ...]


def record(command: Sequence[str], columns: int, rows: int) -> tuple[list[Frame], int]:
    """Run a command in a terminal of that size. Returns the frames, the newest last, and the exit code."""
    import pyte

    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    begun, frames = time.monotonic(), [Frame(0.0, _lines(screen))]
    for data in _chunks(master):
        if data:
            stream.feed(data)
        now = time.monotonic() - begun
        if now - frames[-1].begin >= PAUSE and (lines := _lines(screen)) != frames[-1].lines:
            frames.append(Frame(now, lines))
    os.close(master)
    code = process.wait()
    if (lines := _lines(screen)) != frames[-1].lines:
        frames.append(Frame(time.monotonic() - begun, lines))
    return frames, code


def _chunks(master: int) -> Iterator[bytes]:
    """What the terminal gets, until the command has closed it; an empty chunk where nothing came for a frame."""
    while True:
        if not select.select([master], [], [], PAUSE)[0]:
            yield b""
            continue
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # Linux: no process has the terminal open any more
            return
        if not data:
            return
        yield data


def _lines(screen: Any) -> tuple[Line, ...]:
    return tuple(_line(screen.buffer[row], screen.columns) for row in range(screen.lines))


def _line(cells: Any, columns: int) -> Line:
    styled = [(cells[column].data, _style(cells[column])) for column in range(columns)]
    while styled and styled[-1] == (" ", ""):
        styled.pop()
    return tuple(("".join(text for text, _ in run), style) for style, run in groupby(styled, key=lambda cell: cell[1]))


def _style(cell: Any) -> str:
    colour = cell.bg if cell.reverse else cell.fg
    ink = "" if colour == "default" else COLOURS.get(colour, f"#{colour}")
    parts = [
        f'fill="{ink}"' if ink else "",
        'font-weight="bold"' if cell.bold else "",
        'font-style="italic"' if cell.italics else "",
        'text-decoration="underline"' if cell.underscore else "",
    ]
    return " ".join(part for part in parts if part)


def svg(frames: Sequence[Frame], columns: int, title: str, speed: float = 1.0) -> str:
    """The animation. Equal lines are stored once; each frame is shown from its time to that of the next, again and
    again.
    """
    rows = len(frames[0].lines)
    width, height = columns * CELL_WIDTH + 2 * MARGIN, rows * CELL_HEIGHT + 2 * MARGIN + BAR
    seconds = (frames[-1].begin + LAST) / speed
    numbers: dict[Line, int] = {}
    shown = []
    for place, frame in enumerate(frames):
        uses = [
            f'<use href="#l{numbers.setdefault(line, len(numbers))}" y="{row * CELL_HEIGHT}"/>'
            for row, line in enumerate(frame.lines)
            if line
        ]
        shown.append(f'<g class="f" id="f{place}">{"".join(uses)}</g>')
    begins = [frame.begin / speed / seconds * 100 for frame in frames] + [100.0]
    rules = [_rule(place, begins[place], begins[place + 1], seconds) for place in range(len(frames))]
    texts = [f'<g id="l{number}">{_text(line)}</g>' for line, number in numbers.items()]
    label = escape(title) + (f" ({speed:g} x the real speed)" if speed != 1 else "")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
            f"<title>{label}</title>",
            "<style>",
            f"text{{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:{INK};white-space:pre}}",
            ".f{visibility:hidden}",
            *rules,
            "@media (prefers-reduced-motion:reduce){.f{animation:none!important}",
            f"#f{len(frames) - 1}{{visibility:visible}}}}",
            "</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            f'<text x="{width / 2:g}" y="20" text-anchor="middle" fill-opacity=".6">{label}</text>',
            f"<defs>{''.join(texts)}</defs>",
            f'<g transform="translate({MARGIN} {BAR + MARGIN})">',
            *shown,
            "</g>",
            "</svg>\n",
        ]
    )


def _rule(place: int, begin: float, end: float, seconds: float) -> str:
    before = f"0%,{begin - 0.001:.3f}%{{visibility:hidden}}" if begin > 0.001 else ""
    after = f"{end:.3f}%,100%{{visibility:hidden}}" if end < 100 else ""
    return (
        f"@keyframes k{place}{{{before}{begin:.3f}%,{end - 0.001:.3f}%{{visibility:visible}}{after}}}"
        f"#f{place}{{animation:k{place} {seconds:.2f}s step-end infinite}}"
    )


def _text(line: Line) -> str:
    pieces, column = [], 0
    for text, style in line:
        if text.strip() or "underline" in style:
            place = f'x="{column * CELL_WIDTH:g}" textLength="{len(text) * CELL_WIDTH:g}"'
            pieces.append(f"<tspan {place}{' ' if style else ''}{style}>{escape(text)}</tspan>")
        column += len(text)
    return f'<text y="14" xml:space="preserve">{"".join(pieces)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("output", type=Path, help="the SVG to write")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast as the run it is shown")
    parser.add_argument("--title", help="default: the command")
    parser.add_argument("command", nargs="+", help="after --")
    given = parser.parse_args(arguments)
    frames, code = record(given.command, given.columns, given.rows)
    if code:
        print(f"record_terminal.py: the command ended with {code}; no picture was written", file=sys.stderr)
        return code
    given.output.write_text(svg(frames, given.columns, given.title or " ".join(given.command), given.speed), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
