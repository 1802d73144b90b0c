"""The long form of the self-test: every combination of settings on this machine, how exact it is and what it costs.

Contract: a model goes in; a row comes out for each combination of flash attention, type of the cache and number of
threads that llama.cpp accepts, with a comparison for chains and trees, alone and beside another sequence in the same
cells, and the time of a plain step and of one of 16 tokens. A row is compared with plain decoding in its own settings.
Bounded in time: what was left out is counted. Chooses nothing; `tuning` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rest_local.calibration.exactness import Comparison, Drafts, Logits, compare_drafts, rows_alone
from rest_local.calibration.timing import DecodeProbe
from rest_local.calibration.tuning import ROLLBACK, capability_of, self_test_text, settings_for
from rest_local.errors import ModelError
from rest_local.kv_cache.backend import Capability
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import default_threads
from rest_local.llama.model import Model
from rest_local.llama.options import CACHE_TYPES, FLOAT_CACHE_TYPES, ModelOptions

SECONDS = 120.0  # for the whole survey
SHARE = 0.6  # of a setting's part of them that the comparisons may take; the rest is for context and price
LONGEST_TEXT, SHORTEST_TEXT = 256, 24
TELLING_TEXT = 96  # some settings differ only from their 64th cell on: rather leave some out than cut all short
LARGEST_PART = 0.25  # of the whole time for one setting, so that a large model shows several
PLAIN_STEPS = 8.0  # what a token of text costs: alone once, and a part of a step in each of four comparisons
DRIVER_MS = 3.0  # and outside of llama.cpp
N_CTX = 1024
PRICE_CONTEXT = 256  # tokens in the cells when steps are timed
STEP = 16
REPEATS = 3

Progress = Callable[[str, int, int], None]  # what is tried now, its number from 1, how many there are


@dataclass
class Case:
    """One kind of draft in one setting."""

    drafts: Drafts
    neighbours: bool
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"drafts": self.drafts, "neighbours": self.neighbours, **self.comparison.to_dict()}


@dataclass
class Setting:
    """One combination. `plain_ms`, `step_ms`: a step of 1 and of 16 tokens; `plain`, `step`: relative to the fastest of
    all settings. `refused`: what llama.cpp said where it cannot compute so.
    """

    flash_attention: bool
    cache_type_k: str
    cache_type_v: str
    threads: int
    plain_ms: float = 0.0
    step_ms: float = 0.0
    plain: float = 0.0
    step: float = 0.0
    cases: list[Case] = field(default_factory=list)
    refused: str = ""

    @property
    def name(self) -> str:
        """Flash attention, cache and threads in a few words."""
        return f"flash attention {'on' if self.flash_attention else 'off'}, {self.cache} cache, {self.threads} threads"

    @property
    def cache(self) -> str:
        """The type, both where K and V differ."""
        same = self.cache_type_k == self.cache_type_v
        return self.cache_type_k if same else f"{self.cache_type_k}/{self.cache_type_v}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "cases": [case.to_dict() for case in self.cases]}


@dataclass
class Survey:
    """What was measured. `drafting`: what the model can verify at all, and why. `left_out`: settings for which there
    was no time.
    """

    drafting: str
    reason: str
    settings: list[Setting]
    left_out: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "drafting": self.drafting,
            "reason": self.reason,
            "settings": [setting.to_dict() for setting in self.settings],
            "left_out": self.left_out,
            "seconds": round(self.seconds, 1),
        }


def survey(
    model: Model, threads: int | None = None, seconds: float = SECONDS, progress: Progress | None = None
) -> Survey:
    """Measures all that the model's options leave open. `threads`: beside one; None for all cores.

    Takes `seconds` at most, and the time of one more setting. Raises ModelError where no setting can be computed.
    """
    begun = time.perf_counter()
    n_ctx = min(N_CTX, model.n_ctx_train or N_CTX)
    wanted = settings_for(model.options, n_ctx, 0)
    if model.is_recurrent or model.is_hybrid:
        wanted = replace(wanted, n_branches=1, n_rs_seq=ROLLBACK)
    planned = list(combinations(wanted, model.options, threads or default_threads()))
    text = self_test_text(model, n_ctx)[:LONGEST_TEXT]
    result = Survey("none", "", [], 0, 0.0)
    for number, settings in enumerate(planned, 1):
        left = seconds - (time.perf_counter() - begun)
        if left <= 0:
            result.left_out = len(planned) - number + 1
            break
        setting = Setting(settings.flash_attention, settings.cache_type_k, settings.cache_type_v, settings.threads)
        if progress:
            progress(setting.name, number, len(planned))
        part = left / (len(planned) - number + 1)
        capability = _measure(model, settings, setting, text, part, max(part, LARGEST_PART * seconds))
        if capability:
            result.drafting, result.reason = capability.kind, capability.reason
        result.settings.append(setting)
    _relate(result.settings)
    result.seconds = time.perf_counter() - begun
    return result


def combinations(wanted: ContextSettings, options: ModelOptions, threads: int) -> Iterator[ContextSettings]:
    """Every combination that `options` leaves open; those of all threads first. A quantized V needs flash attention."""
    flashes = [options.flash_attention == "on"] if options.flash_attention != "auto" else [True, False]
    seen: list[ContextSettings] = []
    for count in dict.fromkeys((threads, 1)):
        for flash in flashes:
            for cache_type in CACHE_TYPES:
                settings = replace(
                    wanted,
                    flash_attention=flash,
                    cache_type_k=options.cache_type_k or cache_type,
                    cache_type_v=options.cache_type_v or cache_type,
                    threads=count,
                )
                if (flash or settings.cache_type_v in FLOAT_CACHE_TYPES) and settings not in seen:
                    seen.append(settings)
                    yield settings


def _measure(
    model: Model, settings: ContextSettings, setting: Setting, text: Sequence[int], seconds: float, most: float
) -> Capability | None:
    """Fills in one setting in `seconds`, up to `most` for a telling length; None where llama.cpp refuses it."""
    try:
        context = Context(model, replace(settings, n_slots=2))
    except ModelError as error:
        setting.refused = str(error)
        return None
    with context:
        capability = capability_of(model, context, exact=False)
        setting.plain_ms, setting.step_ms = _price(context, text)
        token_ms = PLAIN_STEPS * setting.plain_ms + DRIVER_MS
        affordable, telling = int(1e3 * SHARE * seconds / token_ms), int(1e3 * SHARE * most / token_ms)
        part = text[: max(SHORTEST_TEXT, affordable, min(TELLING_TEXT, telling))]
        if capability.kind != "none":
            setting.cases = list(_cases(context, part, capability))
    return capability


def _cases(context: Context, text: Sequence[int], capability: Capability) -> Iterator[Case]:
    reference: Logits = rows_alone(context, text)
    kinds: tuple[Drafts, ...] = ("chains", "trees") if capability.kind == "tree" else ("chains",)
    for drafts in kinds:
        for neighbours in (False, True):
            compared = compare_drafts(context, text, reference, drafts, capability.longest, neighbours)
            yield Case(drafts, neighbours, compared)


def _price(context: Context, text: Sequence[int]) -> tuple[float, float]:
    """Milliseconds of a plain step and of one of STEP tokens: the best of a few."""
    probe = DecodeProbe(context, text)
    length = min(PRICE_CONTEXT, context.n_ctx // 2)
    size = min(STEP, context.max_outputs)
    probe(size, length)  # the first decode of a size also builds its graph
    try:
        return min(probe(1, length).ms for _ in range(REPEATS)), min(probe(size, length).ms for _ in range(REPEATS))
    finally:
        context.clear()


def _relate(settings: Sequence[Setting]) -> None:
    """Prices relative to the fastest."""
    measured = [setting for setting in settings if not setting.refused]
    if not measured:
        return
    plain, step = min(s.plain_ms for s in measured), min(s.step_ms for s in measured)
    for setting in measured:
        setting.plain, setting.step = setting.plain_ms / plain, setting.step_ms / step
