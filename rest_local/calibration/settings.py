"""The settings of a context: what the user's options fix, and the combinations that they leave open.

A setting is a combination of flash attention and cache types, the rest is size. `tuning` chooses among the candidates;
a child process tries them before the model is loaded (`rest_local.llama.load_fallback`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rest_local.kv_cache.backend import Capability
from rest_local.llama import library, load_fallback
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import FLOAT_CACHE_TYPES, MOST_SNAPSHOTS, ModelOptions

FAST = ((False, "f16"), (True, "f16"))  # (flash attention, cache type), the preferred first on a CPU; reversed on a GPU
EXACT = ((True, "bf16"), (True, "q8_0"), (False, "f16"), (True, "f16"))

NO_COPIES = ("deepseek4",)
"""Architectures of which llama.cpp copies whole sequences only, and ends the process where it is asked for a part (so
that it cannot be tried here). The copy also comes with the next pass, over what is restored until then."""


def capability_of(model: Model, context: Context, exact: bool) -> Capability:
    """What drafts this model can verify in this context, and why."""
    if model.has_encoder:
        return Capability("none", "encoder-decoder models are decoded plainly", shares=False)
    if model.is_recurrent or model.is_hybrid:
        kind, n = "recurrent" if model.is_recurrent else "hybrid", context.n_rs_seq
        rolled_back = f"is rolled back {n} tokens, and further by a checkpoint" if n else "goes back to a checkpoint"
        reason = f"{kind} state {rolled_back} before the step"
        copies = model.metadata.get("general.architecture") not in NO_COPIES
        return Capability("chain", reason, shares=False, copies=copies)
    if exact:
        return Capability("chain", "exact: a rejected branch leaves holes that shift the attention's blocks")
    return Capability("tree", "full attention over removable cells")


def on_cpu(model: Model) -> bool:
    """Whether the CPU computes all layers of the model."""
    return not (library.supports_gpu() and model.n_gpu_layers)


def settings_for(
    options: ModelOptions, n_ctx: int, threads: int, n_slots: int = 1, n_cells: int | None = None
) -> ContextSettings:
    """The context settings that the user's options fix; flash attention and cache types are still open. Without
    `n_cells`, every slot can hold a whole context.
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


def for_memory_of(model: Model, wanted: ContextSettings) -> ContextSettings:
    """The same settings; recurrent state gets one branch and snapshots."""
    recurrent = model.is_recurrent or model.is_hybrid
    return replace(wanted, n_branches=1, n_rs_seq=snapshots(model.options)) if recurrent else wanted


def snapshots(options: ModelOptions) -> int:
    """Of a recurrent state, for each slot. llama.cpp makes 0 of it where it cannot roll a model back."""
    return MOST_SNAPSHOTS if options.rollback is None else options.rollback


def resized(stored: ContextSettings, wanted: ContextSettings) -> ContextSettings:
    """Stored settings in the size that is wanted now."""
    return replace(
        wanted,
        flash_attention=stored.flash_attention,
        cache_type_k=stored.cache_type_k,
        cache_type_v=stored.cache_type_v,
    )


def candidates(wanted: ContextSettings, options: ModelOptions, exact: bool) -> list[ContextSettings]:
    """The settings of exact or fast mode that `options` leave open, the preferred first on a CPU."""
    return open_settings(wanted, options, EXACT if exact else FAST)


def open_settings(
    wanted: ContextSettings, options: ModelOptions, choices: Iterable[tuple[bool, str]]
) -> list[ContextSettings]:
    """`wanted` with each choice of (flash attention, cache type), except for what `options` fix, without duplicates. A
    quantized V needs flash attention.
    """
    result: list[ContextSettings] = []
    for flash, cache_type in choices:
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
    """The contexts that a child process tries first (`rest_local.llama.load_fallback`), for a model of unknown kind.

    On a CPU in fast mode this is only the one that will be used: each takes about 16 plain steps, and `tune_thoroughly`
    tries the others. On a GPU it includes those of a later exact request, because the model does not fit the GPU twice.
    """
    wanted = replace(settings_for(options, n_ctx, threads, n_slots, n_cells), n_rs_seq=snapshots(options))
    result = candidates(wanted, options, exact)
    if not library.supports_gpu():
        return result if exact else result[:1]
    return [*result, *(settings for settings in candidates(wanted, options, not exact) if settings not in result)]


def preferred(model: Model, wanted: ContextSettings) -> list[ContextSettings]:
    """The candidates of fast mode, the usually cheaper first: without flash attention on a CPU, where it nearly doubles
    the time of a draft of 16 tokens at 4 096 tokens of context, and with it on a GPU.
    """
    settings = candidates(wanted, model.options, exact=False)
    return settings if on_cpu(model) else sorted(settings, key=lambda each: not each.flash_attention)


def usable(model: Model, wanted: ContextSettings) -> list[ContextSettings]:
    """The candidates of fast mode that work: the first, which is in use, and those of the others in which a child
    process can compute. Raises OSError if no process can be started.
    """
    first, *others = preferred(model, wanted)
    return [first, *(settings for settings in others if load_fallback.works(model, settings))]
