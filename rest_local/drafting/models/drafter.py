"""The interface of what drafts by computing: a draft model, MTP layers, an EAGLE-3 head, and a block drafter.

- A `Drafter` belongs to one target context. It has a `DraftText` for each text that it follows, which is one for each
  slot of the target.
- Prefill: a draft model evaluates the text by itself when that pays. A head reads the target's features of each token,
  which `Drafter.observe` takes after each forward pass of the target.
- Draft: `Drafter.answer` gives the likely tokens after any number of drafted paths of any number of texts. The caller
  has decided that the passes are worth their time.
- A block drafter answers several depths of a path in one pass (`Drafter.depths`, `DraftText.following`).
- Accept and roll back: the owner of a text appends accepted tokens to it. `DraftText.restart` and `rewind` take back.
- A failure costs drafts, never an answer: it is logged once, and the drafter is not used again (`give_up`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.llama.context import Context
from rest_local.llama.model import Model

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("rest_local.drafting")

TOP_K = 3  # Candidates of one query.
CONFIDENT = 0.9  # Above this probability the first candidate is the only one.
BLOCK = 1024  # A row of logits is searched in blocks of this size.
NEGLIGIBLE = 12.0  # Blocks that lie so many nats below the likeliest token are left out.
BATCH = 512  # Tokens in one pass of a drafter over a text.
INLINE = 16  # Missing tokens of a text up to this number, a branch, are evaluated together with a query, in one pass.
BRANCHES = 4  # Paths of one text that can be continued at the same time: sequence ids for each text.

Likely = tuple[int, float]  # A token and its probability.


class Query(NamedTuple):
    """A question: what follows the drafted `path` after the text?

    Every prefix of a path was a query before, or is one now.
    """

    text: DraftText
    path: tuple[int, ...]


class Evaluated(NamedTuple):
    """Tokens of a text that the target has just evaluated and committed, at the positions from `start` on.

    `rows` has their places in the target's last batch.
    """

    text: DraftText
    start: int
    tokens: Sequence[int]
    rows: Sequence[int]


class DraftText:
    """One text, as a drafter sees it.

    `step_ms` is the time spent since `begin_step`, and `query_ms` the part for answers. The text is a list of its
    owner, which only grows between two calls of `restart`. `following` says what a block that was drafted in this step
    has after a path, without a pass; None if each path is asked for.
    """

    following: Callable[[tuple[int, ...]], Sequence[Likely]] | None = None

    def __init__(self, drafter: Drafter) -> None:
        """Begin an empty text of `drafter`."""
        self.drafter = drafter
        self.step_ms = self.query_ms = 0.0
        self._text: Sequence[int] = ()
        self._lost_ms = 0.0  # What steps lost that passed without the drafter, because tokens are missing.

    @property
    def can_ask(self) -> bool:
        """Return True if there is room for one more token, and the drafter has not failed."""
        raise NotImplementedError

    def begin_step(self) -> None:
        """Reset the times. Drafted paths of the last step are forgotten."""
        self.step_ms = self.query_ms = 0.0

    def restart(self, text: Sequence[int], same: int) -> None:
        """Set another text, which shares its first `same` tokens with the old one."""
        self._text, self._lost_ms = text, 0.0

    def pays_by_now(self, saves_ms: float, price_ms: float) -> bool:
        """Count a step that loses `saves_ms`. Return True once such steps have lost the price of catching up."""
        self._lost_ms += saves_ms
        return self._lost_ms >= price_ms

    def count_part(self, begun: float, is_last: bool) -> None:
        """Count the time of evaluating a part of the missing tokens, which began at `begun`."""
        self.step_ms += 1e3 * (time.perf_counter() - begun)
        if is_last:
            self._lost_ms = 0.0

    def rewind(self, n: int) -> None:
        """Note that the target holds only the first `n` tokens of the text any more."""

    def share(self, other: DraftText, n: int) -> None:
        """Note that the target took the first `n` tokens from the cells of another text."""

    def caught_up(self, saves_ms: float) -> bool:
        """Return True if the next query can be answered at once.

        It is called once a step and may evaluate missing tokens. A step without the drafter loses `saves_ms`.
        """
        raise NotImplementedError

    def passes(self, path: Sequence[int]) -> int:
        """Return the passes until the query for `path` is answered; 0 if that cannot be done in this step."""
        raise NotImplementedError


class Drafter:
    """A model and its own context, for one context of a target. Only the thread that decodes may use it.

    Use `with` or `close`, before the target's context is closed. If it has `failed`, it is not used any more. `times`
    says what a pass takes. A pass answers `depths` depths of a path at once.
    """

    name: str
    depths = 1
    failed = False
    model: Model
    context: Context
    times: PassTimes

    @property
    def path(self) -> str:
        """Return the file that it was loaded from."""
        return str(self.model.path)

    def text(self) -> DraftText:
        """Make a new, empty text."""
        raise NotImplementedError

    def pass_ms(self, n: int) -> float:
        """Return the measured milliseconds of a pass that answers `n` queries."""
        return self.times.at(n)

    def observe(self, evaluated: Sequence[Evaluated]) -> None:
        """Take what the target's last forward pass gives, before the next one overwrites it. Raises nothing."""

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        """Return the likely tokens after each path, the likeliest first; none for a query that cannot be answered.

        It takes one pass, or more where a path needs them (`DraftText.passes`).
        """
        raise NotImplementedError

    def give_up(self, why: str, error: Exception | None = None) -> None:
        """Stop using it, with one warning."""
        if not self.failed:
            self.failed = True
            log.warning("%s %s %s; going on without it", self.name, self.path, why, exc_info=error)

    def close(self) -> None:
        """Free its memory. A second call does nothing."""
        self.context.close()
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def share_time(texts: Collection[DraftText], ms: float) -> None:
    """Count the time of a pass over these texts, in equal shares."""
    for text in texts:
        text.step_ms += ms / len(texts)
        text.query_ms += ms / len(texts)


