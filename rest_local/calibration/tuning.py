"""Tuning: the chosen settings and the cost curve of a model on this machine, stored on disk.

- A model and the user's settings go in; an open context with its `Tuning` comes out.
- Fast mode takes settings by a rule. By default a CPU takes the first settings in which a few batches have the bits of
  plain steps, and exact mode the first in which the self-test finds no difference.
- On a new machine a few batches are timed, and the curve is estimated from them. Real steps refine it, and
  `tune_thoroughly` measures all of it.
- The result is stored for each model file, llama.cpp, machine and number of threads. A damaged or foreign file causes a
  new measurement, never an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from rest_local.calibration.cost import (
    ESTIMATED,
    LARGEST,
    CostCurve,
    from_dict,
    is_certain,
    physical,
    table_of,
    to_dict,
)
from rest_local.calibration.exactness import N_CTX, Comparison, Drafts, compare_drafts, guarantees_exactness, self_test
from rest_local.calibration.measuring import (
    DecodeProbe,
    FirstSteps,
    LoadMeter,
    Measured,
    Progress,
    Timing,
    first_steps,
    measure,
)
from rest_local.calibration.settings import (
    Fidelity,
    candidates,
    capability_of,
    for_memory_of,
    on_cpu,
    preferred,
    resized,
)
from rest_local.errors import ModelError, OptionError
from rest_local.kv_cache.backend import LONGEST_CHAIN, Backend, Capability
from rest_local.llama import library
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.cores import default_threads
from rest_local.llama.model import Model
from rest_local.paths import cache_dir, write_atomically

log = logging.getLogger("rest_local.tuning")
progress = log.getChild("progress")  # It reports work that takes a while.

# Shipped curves are JSON: {"what": how it was measured, "machine": the CPU or GPU, "backend": CPU, CUDA or Metal,
# "contexts": [tokens], "sizes": [tokens in a batch], "ms": [[milliseconds by size] by context]}.
FOLDER = Path(__file__).resolve().parent / "curves"
FORMAT = 10
CONTEXTS = (64, 512, 2048)  # context lengths for `tune_thoroughly`, as far as they fit
SELF_TEST_S = 2.0


@dataclass
class Tuning:
    """The chosen settings and what was measured in them."""

    settings: ContextSettings
    curve: CostCurve
    self_test: dict[str, Any]
    exact: bool  # a complete self-test found no difference
    measured_at: float = 0.0  # seconds since the epoch
    estimate: str = ""  # name of the shipped curve whose shape was taken; empty if all sizes were measured
    path: Path | None = None
    seconds: float = 0.0  # duration of `tune` in this process
    fidelity: Fidelity = "fast"  # `fast` also if no settings were found for `same`
    longest: int = LONGEST_CHAIN  # the most drafted tokens that change no bit, as far as the first steps tell

    @property
    def final(self) -> bool:
        """Return True if every time is certain at the shortest and at a usual context length. Otherwise the curve is
        provisional, and measured further.
        """
        return is_certain(self.curve, 0) and is_certain(self.curve, min(CONTEXTS[-1], self.settings.n_ctx))

    @property
    def age(self) -> float:
        """Return the seconds since the measurement; 0 if the clock was set back since."""
        return max(0.0, time.time() - self.measured_at)

    def state(self) -> dict[str, Any]:
        """Describe how certain the curve is, for the user and for JSON."""
        deviations = self.curve.uncertainty(0)
        return {
            "state": "final" if self.final else "provisional",
            "age_s": round(self.age, 1),
            "noise": round(self.curve.corrections.noise, 4),
            "uncertainty": {str(n): round(float(deviations[n - 1]), 3) for n in (2, 4, 8, 16, 64)},
            "estimated_from": self.estimate or None,
            "seconds": round(self.seconds, 3),
        }

    def store(self) -> None:
        """Write the tuning, with the corrections of the curve. If that fails, it only costs time later."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self.path, self.to_json().encode())
        except OSError as error:
            log.warning("%s cannot be written (%s); the next start measures again", self.path, error)

    def to_json(self) -> str:
        return json.dumps({
            "format": FORMAT, "settings": self.settings.to_dict(), "curve": to_dict(self.curve),
            "self_test": self.self_test, "exact": self.exact, "measured_at": self.measured_at, "final": self.final,
            "estimate": self.estimate, "fidelity": self.fidelity, "longest": self.longest,
        })  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """Read `to_json`. Raises ValueError if the text has another format."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("not a tuning of this version")
        try:
            settings = ContextSettings.from_dict(data["settings"])
            curve = from_dict(data["curve"])
            self_test = data["self_test"]
            enough = not self_test or guarantees_exactness(Comparison.from_dict(self_test))
            measured_at, estimate = float(data["measured_at"]), str(data["estimate"])
            if not isinstance(self_test, dict) or not math.isfinite(measured_at):
                raise ValueError("not a tuning: self_test is no object, or measured_at is not finite")
            exact = data["exact"] is True and enough
            found = cls(settings, curve, self_test, exact, measured_at, estimate)
            if data["fidelity"] not in get_args(Fidelity) or not 0 <= int(data["longest"]) <= LONGEST_CHAIN:
                raise ValueError("not a tuning: fidelity or longest")
            found.fidelity, found.longest = data["fidelity"], int(data["longest"])
            return found
        except (KeyError, TypeError, AttributeError, OverflowError, OptionError) as error:
            raise ValueError(f"not a tuning: {error}") from error


def tune(model: Model, wanted: ContextSettings, fidelity: Fidelity) -> tuple[Context, Tuning]:
    """Open a context in the chosen settings, with its tuning from the cache or from a few steps.

    `model.options` may fix flash attention and cache types; the rest is chosen. The first time it takes as long as
    `first_steps`. Exact mode also runs a self-test, in up to six settings until one passes. Raises ModelError.
    """
    begun = time.perf_counter()
    if fidelity == "same" and not on_cpu(model):
        fidelity = "fast"
    context, tuning = _tune(model, for_memory_of(model, wanted), fidelity)
    tuning.seconds = time.perf_counter() - begun
    return context, tuning


def _tune(model: Model, wanted: ContextSettings, fidelity: Fidelity) -> tuple[Context, Tuning]:
    path: Path | None = None
    try:
        path = cache_dir() / "tuning" / f"{_key(model, wanted, fidelity)}.json"
        tuning = Tuning.from_json(path.read_text("utf-8"))
        tuning.path = path
        tuning.settings = resized(tuning.settings, wanted)
        return Context(model, tuning.settings), tuning
    except FileNotFoundError:
        pass
    except (OSError, ValueError, ModelError) as error:
        log.warning("%s cannot be used (%s); measuring again", path or "the cache directory", error)
    progress.info(
        "costs of %s: estimated from a few steps, refined in use",
        model.path.name,
    )
    context, tuning = _tune_anew(model, wanted, fidelity)
    tuning.path = path
    if fidelity == "exact":
        tuning.store()  # An estimate is stored at the end, after real steps have refined it.
    return context, tuning


def _tune_anew(model: Model, wanted: ContextSettings, fidelity: Fidelity) -> tuple[Context, Tuning]:
    """Open a context and tune it with a few steps."""
    tested: dict[str, Any] = {}
    if fidelity == "exact":
        context, tested = _choose_exact(model, wanted)
    else:
        same = candidates(wanted, model.options, "same") if fidelity == "same" else []
        for settings in same if not model.has_encoder else []:
            try:
                context = Context(model, settings)
            except ModelError as error:
                log.info("%s", error)
                continue
            curve, name, first = _first_curve(model, context, compare=True)
            if first.longest:
                return context, Tuning(
                    settings, curve, {}, False, time.time(), name, fidelity="same", longest=first.longest
                )
            context.close()
            break  # The weights make the difference, which another cache does not change.
        fidelity = "fast"
        context = _first_that_works(model, preferred(model, wanted))
    curve, name, _ = _first_curve(model, context, compare=False)
    is_exact = bool(tested.get("exact"))
    return context, Tuning(context.settings, curve, tested, is_exact, time.time(), name, fidelity=fidelity)


def load_meter(model: Model, context: Context, known_busy: Callable[[], bool] | None = None) -> LoadMeter:
    """Return a meter that detects other processes if the CPU computes. `known_busy` is another way to know that."""
    return LoadMeter(lambda: context.threads, known_busy) if on_cpu(model) else LoadMeter(lambda: 0)


def _first_curve(model: Model, context: Context, compare: bool) -> tuple[CostCurve, str, FirstSteps]:
    """Return a curve from the first steps, the name of the shipped curve with its shape, and the steps. Clears the KV
    cache. If that fails, the context is closed.
    """
    first = FirstSteps([], 0)
    try:
        if not model.has_encoder:  # Real steps tell the cost of such a model, which is decoded plainly.
            text = self_test_text(model, context.n_ctx)
            first = first_steps(context, text, load_meter(model, context), compare=compare)
    except BaseException:
        context.close()
        raise
    backends = [name for name in library.backends() if name != "CPU"]
    backend = "CPU" if on_cpu(model) else next((name for name in backends if name in ("CUDA", "Metal")), "")
    attention = 2 * model.n_embd * model.n_layer / max(model.n_params, 1)
    return *estimated(first.timed, backend, attention), first


def shipped() -> tuple[str, ...]:
    """Return the names of the curves that ship with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def estimated(timed: Sequence[tuple[int, Timing]], backend: str, attention: float) -> tuple[CostCurve, str]:
    """Estimate the curve of a machine from a few times at a short context. Returns the curve and the name of the
    shipped curve whose shape it has: the nearest one of that backend.

    `timed` is (tokens in a batch, time), `attention` the share of a plain step that one more token of context adds. All
    sizes are uncertain; the given times are the curve's first observations.
    """
    # The default is for a clock that cannot measure a plain step. The first real steps correct it.
    plain_ms = min((timing.ms for n, timing in timed if n == 1), default=10.0)
    name, shape = min(
        _shapes(backend), key=lambda each: sum((math.log(t.ms / plain_ms / each[1][n - 1])) ** 2 for n, t in timed)
    )
    base = plain_ms * shape
    curve = CostCurve([0, 4096], np.stack([base, base * (1 + 4096 * attention)]), ESTIMATED)
    for n, timing in timed:
        curve.observe(n, 0, timing.ms, timing.busy)
    return curve, name


