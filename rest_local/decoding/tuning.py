"""Choose how to compute, once per machine and model: settings, cost curve and exactness, measured and cached.

Contract: a model and what the user fixed go in, an open context with its measured `Tuning` comes out. Fast mode takes
the settings in which verification is cheapest; exact mode the first in which the self-test finds no difference
(DESIGN.md section 4). The result is kept on disk per model file, llama.cpp, machine, threads and context; a damaged
or foreign file there is measured again, never fatal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.decoding.backend import Backend, Capability, remove_tail
from rest_local.decoding.exactness import Comparison, compare_chains, compare_trees
from rest_local.errors import DecodeFailed, ModelError
from rest_local.llama import library
from rest_local.llama.context import Context, ContextSettings, default_threads
from rest_local.llama.model import Model
from rest_local.llama.options import FLOAT_CACHE_TYPES, ModelOptions
from rest_local.paths import cache_dir, write_atomically
from rest_local.planning.cost import LARGEST, CostCurve, measure

log = logging.getLogger("rest_local.tuning")
progress = log.getChild("progress")  # what takes a while, for people who wait for it

FORMAT = 5
WARM_MS = 5.0  # for longer plain steps what the last decode left behind makes no difference
BUDGET_S = 2.0  # for the cost curve
CONTEXTS = (64, 512, 2048)  # lengths at which it is measured, where they fit and can be afforded
ROLLBACK = 16  # recurrent state snapshots to ask for: the longest chain such a model can take back
FAST = ((False, "f16"), (True, "f16"))  # flash attention, cache type: what is tried where the user left it open
EXACT = ((True, "bf16"), (True, "q8_0"), (False, "f16"), (True, "f16"))
SELF_TEST_TOKENS = 256
SELF_TEST_S = 2.0
SELF_TEST_DEPTH = 700  # tokens before the text in the second part of the exact self-test


@dataclass
class Tuning:
    """What was chosen and measured. `exact`: the self-test found no bit of difference."""

    settings: ContextSettings
    curve: CostCurve
    self_test: dict[str, Any]
    exact: bool
    measured_at: float = 0.0  # seconds since the epoch
    path: Path | None = None

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
            "self_test": self.self_test, "exact": self.exact, "measured_at": self.measured_at,
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
            return cls(settings, curve, data["self_test"], data["exact"], float(data["measured_at"]))
        except (KeyError, TypeError) as error:
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
    """The settings to choose from, the preferred first: all that `options` leaves open. A quantized V needs flash
    attention.
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


def tune(model: Model, wanted: ContextSettings, exact: bool) -> tuple[Context, Tuning]:
    """An open context in the chosen settings, with what was measured; from the cache where it was measured before.

    What `model.options` fixes of flash attention and cache types is kept, the rest is chosen.
    The first time takes about 5 seconds where a step takes a millisecond, and more for a larger model: 33 were seen for
    one of 0.5B on a busy machine. BUDGET_S and SELF_TEST_S bound how often something is repeated, not the passes that
    each settings and size need at least once; exact mode tries up to four settings. `progress` says so before.
    """
    name = f"{_key(model, wanted, exact)}.json"
    path: Path | None = None
    try:
        path = cache_dir() / "tuning" / name
        tuning = Tuning.from_json(path.read_text("utf-8"))
        tuning.path = path
        return Context(model, tuning.settings), tuning
    except FileNotFoundError:
        pass
    except (OSError, ValueError, ModelError) as error:
        log.warning("%s cannot be used (%s); measuring again", path or "the cache directory", error)
    progress.info(
        "measuring what this machine can do with %s, once; some seconds, more for a large model", model.path.name
    )
    context, tuning = _measure(model, wanted, exact)
    tuning.path = path
    tuning.store()
    return context, tuning


def _measure(model: Model, wanted: ContextSettings, exact: bool) -> tuple[Context, Tuning]:
    recurrent = model.is_recurrent or model.is_hybrid
    wanted = replace(wanted, n_branches=1, n_rs_seq=ROLLBACK) if recurrent else wanted
    text = self_test_text(model, wanted.n_ctx)
    context, comparison = (_choose_exact if exact else _choose_fast)(model, wanted, text)
    try:
        capability = capability_of(model, context, exact)
        curve = measure_curve(context, text)
        if not exact:
            comparison = _self_test(context, text, capability)
    except BaseException:
        context.close()
        raise
    return context, Tuning(context.settings, curve, comparison.to_dict(), comparison.exact, time.time())


def _choose_exact(model: Model, wanted: ContextSettings, text: Sequence[int]) -> tuple[Context, Comparison]:
    """The first settings in which chains give the bits of plain decoding; else the first that work at all."""
    fallback: tuple[ContextSettings, Comparison] | None = None
    refused: ModelError | None = None
    for settings in candidates(wanted, model.options, exact=True):
        try:
            context = Context(model, settings)
        except ModelError as error:
            log.info("%s", error)
            refused = error
            continue
        capability = capability_of(model, context, exact=True)
        comparison = _compare_exact(context, _affordable(context, text), capability)
        if comparison.exact or capability.kind == "none":
            return context, comparison
        context.close()
        fallback = fallback or (settings, comparison)
    if fallback is None:
        raise refused or ModelError(f"model {model.path}: no context could be made in any settings")
    return Context(model, fallback[0]), fallback[1]