class PassTimes:
    """Milliseconds of a pass by its number of rows: a line, updated by real passes."""

    def __init__(self, one: float, further: float) -> None:
        """Begin with the time of a pass of one row, and of each `further` row."""
        self.one, self.further = one, further

    def at(self, n: int) -> float:
        """Return the time of a pass of `n` rows."""
        return self.one + self.further * max(n - 1, 0)

    def learn(self, n: int, ms: float) -> None:
        """Learn that a pass of `n` rows took `ms`.

        Other programs only make a pass slower, so a quick one counts much more, and a slow one as at most four times
        what was expected.
        """
        if not (expected := self.at(n)):
            return
        share = (0.5 if ms < expected else 0.05) * (min(ms, 4.0 * expected) / expected - 1.0)
        self.one *= 1.0 + share
        self.further *= 1.0 + share


def likeliest(logits: NDArray[np.float32]) -> list[Likely]:
    """Return up to TOP_K tokens of one row of logits, float32 [n_vocab], the likeliest first, with probabilities.

    Blocks whose largest logit is more than NEGLIGIBLE below the largest of all are left out of the sum: 0.035 ms for
    152 000 tokens, 0.2 ms if no block can be left out. Raises FloatingPointError for a row without finite numbers.
    """
    whole = len(logits) // BLOCK * BLOCK
    blocks, rest = logits[:whole].reshape(-1, BLOCK), logits[whole:]
    largest = blocks.max(axis=1)
    highest = max(float(each.max()) for each in (largest, rest) if len(each))
    if not np.isfinite(highest) or np.isnan(rest).any() or np.isnan(largest).any():
        raise FloatingPointError("values that are not numbers")
    kept = np.flatnonzero(largest > highest - NEGLIGIBLE)
    values = np.concatenate((blocks[kept].ravel(), rest))
    np.exp(values - highest, out=values)
    total = float(values.sum())
    found: list[Likely] = []
    while len(found) < TOP_K:
        at = int(values.argmax())
        block, offset = divmod(at, BLOCK)
        token = int(kept[block]) * BLOCK + offset if block < len(kept) else whole + at - len(kept) * BLOCK
        found.append((token, float(values[at]) / total))
        if found[-1][1] > CONFIDENT:
            break
        values[at] = -1.0
    return found
