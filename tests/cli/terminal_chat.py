"""`rest-local chat` with a fake engine, as a program for a real terminal: what it answers is decided by the question.

    python tests/cli/terminal_chat.py [OPTIONS]

markdown   a text with headings, a list, code and a table, a few characters at a time
code       code without a fence
long       300 lines
endless    words until Ctrl-C
until ...  words until something is typed
think      reasoning, then an answer
control    escape sequences
else       the question as Python writes it, so that blanks and line ends are seen
"""

import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]  # The folder of this file is there already.

from fake_cli_engine import FakeEngine, FakePiece, FakeStream  # noqa: E402

MARKDOWN = """# Result

Some *text* with `code`, **bold** and a [link](https://example.org/) that is longer than a narrow terminal is wide.

1. first
2. second

```python
def double(value):
    return 2 * value  # this comment is longer than sixty columns, so that it is wrapped
```

| name | value |
|------|-------|
| one  | 1     |

The end."""
ANSWERS = {
    "markdown": MARKDOWN,
    "code": "def __init__(self, *args):\n    x = a*b*c  # <your name>\n    return x",
    "long": "\n".join(f"line {number}" for number in range(1, 301)),
    "think": "<think>\nfirst a thought\n</think>\nthen an answer",
    "control": "before\x1b[2J\x1b]0;title\x07after",
}


class Endless(FakeStream):
    """A stream of words for ever, slowly enough that the processor is not spent on them."""

    ends_with_a_key = False

    def __iter__(self) -> Iterator[FakePiece]:
        for number in range(10**6):
            time.sleep(0.02)
            piece = FakePiece(f"word{number} ", (119,), ("target",))
            self._said.append(piece)
            yield piece
            if self.ends_with_a_key and select.select([sys.stdin], [], [], 0)[0]:
                break


class TerminalEngine(FakeEngine):
    """An engine that answers by the last message."""

    def chat(self, messages: Sequence[dict[str, str]], **arguments: Any) -> FakeStream:
        question = messages[-1]["content"]
        if question in ("endless", "until a key"):
            stream = Endless([], 500.0)
            stream.ends_with_a_key = question == "until a key"
            return stream
        text = ANSWERS.get(question, f"{len(messages)}: {question!r}")
        pieces = [text[begin : begin + 4] for begin in range(0, len(text), 4)]
        sources = ("datastore", "target")
        return FakeStream(
            [FakePiece(piece, tuple(piece.encode()), tuple(sources[i % 2] for _ in piece.encode()))
             for i, piece in enumerate(pieces)], 500.0,
        )  # fmt: skip


def open_engine(config: Any, live: Any = None) -> TerminalEngine:
    engine = TerminalEngine([])
    engine.config = config
    engine.model.chat_template = "fake"
    engine.model.vocabulary.piece = lambda token: bytes([token])
    return engine


if __name__ == "__main__":
    from rest_local.cli import main, opening

    opening.open_engine = open_engine
    sys.argv[0] = "rest-local"
    main.main()
