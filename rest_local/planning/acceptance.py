"""The acceptance rate of drafted tokens, learned online: by evidence cell, corrected by the tokens, kept across runs.

- `Acceptance` maps a cell (`rest_local.drafting.candidates`) to a probability. The raw share of rows that agree is
  over-confident for a context that was seen once: 3% of such drafts were accepted (docs/DESIGN.md section 5). So hits
  are counted per cell, a cell with few counts backs off to the cells of the same source, length and share (its
  marginal), and a marginal backs off to the shipped prior. Counts decay, so that the estimate follows the text.
- `priors.json` holds the shipped priors. `python -m benchmarks priors` writes it from text that no benchmark tests, and
  the file says how much.
- `TokenCalibrator` corrects these estimates by the tokens themselves: a logistic regression that is learned online, of
  the candidates below a node and the model's token there, whether they were submitted or not. It adds five weights to
  the log-odds of the evidence, each with its own step size (AdaGrad): of the token; of the token after the last token;
  of the token after the last but one; of the last token, whatever follows; and of the bucket of the odds, the sum of
  all estimates at the node (above 1 if sources propose different tokens), and the number of sources that propose the
  token. Log loss on recorded answers from a cold start, for the first and the second half of the answers, without and
  with it: HumanEval with a datastore 0.221 and 0.210, with 0.183 and 0.168; chat with history 0.175 and 0.178, with
  0.161 and 0.157; MT-Bench 0.336 and 0.346, with 0.310 and 0.311.
- `recall` reads the counts of earlier runs when an engine opens, `remember` adds those of this run when it closes.
  There is one file for each model and vocabulary, and a lock that all files of a directory share. No error there is
  fatal: a damaged file, or one with other evidence cells, is renamed aside (`NAME.damaged-1`) with one warning; a file
  that cannot be read, locked or written costs one warning.

The module knows nothing about models or text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from math import exp, log, sqrt
from pathlib import Path

from rest_local.drafting.candidates import (
    CELLS_PER_SOURCE,
    LENGTHS,
    N_CELLS,
    N_LENGTHS,
    N_ROWS,
    N_SHARES,
    ROWS,
    SHARES,
    SOURCES,
    Merged,
    PrecedingBigram,
    grammar_rates,
    model_rates,
)
from rest_local.drafting.growth import Calibrated
from rest_local.drafting.recycled import logits_rates
from rest_local.errors import DatastoreLocked, DatastoreUnwritable
from rest_local.paths import write_atomically
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import sealed

CELL_STRENGTH = 8.0  # observations that the estimate of the marginal counts for
MARGINAL_STRENGTH = 12.0  # observations that the prior counts for
MAX_PRIOR = 0.99  # the largest estimate of a cell without counts
HALVE_AT = 400.0  # observations at which a cell halves its counts
PRIORS = Path(__file__).with_name("priors.json")
UNKNOWN = 0.2  # prior if the file has another layout: never in a release, only while the layout is being changed

_N_MARGINALS = len(SOURCES) * N_LENGTHS * N_SHARES


def _marginal_of(cell: int) -> int:
    rest, share = divmod(cell, N_SHARES)
    return (rest // N_ROWS) * N_SHARES + share


Counts = Mapping[int, tuple[float, float]]  # by cell: (hits, proposals)


class Acceptance:
    """Beta counts per cell with decay. Not thread safe. Holds lists of a few thousand floats."""

    def __init__(self) -> None:
        self._marginal, self._prior, self._lift = _shipped_tables()
        self._hits = [0.0] * N_CELLS
        self._seen = [0.0] * N_CELLS
        self._new_hits = [0.0] * N_CELLS  # since the last `drain`, without decay
        self._new_seen = [0.0] * N_CELLS
        self._marginal_hits = [0.0] * _N_MARGINALS
        self._marginal_seen = [0.0] * _N_MARGINALS
        self._known: dict[int, float] = {}  # estimates since the last change

    def estimate(self, cell: int) -> float:
        """Probability in (0, 1) that a candidate with this evidence is the model's token. Takes under 1 us, and 0.1 us
        if the estimate is cached.
        """
        known = self._known.get(cell)
        if known is not None:
            return known
        marginal = self._marginal[cell]
        coarse = (self._marginal_hits[marginal] + MARGINAL_STRENGTH * self._prior[marginal]) / (
            self._marginal_seen[marginal] + MARGINAL_STRENGTH
        )
        coarse = min(coarse * self._lift[cell], MAX_PRIOR)
        known = (self._hits[cell] + CELL_STRENGTH * coarse) / (self._seen[cell] + CELL_STRENGTH)
        self._known[cell] = known
        return known

    def learn(self, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Count (cell, whether it was the model's token) for every proposal, submitted or not."""
        self._known.clear()
        for cell, hit in outcomes:
            marginal = self._marginal[cell]
            self._seen[cell] += 1.0
            self._marginal_seen[marginal] += 1.0
            self._new_seen[cell] += 1.0
            if hit:
                self._hits[cell] += 1.0
                self._new_hits[cell] += 1.0
                self._marginal_hits[marginal] += 1.0
            if self._seen[cell] >= HALVE_AT:
                self._seen[cell] /= 2
                self._hits[cell] /= 2
            if self._marginal_seen[marginal] >= 4 * HALVE_AT:
                self._marginal_seen[marginal] /= 2
                self._marginal_hits[marginal] /= 2

    def drain(self) -> Counts:
        """The counts since the last call, or since the start, to be stored for another run. They do not decay."""
        new = {cell: (self._new_hits[cell], seen) for cell, seen in enumerate(self._new_seen) if seen}
        self._new_hits, self._new_seen = [0.0] * N_CELLS, [0.0] * N_CELLS
        return new

    def add(self, counts: Counts) -> None:
        """Add counts of earlier runs. They weigh and decay like those of this run, but `drain` does not return them."""
        self._known.clear()
        for cell, (hits, seen) in counts.items():
            self._hits[cell] += hits
            self._seen[cell] += seen
            self._marginal_hits[self._marginal[cell]] += hits
            self._marginal_seen[self._marginal[cell]] += seen

    def seen(self, cell: int) -> float:
        """The number of observations in a cell."""
        return self._seen[cell]