def _compare_exact(context: Context, text: Sequence[int], capability: Capability) -> Comparison:
    """Chains against plain decoding at the start of the context and, where that found nothing, further on."""
    longest = capability.longest if capability.kind != "none" else 0
    result = compare_chains(context, text, longest)
    if result.exact and context.n_ctx > SELF_TEST_DEPTH + len(text) + LARGEST:
        prefix = np.resize(text, SELF_TEST_DEPTH).tolist()
        result.merge(compare_chains(context, text[: len(text) // 2], longest, prefix))
    return result


def _choose_fast(model: Model, wanted: ContextSettings, text: Sequence[int]) -> tuple[Context, Comparison]:
    """The settings whose verification of 8 and 16 tokens, and plain step, are cheapest."""
    best: tuple[float, Context] | None = None
    refused: ModelError | None = None
    for settings in candidates(wanted, model.options, exact=False):
        try:
            context = Context(model, settings)
        except ModelError as error:
            log.info("%s", error)
            refused = error
            continue
        probe = DecodeProbe(context, text)
        sizes = [n for n in (1, 8, 16) if n <= context.max_outputs]
        length = min(256, context.n_ctx // 2)
        probe(sizes[-1], length)  # the first decode of a size also builds its graph
        price = sum(min(probe(n, length) for _ in range(3)) * (4 if n == 1 else 1) for n in sizes)
        context.clear()
        if best is None or price < best[0]:
            if best:
                best[1].close()
            best = (price, context)
        else:
            context.close()
    if best is None:
        raise refused or ModelError(f"model {model.path}: no context could be made in any settings")
    return best[1], Comparison()


def _affordable(context: Context, text: Sequence[int]) -> Sequence[int]:
    """As much of the text as can be evaluated twice, once token by token, in SELF_TEST_S; at least 24 tokens."""
    probe = DecodeProbe(context, text)
    probe(1, 16)
    plain_ms = min(probe(1, 16) for _ in range(2))
    context.clear()
    return text[: max(24, min(len(text), int(1e3 * SELF_TEST_S / (2.5 * plain_ms))))]


def _self_test(context: Context, text: Sequence[int], capability: Capability) -> Comparison:
    """How often fast settings leave plain decoding, on as much text as SELF_TEST_S affords."""
    part = _affordable(context, text)
    if capability.kind == "none":
        return Comparison()
    if capability.kind == "tree":
        return compare_trees(context, part, 16)
    return compare_chains(context, part, capability.longest)


def self_test_text(model: Model, n_ctx: int) -> list[int]:
    """Real text for the self-test: this file, in the model's own tokens. At most half the context."""
    source = Path(__file__).read_text("utf-8")
    tokens = model.vocabulary.tokenize(source, special=False, add_special=True)
    return [int(t) for t in tokens[: min(SELF_TEST_TOKENS, n_ctx // 2)]]


class DecodeProbe:
    """Times one decode of n tokens behind `n_ctx` others, in milliseconds; fills the cells once per length.

    As a step finds things: behind plain ones. llama.cpp keeps the graph of the last decode and rebuilds it for another
    size, and a large batch leaves caches cold: the demo model's plain step takes 0.45 ms behind another, 0.75 ms behind
    32 tokens, and one of six tokens 1.4 ms behind its like, 1.6 ms behind a plain one.
    """

    def __init__(self, backend: Backend, text: Sequence[int]) -> None:
        self.backend = backend
        self._text = np.resize(np.asarray(text, np.int32), max(backend.n_ctx, LARGEST))
        self._n_past = -1
        self._plain_ms = 0.0

    def __call__(self, n: int, n_ctx: int) -> float:
        fast = self._plain_ms < WARM_MS
        for _ in range((4 if n == 1 else 2) if fast else int(n == 1)):
            self._plain_ms = self._timed(1, n_ctx)
        return self._timed(n, n_ctx)

    def _timed(self, n: int, n_ctx: int) -> float:
        if self._n_past != n_ctx:
            self._fill(n_ctx)
        begun = time.perf_counter()
        self._decode(n, n_ctx, 1)
        self.backend.logits(n)
        elapsed = 1e3 * (time.perf_counter() - begun)
        if not remove_tail(self.backend, n_ctx):
            self._n_past = -1
        return elapsed

    def _fill(self, n_ctx: int) -> None:
        self.backend.clear()
        for begin in range(0, n_ctx, self.backend.n_batch):
            self._decode(min(self.backend.n_batch, n_ctx - begin), begin, 0)
        self._n_past = n_ctx

    def _decode(self, n: int, begin: int, output: int) -> None:
        backend = self.backend
        backend.batch.fill(self._text[:n], np.arange(begin, begin + n), 0, backend.n_branches, output)
        if code := backend.decode():
            raise DecodeFailed(code, n)


def measure_curve(context: Backend, text: Sequence[int], budget_s: float = BUDGET_S) -> CostCurve:
    """The cost curve of an empty context, at the lengths of CONTEXTS that fit and can be filled within the budget."""
    probe = DecodeProbe(context, text)
    largest = min(LARGEST, context.max_outputs, context.n_ctx // 2)

    def timed(n: int, n_ctx: int) -> float:
        return probe(min(n, largest), n_ctx)

    def lengths() -> Iterator[int]:
        begun = time.perf_counter()
        first = min(CONTEXTS[0], context.n_ctx - largest)
        yield first
        for length in CONTEXTS[1:]:
            fill_s = 1e-3 * length * probe(largest, first) / largest
            if length + largest > context.n_ctx or time.perf_counter() - begun + 3 * fill_s > budget_s:
                return
            yield length

    probe(largest, min(CONTEXTS[0], context.n_ctx - largest))
    try:
        return measure(timed, lengths(), budget_s)
    finally:
        context.clear()


def _key(model: Model, wanted: ContextSettings, exact: bool) -> str:
    """Everything that a measurement depends on."""
    parts = [
        FORMAT, model.cache_key, model.n_gpu_layers, asdict(model.options), model.adapters.identity, exact,
        wanted.to_dict(), wanted.threads or default_threads(), library.fingerprint(), platform.machine(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
