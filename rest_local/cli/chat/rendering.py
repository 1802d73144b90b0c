"""Blocks of Markdown as lines for a terminal, in colours where it has them.

Code keeps its lines, however long, so that it can be copied; other text is wrapped. Headings stand on the left. Links
show their address, so that it cannot differ from the text unseen.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rest_local.cli.chat.blocks import Block

if TYPE_CHECKING:
    from rich.console import Console

THEME = "ansi_dark"  # the terminal's own colours, on its own background
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROLS[ord("\r")] = ""


def visible(text: str) -> str:
    """The text without what would control the terminal: a model may write anything."""
    return text.translate(_CONTROLS)


def lines_of(block: Block, console: Console) -> list[str]:
    """The lines of a block, without blank ones at both ends. Takes milliseconds for a screen of text."""
    from rich.syntax import Syntax

    if block.language is None:
        return _lines(_markdown(block.text), console)
    language = (block.language.split() or ["text"])[0].strip("{}.")
    code = Syntax("", language, theme=THEME, background_color="default").highlight(block.text.expandtabs(4))
    return _lines(code, console, unwrapped=True)


def dim_lines(text: str, console: Console) -> list[str]:
    """The lines of plain text, dim."""
    from rich.text import Text

    return _lines(Text(text.strip("\n"), "dim italic"), console)


def _lines(renderable: Any, console: Console, unwrapped: bool = False) -> list[str]:
    with console.capture() as captured:
        console.print(renderable, soft_wrap=unwrapped)
    lines = [_TRAILING.sub(r"\1", line) for line in captured.get().split("\n")]
    while lines and not ESCAPES.sub("", lines[-1]).strip():
        lines.pop()
    while lines and not ESCAPES.sub("", lines[0]).strip():
        del lines[0]
    return lines


def _markdown(text: str) -> Any:
    from rich import markdown
    from rich.console import ConsoleOptions, RenderResult

    class Heading(markdown.Heading):
        """On the left, without a frame."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            self.text.justify = "left"
            self.text.stylize("bold underline" if self.tag in ("h1", "h2") else "bold")
            yield self.text

    class Markdown(markdown.Markdown):
        elements = {**markdown.Markdown.elements, "heading_open": Heading}  # noqa: RUF012

    return Markdown(text, code_theme=THEME, hyperlinks=False)