@cache
def _shipped_tables() -> tuple[list[int], list[float], list[float]]:
    """By cell its marginal, by marginal the prior rate, by cell its rate over that prior. All instances share the lists
    and do not change them.
    """
    rates, marginals = shipped_rates(), [_marginal_of(cell) for cell in range(N_CELLS)]
    priors = [0.0] * _N_MARGINALS  # the mean rate of the cells of a marginal
    for marginal, rate in zip(marginals, rates, strict=True):
        priors[marginal] += rate / N_ROWS
    return marginals, priors, [rate / priors[m] for rate, m in zip(rates, marginals, strict=True)]


@cache
def shipped_rates() -> tuple[float, ...]:
    """Prior probability by cell, N_CELLS of them. Takes a millisecond, once per process."""
    data = json.loads(PRIORS.read_text("utf-8")) if PRIORS.exists() else {}
    if (data.get("lengths"), data.get("rows"), data.get("shares")) != (N_LENGTHS, N_ROWS, N_SHARES):
        return (UNKNOWN,) * (len(SOURCES) * CELLS_PER_SOURCE)
    rates = {
        "edit": data["rates"]["prediction"],
        **data["rates"],
        "model": model_rates(),
        "grammar": grammar_rates(),
        "logits": logits_rates(),
    }
    return tuple(rate for source in SOURCES for rate in rates[source])


SLOTS = 1 << 18  # slots for the weights of tokens; weights that collide share one. Chat with 1 << 16: 0.3% fewer tokens
RATE = 0.5  # 0.3 to 0.7 are within half a percent of log loss
LEAST = 1e-5  # smaller squared errors are not learned from
DAMPING = 1.0  # squared error that a weight starts with
HALVES = 16  # buckets of the odds: half a nat each, from -8 to 8
QUARTERS = 8  # buckets of the sum of all estimates: a quarter each, up to 2
MOST_SOURCES = 4  # buckets of the number of sources; the last one holds all larger numbers

