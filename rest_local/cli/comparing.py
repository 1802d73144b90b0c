"""Compare plain and drafted answers of one engine to a question and to an edit of some code: the demo.

- The edit changes a name in a passage of the user's file, else of one of the standard library. The first third of the
  answer is given, because a small model that is asked to repeat code often writes something else.
- The first pair of runs is shown and warms the caches. Showing text takes time on the same cores, so later pairs are
  run silently and timed. Only if there is no time for them does the first pair count.
- The speed-up is the median of the ratios within pairs.
- An answer that repeats itself flatters every drafter, so the result says when one does.
"""

from __future__ import annotations

import keyword
import math
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rest_local.errors import OptionError
from rest_local.llama.options import Sampling

if TYPE_CHECKING:
    from rest_local.cli.demo import Screen
    from rest_local.decoding.engine import Engine, Result

QUESTION = "Give me three tips for writing clear code."
KEYWORDS = frozenset(keyword.kwlist) | {"self", "this", "function", "const", "static", "void", "public", "private"}
DEFINITION = re.compile(r"(?m)^(class|def|export|fn|func|function|impl|public|struct)\b")
PASSAGE = 1500  # characters to edit, some 400 tokens
SIDES = ("plain", "drafted")
CONTEXT = 2048
LOOPING = 0.3  # an answer with a larger share of repeated n-grams repeats itself
NGRAM = 8
DISTURBED = 1.3  # largest ratio of plain runs; on a quiet machine they differ by 1 to 5%


@dataclass(frozen=True)
class Prompt:
    """A prompt. `begun` is the beginning of the answer. With `chat` the text goes through the chat template."""

    title: str
    text: str
    begun: str = ""
    chat: bool = True


def prompts(code: Path | None, chat: bool) -> list[Prompt]:
    """Return the question, and the edit of a passage of a file, by default `queue.py`: its most common name is changed.
    Without a chat template the model continues both texts. Raises OptionError if there is nothing to edit, and
    OSError.
    """
    path = code or Path(sysconfig.get_paths()["stdlib"]) / "queue.py"
    shown = passage(path.read_text(encoding="utf-8", errors="replace"))
    names = Counter(name for name in re.findall(r"\b[^\W\d]\w{3,}\b", shown) if name not in KEYWORDS)
    if not names:
        raise OptionError(f"--code {path}: holds no name to change")
    old = names.most_common(1)[0][0]
    new = f"new_{old}"
    changed = re.sub(rf"\b{old}\b", new, shown)
    # The new name occurs once. The newline is left out, because vocabularies join it with the next indentation.
    at = changed.find("\n", max(len(changed) // 3, changed.index(new)))
    title, begun = f"{path.name}: rename {old} to {new}", changed[: at if at >= 0 else None]
    if chat:
        asked = f"Rename `{old}` to `{new}` in this code:\n\n```\n{shown}```"
        return [Prompt(QUESTION, QUESTION), Prompt(title, asked, f"```\n{begun}")]
    tips = "Three tips for writing clear code"
    edit = f"{shown}\n\nThe same code, with {old} renamed to {new}:\n\n"
    return [Prompt(tips, f"{tips}\n\n1.", chat=False), Prompt(title, edit, begun, chat=False)]


def passage(text: str) -> str:
    """Return about PASSAGE characters of `text`, in whole lines, from its first definition on or else from its top."""
    found = DEFINITION.search(text)
    cut = text[found.start() if found else 0 :][:PASSAGE]
    return cut[: cut.rfind("\n") + 1] or f"{cut}\n"


@dataclass(frozen=True)
class Side:
    """The timed runs of one side: the last result, and the tokens per second of each run."""

    result: Result
    speeds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return median(self.speeds)

    @property
    def drafted_share(self) -> float:
        """Return the share of the tokens that were drafted, 0 to 1."""
        return self.result.draft.accepted / max(len(self.result.tokens), 1)

    def to_json(self) -> dict[str, Any]:
        draft = self.result.draft.to_dict()
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "runs": [round(speed, 2) for speed in self.speeds],  # shows how noisy the machine was
            **{name: draft[name] for name in ("mat", "accepted", "drafted", "by_source")},
            "n_tokens": len(self.result.tokens),
            "repeated_8grams": round(repeated_share(self.result.tokens), 4),
        }


@dataclass(frozen=True)
class Comparison:
    """The comparison for one prompt. `same` counts the common tokens, None if all runs give the same ones."""

    prompt: Prompt
    plain: Side
    drafted: Side
    same: int | None
    speedup: float

    @property
    def disturbed(self) -> bool:
        """Return True if plain runs of the same tokens differ so much that other programs must have run."""
        return max(self.plain.speeds) > DISTURBED * min(self.plain.speeds)

    @property
    def repeats(self) -> bool:
        """Return True if the plain answer repeats itself."""
        return repeated_share(self.plain.result.tokens) > LOOPING

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.prompt.title,
            "identical": self.same is None,
            "speedup": round(self.speedup, 3),
            "text": self.drafted.result.text,
            "plain": self.plain.to_json(),
            "drafted": self.drafted.to_json(),
        }


def compare(
    engine: Engine,
    prompt: Prompt,
    *,
    max_tokens: int,
    repeats: int,
    display: Screen | None = None,
    seconds: float = math.inf,
) -> Comparison:
    """Measure a prompt by up to `2 * repeats + 2` runs; after `seconds` no pair begins. Raises as `Engine.generate`."""
    over = time.perf_counter() + seconds
    if display is not None:
        display.begin(prompt)
    shown = {side: run(engine, prompt, side, max_tokens, display) for side in SIDES}
    if display is not None:
        display.end()
    timed: list[dict[str, Result]] = []
    while len(timed) < repeats and time.perf_counter() < over:
        timed.append({side: run(engine, prompt, side, max_tokens) for side in SIDES})
    answers = [pair[side].tokens for pair in [shown, *timed] for side in SIDES]
    timed = timed or [shown]
    speeds = {side: tuple(pair[side].timings.predicted_per_second for pair in timed) for side in SIDES}
    plain, drafted = (Side(timed[-1][side], speeds[side]) for side in SIDES)
    return Comparison(
        prompt=prompt,
        plain=plain,
        drafted=drafted,
        same=None if all(answer == answers[0] for answer in answers) else _common(answers),
        speedup=median(fast / (slow or 1.0) for slow, fast in zip(plain.speeds, drafted.speeds, strict=True)),
    )


def _common(answers: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all answers begin with."""
    together = list(zip(*answers, strict=False))
    return next((at for at, tokens in enumerate(together) if len({*tokens}) > 1), len(together))


def run(engine: Engine, prompt: Prompt, side: str, max_tokens: int, display: Screen | None = None) -> Result:
    """Decode one answer, greedily."""
    asked = engine.chat_prompt([{"role": "user", "content": prompt.text}]) if prompt.chat else prompt.text
    policy = "off" if side == "plain" else None
    stream = engine.generate(asked + prompt.begun, max_tokens=max_tokens, sampling=Sampling(), policy=policy)
    for piece in stream:
        if display is not None:
            display.piece(side, piece)
    return stream.result


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share, 0 to 1, of the sequences of NGRAM tokens that occur earlier in `tokens`; 0 for too few."""
    grams = list(zip(*(tokens[i:] for i in range(NGRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
