"""Choose how to compute, and what is known of its costs: settings and cost curve, kept per machine and model.

Contract: a model and what the user fixed go in, an open context with its `Tuning` comes out. Fast mode takes settings
by a rule, or those that `rest-local tune` found cheaper; exact mode the first in which the self-test finds no
difference (DESIGN.md section 4). A machine that is new is asked for a few steps only, and its curve estimated from
them: `rest_local.decoding.refinement` measures the rest later, `tune_thoroughly` now. The result is kept on disk per
model file, llama.cpp, machine and threads; a damaged or foreign file there is measured again, never fatal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.calibration.curves import estimated
from rest_local.calibration.exactness import Comparison, compare_chains, compare_trees
from rest_local.calibration.measuring import Measured, Progress, Timing, measure, quick
from rest_local.calibration.self_test import LEAST_ROWS, N_CTX, TEXT_TOKENS, SelfTest
from rest_local.calibration.threads import ThreadGovernor
from rest_local.calibration.timing import DecodeProbe, LoadMeter
from rest_local.errors import ModelError, OptionError
from rest_local.kv_cache.backend import Backend, Capability
from rest_local.llama import ladder, library
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import default_threads
from rest_local.llama.model import Model
from rest_local.llama.options import FLOAT_CACHE_TYPES, ModelOptions
from rest_local.paths import cache_dir, write_atomically

log = logging.getLogger("rest_local.tuning")
progress = log.getChild("progress")  # what takes a while, for people who wait for it

FORMAT = 7
CONTEXTS = (64, 512, 2048)  # lengths at which `tune_thoroughly` measures, where they fit
ATTENTION = 2.0  # what attention costs on a CPU, to the weights' multiplications: 2.2 were measured (0.5B, Xeon)
ROLLBACK = 16  # recurrent state snapshots to ask for: the longest chain such a model can take back
FAST = ((False, "f16"), (True, "f16"))  # flash attention, cache type; the rule for a CPU, a GPU the other way round
EXACT = ((True, "bf16"), (True, "q8_0"), (False, "f16"), (True, "f16"))
CHARACTERS = 16  # of real text, that are at least one token
SELF_TEST_TOKENS = 256
SELF_TEST_S = 2.0


@dataclass
class Tuning:
    """What was chosen and measured. `exact`: a whole self-test found no bit of difference. `unsuitable`: settings in
    which it found one, or that llama.cpp refuses. `estimate`: the shipped curve whose shape was taken; empty where
    all was measured.
    """

    settings: ContextSettings
    curve: CostCurve
    self_test: dict[str, Any]
    exact: bool
    measured_at: float = 0.0  # seconds since the epoch
    unsuitable: list[ContextSettings] = field(default_factory=list)
    estimate: str = ""
    path: Path | None = None
    seconds: float = 0.0  # that `tune` took in this process

    @property
    def final(self) -> bool:
        """Whether every price is certain, at the shortest and at a usual length; else it is provisional: used with
        caution, and measured further.
        """
        return self.curve.is_certain(0) and self.curve.is_certain(min(CONTEXTS[-1], self.settings.n_ctx))

    @property
    def age(self) -> float:
        """Seconds since the first measurement; 0 where the clock was set back since."""
        return max(0.0, time.time() - self.measured_at)

    def state(self) -> dict[str, Any]:
        """For people and for JSON: how far the curve can be trusted."""
        doubt = self.curve.uncertainty(0)
        return {
            "state": "final" if self.final else "provisional",
            "age_s": round(self.age, 1),
            "noise": round(self.curve.noise, 4),
            "uncertainty": {str(n): round(float(doubt[n - 1]), 3) for n in (2, 4, 8, 16, 64)},
            "estimated_from": self.estimate or None,
            "seconds": round(self.seconds, 3),
        }

    @property
    def rows_compared(self) -> int:
        """By the self-test."""
        return int(self.self_test.get("rows", 0))

    @property
    def testing(self) -> str:
        """How far the self-test of `--exact` is, in words; nothing where it is complete or can promise nothing."""
        known = self.self_test
        if not known or known.get("complete", True) or self.settings in self.unsuitable:
            return ""
        return f"the self-test has compared {known['rows']} of {known['rows_needed']} rows"

    def note_self_test(self, known: dict[str, Any]) -> None:
        """Take over what the self-test has found since (`SelfTest.to_dict`)."""
        self.self_test, self.exact = known, bool(known["exact"])
        if known["different"]:
            self.unsuitable.append(self.settings)

    def store(self) -> None:
        """Keep it, with what real steps have taught the curve. A cache that cannot be written costs time only."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self.path, self.to_json().encode())
        except OSError as error:
            log.warning("%s cannot be written (%s); the next start measures again", self.path, error)

    def to_json(self) -> str:
        return json.dumps({
            "format": FORMAT, "settings": self.settings.to_dict(), "curve": json.loads(self.curve.to_json()),
            "self_test": self.self_test, "exact": self.exact, "measured_at": self.measured_at, "final": self.final,
            "estimate": self.estimate,
            "unsuitable": [settings.to_dict() for settings in self.unsuitable],
        })  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """Raises ValueError where the text is not of this format."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("not a tuning of this version")
        try:
            settings = ContextSettings.from_dict(data["settings"])
            curve = CostCurve.from_json(json.dumps(data["curve"]))
            known = data["self_test"]
            enough = not known or Comparison.from_dict(known).rows >= LEAST_ROWS
            unsuitable = [ContextSettings.from_dict(each) for each in data["unsuitable"]]
            measured_at, estimate = float(data["measured_at"]), str(data["estimate"])
            if not isinstance(known, dict) or not math.isfinite(measured_at):
                raise ValueError("not a tuning: a self-test and a time are needed")
            exact = data["exact"] is True and enough
            return cls(settings, curve, known, exact, measured_at, unsuitable, estimate)
        except (KeyError, TypeError, AttributeError, OverflowError, OptionError) as error:
            raise ValueError(f"not a tuning: {error}") from error


def capability_of(model: Model, context: Context, exact: bool) -> Capability:
    """What drafts this model can verify in this context, and why."""
    if model.has_encoder:
        return Capability("none", "encoder-decoder models are decoded plainly", shares=False)
    if model.is_recurrent or model.is_hybrid:
        kind = "recurrent" if model.is_recurrent else "hybrid"
        if context.n_rs_seq > 0:
            reason = f"{kind} state can be rolled back {context.n_rs_seq} tokens"
            return Capability("chain", reason, context.n_rs_seq, shares=False)
        return Capability("none", f"{kind} state cannot be rolled back by this llama.cpp", shares=False)
    if exact:
        return Capability("chain", "exact: a rejected branch leaves holes that shift the attention's blocks")
    return Capability("tree", "full attention over removable cells")


def settings_for(
    options: ModelOptions, n_ctx: int, threads: int, n_slots: int = 1, n_cells: int | None = None
) -> ContextSettings:
    """What the user's options say about a context; flash attention and cache types are chosen by `tune`. Without
    `n_cells` every slot can have a whole context.
    """
    return ContextSettings(
        n_ctx=n_ctx,
        n_cells=n_ctx * n_slots if n_cells is None else n_cells,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_slots=n_slots,
        threads=threads,
        threads_batch=options.threads_batch,
        offload_kqv=options.kv_offload,
        rope=options.rope,
    )


def candidates(wanted: ContextSettings, options: ModelOptions, exact: bool) -> list[ContextSettings]:
    """The settings to choose from, the preferred first on a CPU: all that `options` leaves open. A quantized V needs
    flash attention.
    """
    result: list[ContextSettings] = []
    for flash, cache_type in EXACT if exact else FAST:
        cache_k, cache_v = options.cache_type_k or cache_type, options.cache_type_v or cache_type
        if options.flash_attention != "auto":
            flash = options.flash_attention == "on"
        settings = replace(wanted, flash_attention=flash, cache_type_k=cache_k, cache_type_v=cache_v)
        if (flash or cache_v in FLOAT_CACHE_TYPES) and settings not in result:
            result.append(settings)
    return result


def contexts_to_try(
    options: ModelOptions, n_ctx: int, threads: int, n_slots: int, n_cells: int | None, exact: bool
) -> list[ContextSettings]:
    """The contexts that may be made of a model whose kind is not known yet: what a child process tries first
    (`rest_local.llama.ladder`).

    On a CPU in fast mode only the one that is used: each takes about 16 plain steps, and `tune_thoroughly` tries the
    others. On a GPU those of a later exact request too, because the model does not fit it twice.
    """
    wanted = replace(settings_for(options, n_ctx, threads, n_slots, n_cells), n_rs_seq=ROLLBACK)
    result = candidates(wanted, options, exact)
    if not library.supports_gpu():
        return result if exact else result[:1]
    else:
        result += [settings for settings in candidates(wanted, options, not exact) if settings not in result]
    return result


def tune(model: Model, wanted: ContextSettings, exact: bool) -> tuple[Context, Tuning]:
    """An open context in the chosen settings, with what is known of its costs, from the cache where there is something.

    What `model.options` fixes of flash attention and cache types is kept, the rest is chosen. The first time, fast mode
    takes at most 15 plain steps for it, exact mode also the first rows of a self-test, of up to four settings.
    """
    begun = time.perf_counter()
    context, tuning = _tune(model, _branched(model, wanted), exact)
    tuning.seconds = time.perf_counter() - begun
    return context, tuning


def _tune(model: Model, wanted: ContextSettings, exact: bool) -> tuple[Context, Tuning]:
    path: Path | None = None
    unsuitable: list[ContextSettings] = []
    try:
        path = cache_dir() / "tuning" / f"{_key(model, wanted, exact)}.json"
        tuning = Tuning.from_json(path.read_text("utf-8"))
        tuning.path = path
        tuning.settings = _resized(tuning.settings, wanted)
        unsuitable = tuning.unsuitable = [_resized(each, wanted) for each in tuning.unsuitable]
        if not exact or tuning.settings not in unsuitable or _all_tried(model, tuning):
            return Context(model, tuning.settings), tuning
    except FileNotFoundError:
        pass
    except (OSError, ValueError, ModelError) as error:
        log.warning("%s cannot be used (%s); measuring again", path or "the cache directory", error)
    progress.info(
        "first run of %s on this machine: estimating its costs from a few steps and refining them while it answers; "
        "`rest-local tune` measures them now",
        model.path.name,
    )
    context, tuning = _begin(model, wanted, exact, unsuitable)
    tuning.path = path
    if exact:
        tuning.store()  # an estimate is kept when it was refined, at the end
    return context, tuning


def _branched(model: Model, wanted: ContextSettings) -> ContextSettings:
    recurrent = model.is_recurrent or model.is_hybrid
    return replace(wanted, n_branches=1, n_rs_seq=ROLLBACK) if recurrent else wanted


def _resized(stored: ContextSettings, wanted: ContextSettings) -> ContextSettings:
    """The settings that were chosen once, in the size that is wanted now."""
    return replace(
        wanted,
        flash_attention=stored.flash_attention,
        cache_type_k=stored.cache_type_k,
        cache_type_v=stored.cache_type_v,
    )


def _all_tried(model: Model, tuning: Tuning) -> bool:
    """Whether no settings are left in which the self-test of `--exact` has found nothing yet."""
    return all(one in tuning.unsuitable for one in candidates(tuning.settings, model.options, exact=True))


def _begin(
    model: Model, wanted: ContextSettings, exact: bool, unsuitable: list[ContextSettings]
) -> tuple[Context, Tuning]:
    """What is known after a few steps."""
    self_test: dict[str, Any] = {}
    if exact:
        context, self_test = _choose_exact(model, wanted, unsuitable)
    else:
        context = _first_that_works(model, preferred(model, wanted))
    try:
        curve, name = _estimate(model, context)
    except BaseException:
        context.close()
        raise
    is_exact = bool(self_test.get("exact"))
    return context, Tuning(context.settings, curve, self_test, is_exact, time.time(), unsuitable, name)


def preferred(model: Model, wanted: ContextSettings) -> list[ContextSettings]:
    """The settings of fast mode, the usually cheaper first: without flash attention on a CPU, where it makes a draft of
    16 tokens at 4 096 tokens of context nearly twice as dear (DESIGN.md section 4), with it on a GPU.
    """
    settings = candidates(wanted, model.options, exact=False)
    return settings if _on_cpu(model) else sorted(settings, key=lambda each: not each.flash_attention)


def _tried(model: Model, wanted: ContextSettings) -> list[ContextSettings]:
    """The settings of fast mode: the first, which are in use, and of the others those in which a child process can
    compute. Raises OSError where none can be started.
    """
    first, *others = preferred(model, wanted)
    return [first, *(settings for settings in others if ladder.works(model, settings))]


def _on_cpu(model: Model) -> bool:
    return not (library.supports_gpu() and model.n_gpu_layers)


def load_meter(model: Model, context: Context, governor: ThreadGovernor | None = None) -> LoadMeter:
    """Tells whether other processes take part of the machine, where a CPU computes. While `governor` has fewer threads
    than there are, they do.
    """
    fewer = (lambda: governor.threads < context.threads) if governor else None
    return LoadMeter(lambda: context.threads if _on_cpu(model) else 0, fewer)


def _estimate(model: Model, context: Context) -> tuple[CostCurve, str]:
    """A curve from a few steps, and the name of that whose shape it has. Clears the cells before and after."""
    probe = DecodeProbe(context, self_test_text(model, context.n_ctx), load_meter(model, context))
    largest = min(context.max_outputs, context.n_ctx // 2)
    timed: list[tuple[int, Timing]] = []
    if not model.has_encoder:  # decoded plainly, whatever a batch costs
        timed = quick(probe.alone, 0, largest)
        context.clear()
    backends = [name for name in library.backends() if name != "CPU"]
    backend = "CPU" if _on_cpu(model) else next((name for name in backends if name in ("CUDA", "Metal")), "")
    attention = ATTENTION * 2 * model.n_embd * model.n_layer / max(model.n_params, 1)
    return estimated(timed, backend, attention)


def tune_thoroughly(
    model: Model, wanted: ContextSettings, tuning: Tuning, report: Progress | None = None
) -> tuple[Tuning, Measured]:
    """Measure all sizes at several lengths, in the cheapest of the settings that are open, and keep that.

    `tuning`: what is known, in whose place the result is stored; of an exact one only the curve is replaced. A result
    of a busy machine, or an incomplete one, does not take its place: the curve learns from it. Takes about 700 plain
    steps at least. Raises ModelError, and ValueError where the clock stands still.
    """
    wanted = _branched(model, wanted)
    settings = [tuning.settings] if tuning.exact or tuning.unsuitable else _tried(model, wanted)
    with _cheapest(model, settings) as context:
        largest = min(LARGEST, context.max_outputs, context.n_ctx // 2)
        lengths = [length for length in CONTEXTS if length + largest <= context.n_ctx] or [context.n_ctx // 2]
        probe = DecodeProbe(context, self_test_text(model, context.n_ctx), load_meter(model, context))
        result = measure(probe, lengths, largest=largest, progress=report)
        chosen = context.settings
    if result.complete:
        tuning = replace(tuning, settings=chosen, curve=result.curve, measured_at=time.time(), estimate="")
    else:
        result.teach(tuning.curve)
    tuning.store()
    return tuning, result


def _cheapest(model: Model, candidates: Sequence[ContextSettings]) -> Context:
    """A context in the settings whose plain step and verification of 8 and 16 tokens are cheapest. Raises ModelError
    where none works.
    """
    prices: list[tuple[float, ContextSettings]] = []
    for settings in candidates if len(candidates) > 1 else ():
        try:
            context = Context(model, settings)
        except ModelError as error:
            log.info("%s", error)
            continue
        with context:
            probe = DecodeProbe(context, self_test_text(model, context.n_ctx))
            sizes = [n for n in (1, 8, 16) if n <= context.max_outputs]
            length = min(CONTEXTS[1], context.n_ctx // 2)
            timed = [min(probe(n, length).ms for _ in range(3)) * (4 if n == 1 else 1) for n in sizes]
            prices.append((sum(timed), settings))
    ordered = [settings for _, settings in sorted(prices, key=lambda each: each[0])]
    return _first_that_works(model, ordered or candidates)


def _choose_exact(
    model: Model, wanted: ContextSettings, unsuitable: list[ContextSettings]
) -> tuple[Context, dict[str, Any]]:
    """The first settings in which no difference is known between chains and plain decoding, and their self-test as far
    as it is affordable now; where all are unsuitable, the first that work at all. Adds to `unsuitable`.
    """
    settings = candidates(wanted, model.options, exact=True)
    for one in [one for one in settings if one not in unsuitable]:
        try:
            context = Context(model, one)
        except ModelError as error:
            log.info("%s", error)
            unsuitable.append(one)
            continue
        capability = capability_of(model, context, exact=True)
        if capability.kind == "none":
            return context, {}
        test = exact_self_test(model, context, capability)
        test.begin(SELF_TEST_S)
        context.clear()
        if not test.comparison.different:
            return context, test.to_dict()
        context.close()
        unsuitable.append(one)
    return _first_that_works(model, settings), {}


def _first_that_works(model: Model, settings: Sequence[ContextSettings]) -> Context:
    refused = ModelError(f"model {model.path}: no context could be made in any settings")
    for one in settings:
        try:
            return Context(model, one)
        except ModelError as error:
            refused = error
    raise refused


def exact_self_test(
    model: Model, context: Backend, capability: Capability, known: Mapping[str, Any] | None = None
) -> SelfTest:
    """The self-test of `--exact` in this context, whose cells it clears. `known`: what was compared before."""
    return SelfTest(context, real_text(model, TEXT_TOKENS), capability.longest, known)


def fast_self_test(model: Model, context: Context, capability: Capability) -> Comparison:
    """How often fast settings leave plain decoding, on as much text as SELF_TEST_S affords, at least 24 tokens. Clears
    the cells.
    """
    text = self_test_text(model, context.n_ctx)
    probe = DecodeProbe(context, text)
    plain_ms = min(probe(1, 0).ms for _ in range(3))
    context.clear()
    part = text[: max(24, min(len(text), int(1e3 * SELF_TEST_S / (2.5 * plain_ms))))]
    if capability.kind == "none":
        return Comparison()
    if capability.kind == "tree":
        return compare_trees(context, part, 16)
    return compare_chains(context, part, capability.longest)


def self_test_text(model: Model, n_ctx: int) -> list[int]:
    """Real text for measurements, at most half the context."""
    return real_text(model, min(SELF_TEST_TOKENS, n_ctx // 2))


def real_text(model: Model, most: int) -> list[int]:
    """This file, in the model's own tokens."""
    source = Path(__file__).read_text("utf-8")[: CHARACTERS * most]
    tokens = model.vocabulary.tokenize(source, special=False, add_special=True)
    return [int(t) for t in tokens[:most]]


def _key(model: Model, wanted: ContextSettings, exact: bool) -> str:
    """Everything that a measurement depends on: not how long a context may become, nor how many requests share it. A
    self-test of exact mode covers as much as a context of N_CTX tokens has.
    """
    n_ctx = min(wanted.n_ctx, N_CTX) if exact else N_CTX
    asked = replace(wanted, n_ctx=n_ctx, n_cells=0, n_slots=1, threads=wanted.threads or default_threads())
    parts = [
        FORMAT, model.cache_key, model.n_gpu_layers, asdict(model.options), model.adapters.identity, exact,
        asked.to_dict(), library.fingerprint(), platform.machine(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