_MASK = SLOTS - 1
_SPREAD, _LAST, _BEFORE = 0x237B1, 0x2CA6B, 0x1AE35  # odd and below SLOTS, so that neighbouring ids lie far apart
_LINE = QUARTERS + 1
_ODDS = 2 * HALVES + 1
_LARGEST = HALVES / 2
_MIDDLE = HALVES + 0.5


class TokenCalibrator:
    """Not thread safe. Holds 2 lists of 262 000 floats: 4 MB, and 48 bytes for each learned weight."""

    def __init__(self) -> None:
        n = SLOTS + MOST_SOURCES * _ODDS * _LINE
        self._weights = [0.0] * n
        self._squares = [DAMPING] * n

    def calibrate(self, preceding: PrecedingBigram, candidates: Merged) -> list[Calibrated]:
        """The corrected probability of each of `candidates`. Takes 1 us per node and 0.6 us per candidate. Candidates
        with little evidence are corrected too: without, HumanEval loses 2% of its tokens per step.
        """
        weights = self._weights
        before, last = preceding[0] * _BEFORE + 1, preceding[1] * _LAST + 2
        after = last & _MASK
        common = weights[after]
        total = 0.0  # a loop: most nodes have one candidate, for which `sum` and `min` take longer than the rest
        for found in candidates.values():
            total += found[0]
        by_total = SLOTS + (int(4.0 * total) if total < QUARTERS / 4 else QUARTERS)
        calibrated: list[Calibrated] = []
        for token, (estimate, _, members) in candidates.items():
            odds = log(estimate / (1.0 - estimate))
            own = token * _SPREAD
            alone, pair, apart = own & _MASK, own + last & _MASK, own + before & _MASK
            half = int(2.0 * odds + _MIDDLE) if -_LARGEST < odds < _LARGEST else 2 * HALVES if odds > 0.0 else 0
            bucket = by_total + (half + _ODDS * min(len(members), MOST_SOURCES - 1)) * _LINE
            odds += common + weights[alone] + weights[pair] + weights[apart] + weights[bucket]
            calibrated.append((token, 1.0 / (1.0 + exp(-odds)), (alone, pair, apart, after, bucket)))
        return calibrated

    def learn(self, calibrations: Iterable[tuple[Iterable[Calibrated], int]]) -> None:
        """Learn from the candidates that were calibrated at some nodes, and the model's token at each."""
        weights, squares = self._weights, self._squares
        for calibrated, right in calibrations:
            for token, probability, used in calibrated:
                error = (token == right) - probability
                square, step = error * error, RATE * error
                if square < LEAST:
                    continue
                for slot in used:
                    squares[slot] = sum_ = squares[slot] + square
                    weights[slot] += step / sqrt(sum_)


_logger = logging.getLogger("rest_local.planning")

MAGIC = "rest-local acceptance"
FORMAT = 1


def _layout(n_sources: int) -> str:
    return f"{n_sources * CELLS_PER_SOURCE} {SOURCES[:n_sources]} {LENGTHS} {ROWS} {SHARES}"


LAYOUT = _layout(len(SOURCES))
"""The meaning of a cell number; counts of another layout are useless."""

READABLE = {_layout(n) for n in range(1, len(SOURCES) + 1)}
"""Layouts of earlier versions, too: a source that is added takes the numbers after the last one."""

KEPT = HALVE_AT / 2  # observations of a cell in the file, at most

RECALLED = 20.0
"""Observations of a recalled cell, at most. Speed-up of replays in sessions of 3 (MT-Bench, 60 answers) and 5 (chat,
200 answers) with history on the CPU's curve: 1.067 and 1.009 without a file, 1.063 and 1.011 with 20 observations,
1.061 and 1.011 with 200; MT-Bench on a flat curve 1.457, 1.455 and 1.444. So the value matters little next to the
shipped priors, and a large one does harm if sessions differ."""