def _shapes(backend: str) -> list[tuple[str, NDArray[np.float64]]]:
    """Return (name, t(n)/t(1) for n = 1..64) of this backend's shipped curves, or of all GPUs if it is unknown."""
    files = {name: json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in shipped()}
    names = [name for name, points in files.items() if points.get("backend") == backend]
    names = names or [name for name, points in files.items() if points.get("backend") not in (None, "CPU")]
    rows = [physical(table_of(files[name]["sizes"], files[name]["ms"][:1])[0]) for name in names]
    return [(name, row / row[0]) for name, row in zip(names, rows, strict=True)]


def tune_thoroughly(
    model: Model, wanted: ContextSettings, tuning: Tuning, report: Progress | None = None
) -> tuple[Tuning, Measured]:
    """Measure all sizes at several context lengths, and store the result.

    Its curve replaces that of the present `tuning`. An incomplete result, or one from a busy machine, does not replace
    it, but the curve learns from the result. Takes at least about 700 plain steps. Raises ModelError, and ValueError if
    the clock stands still.
    """
    wanted = for_memory_of(model, wanted)
    with Context(model, resized(tuning.settings, wanted)) as context:
        largest = min(LARGEST, context.max_outputs, context.n_ctx // 2)
        lengths = [length for length in CONTEXTS if length + largest <= context.n_ctx] or [context.n_ctx // 2]
        probe = DecodeProbe(context, self_test_text(model, context.n_ctx), load_meter(model, context))
        result = measure(probe, lengths, largest=largest, progress=report)
    if result.complete:
        tuning = replace(tuning, curve=result.curve, measured_at=time.time(), estimate="")
    else:
        result.teach(tuning.curve)
    tuning.store()
    return tuning, result


def _choose_exact(model: Model, wanted: ContextSettings) -> tuple[Context, dict[str, Any]]:
    """Open a context in the first settings in which the self-test finds no difference between chains and plain
    decoding, or in the first that work if it finds one in all. Return it with the result. Raises DecodeFailed.
    """
    settings = candidates(wanted, model.options, "exact", on_cpu(model))
    for one in settings:
        try:
            context = Context(model, one)
        except ModelError as error:
            log.info("%s", error)
            continue
        capability = capability_of(model, context, "exact")
        if capability.kind == "none":
            return context, {}
        try:
            found = run_exact_self_test(model, context, capability)
        except BaseException:  # It was stopped, say.
            context.close()
            raise
        if guarantees_exactness(found):
            return context, found.to_dict()
        context.close()
    return _first_that_works(model, settings), {}


def _first_that_works(model: Model, settings: Sequence[ContextSettings]) -> Context:
    refused = ModelError(f"model {model.path}: no context could be made in any settings")
    for one in settings:
        try:
            return Context(model, one)
        except ModelError as error:
            refused = error
    raise refused


def run_exact_self_test(model: Model, context: Backend, capability: Capability) -> Comparison:
    """Run the self-test of `--exact` in this context, and clear it. Takes some 600 plain steps. Raises DecodeFailed."""
    announced = "`exact`: comparing %d rows of %s with plain decoding, once; about %.0f s"
    return self_test(
        context,
        real_text(model, N_CTX),
        capability.longest,
        lambda rows, seconds: progress.info(announced, rows, model.path.name, seconds),
    )


def fast_self_test(model: Model, context: Context, capability: Capability) -> Comparison:
    """Compare drafts with plain decoding, on as much text as SELF_TEST_S allows. Clears the KV cache."""
    text = self_test_text(model, context.n_ctx)
    probe = DecodeProbe(context, text)
    plain_ms = min(probe(1, 0).ms for _ in range(3))
    context.clear()
    part = text[: max(24, min(len(text), int(1e3 * SELF_TEST_S / (2.5 * plain_ms))))]
    if capability.kind == "none":
        return Comparison()
    drafts: Drafts = "trees" if capability.kind == "tree" else "chains"
    return compare_drafts(context, part, drafts, min(16, capability.longest))


def self_test_text(model: Model, n_ctx: int) -> list[int]:
    """Return real text for measurements, at most 256 tokens and half the context, as token ids."""
    return real_text(model, min(256, n_ctx // 2))


def real_text(model: Model, most: int) -> list[int]:
    """Return the first `most` tokens of this source file."""
    source = Path(__file__).read_text("utf-8")[: 16 * most]  # tokens of such text have fewer characters
    tokens = model.vocabulary.tokenize(source, special=False, add_special=True)
    return [int(t) for t in tokens[:most]]


def _key(model: Model, wanted: ContextSettings, fidelity: Fidelity) -> str:
    """Hash everything that a measurement depends on. The size of the context and the number of slots are no part of it;
    a self-test of exact mode depends on the context size up to N_CTX.
    """
    n_ctx = min(wanted.n_ctx, N_CTX) if fidelity == "exact" else N_CTX
    relevant = replace(wanted, n_ctx=n_ctx, n_cells=0, n_slots=1, threads=wanted.threads or default_threads())
    parts = [
        FORMAT, model.cache_key, model.n_gpu_layers, asdict(replace(model.options, rollback=None)),
        model.adapters.identity, fidelity,
        relevant.to_dict(), library.fingerprint(), platform.machine(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
