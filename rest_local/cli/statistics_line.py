"""One line about the speed of an answer: `142 tokens/s, 2.3 x plain, 61% from mycode`.

- tokens/s: tokens of the answer by the time from its first step to its last; evaluating the prompt is not in it.
- x plain: what plain decoding of the same answer would have taken, by what the answer took (`Result.speedup`). It is
  an estimate, left out where the time of a plain step is not known yet; `rest-local demo` runs both.
- the percentage: tokens of the answer that were drafted and accepted, by source where there are several.

Pure functions of a `Result`; knows nothing about terminals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Result

PLAIN = "target"  # the source of a token that was not drafted
RELAXED = "~"  # ends the name of a source where only relaxed verification let the token pass
NAMES = {
    "model": "the draft model",
    "grammar": "the grammar",
    "prediction": "the prediction",
    "logits": "recycled logits",
    "edit": "the edited text",
}


def line_of(engine: Engine, result: Result) -> str:
    """The line about an answer of this engine."""
    return statistics_line(result, [store.path.name for store in engine.datastores])


def statistics_line(result: Result, datastores: Sequence[str] = ()) -> str:
    """The line about an answer. `datastores`: names of those that were open; the name of a single one stands in the
    place of `datastore`.
    """
    parts = [f"{_number(result.timings.predicted_per_second)} tokens/s"]
    if result.speedup is not None:
        parts.append(f"{result.speedup:.1f} x plain")
    return ", ".join([*parts, drafted_share(result, datastores)])


def drafted_share(result: Result, datastores: Sequence[str] = ()) -> str:
    """`61% from mycode`, `61% from mycode 40%, context 21%`, or `nothing drafted`: of the tokens of the answer."""
    counts = Counter(source.rstrip(RELAXED) for source in result.sources)
    total = sum(counts.values())
    del counts[PLAIN]
    drafted = sum(counts.values())
    if not drafted:
        return "nothing drafted" if not result.draft.drafted else "no draft accepted"
    names = {**NAMES, "datastore": datastores[0] if len(datastores) == 1 else "datastores"}
    shares = [(names.get(source, source), count / total) for source, count in counts.most_common()]
    if len(shares) == 1:
        return f"{drafted / total:.0%} from {shares[0][0]}"
    return f"{drafted / total:.0%} from " + ", ".join(f"{name} {share:.0%}" for name, share in shares)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