WAIT_S = 2.0  # for the lock
MAX_FILE = 1 << 22  # bytes


def recall(path: Path, acceptance: Acceptance) -> None:
    """Add the counts of earlier runs, if there are any. Takes a millisecond."""
    try:
        counts = _read(path)
    except ValueError as error:
        _check_again(path, error)
        return
    except OSError as error:
        _logger.warning("%s cannot be read (%s); the acceptance counts of earlier runs are not used", path, error)
        return
    acceptance.add({cell: _scaled(hits, seen, RECALLED) for cell, (hits, seen) in counts.items()})


def remember(path: Path, acceptance: Acceptance) -> None:
    """Add the counts since `recall` or the last call to the file. Takes a few milliseconds; waits for the lock."""
    new = acceptance.drain()
    if not new:
        return
    try:
        with locked(path.parent, WAIT_S, make=Files()):
            try:
                old = _read(path)
            except ValueError as error:
                _set_aside(path, error)
                old = {}
            write_atomically(path, _written(old, new), durable=True)
    except DatastoreLocked as error:
        _logger.warning("%s is locked by %s; the acceptance counts of this run are not stored", path, error.owner)
    except (DatastoreUnwritable, OSError) as error:
        cause = error.cause if isinstance(error, DatastoreUnwritable) else error
        _logger.warning("%s cannot be written (%s); the acceptance counts of this run are not stored", path, cause)


def _scaled(hits: float, seen: float, most: float) -> tuple[float, float]:
    """The same rate with at most `most` observations."""
    weight = min(1.0, most / seen)
    return hits * weight, seen * weight


def _written(old: Counts, new: Counts) -> bytes:
    """The file with the sums by cell, each scaled down to at most KEPT observations."""
    cells = {}
    for cell in sorted({*old, *new}):
        before, now = old.get(cell, (0.0, 0.0)), new.get(cell, (0.0, 0.0))
        hits, seen = _scaled(before[0] + now[0], before[1] + now[1], KEPT)
        cells[str(cell)] = [round(hits, 3), round(seen, 3)]
    return sealed({"magic": MAGIC, "format": FORMAT, "layout": LAYOUT, "cells": cells})


def _read(path: Path) -> dict[int, tuple[float, float]]:
    """The counts of a file; none if there is no file. Raises OSError, or ValueError with what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except FileNotFoundError:
        return {}
    try:
        fields = json.loads(data)
        digest = fields.pop("sha256")
        whole = bool(digest) and sealed(fields) == data
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ValueError("damaged") from error
    if not whole or len(data) > MAX_FILE:
        raise ValueError("damaged")
    if (fields.get("magic"), fields.get("format")) != (MAGIC, FORMAT):
        raise ValueError(f"format {str(fields.get('format'))[:20]} of {str(fields.get('magic'))[:40]!r}")
    if fields.get("layout") not in READABLE:
        raise ValueError("written by a version with other evidence cells")
    counts: dict[int, tuple[float, float]] = {}
    try:
        for number, (hits, seen) in fields["cells"].items():
            counts[int(number)] = float(hits), float(seen)
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError) as error:
        raise ValueError("no cells") from error
    for cell, (hits, seen) in counts.items():
        if not (0 <= cell < N_CELLS and 0 <= hits <= seen <= HALVE_AT and seen > 0):
            raise ValueError(f"counts {hits} of {seen} in cell {cell}")
    return counts


def _check_again(path: Path, error: ValueError) -> None:
    """Read the file again under the lock, because another process may have replaced it, and set it aside if needed."""
    try:
        with locked(path.parent, WAIT_S):
            try:
                _read(path)
            except ValueError as still:
                _set_aside(path, still)
    except (DatastoreLocked, DatastoreUnwritable, OSError):
        _logger.warning(
            "%s: %s, and cannot be set aside; the acceptance counts of earlier runs are not used", path, error
        )


def _set_aside(path: Path, error: ValueError) -> None:
    """Rename the file; the caller holds the lock."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    _logger.warning("%s: %s; set aside as %s, starting from no counts", path, error, aside.name)
