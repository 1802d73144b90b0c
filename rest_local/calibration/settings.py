"""Choose the settings of a context: what the user's options fix, and the combinations that they leave open.

A setting is a combination of flash attention and cache types, the rest is size. `tuning` chooses among the candidates;
a child process tries them before the model is loaded (`rest_local.llama.load_fallback`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from rest_local.kv_cache.backend import LONGEST_CHAIN, Capability
from rest_local.llama import library, row_wise
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import FLOAT_CACHE_TYPES, MOST_SNAPSHOTS, ModelOptions

# How close an answer with drafts is to one without:
#
# - `exact`: a complete self-test has found no bit that drafting changes; until then requests are decoded plainly.
# - `same`: the kernels give a row the same bits in every batch up to a measured size (`measuring.first_steps`). This is
#   the default on a CPU.
# - `fast`: verification is cheapest, and a token can differ at a near-tie. This is the default on a GPU.
Fidelity = Literal["exact", "same", "fast"]

Choice = tuple[bool, str, str]  # flash attention, cache type of K, cache type of V

# With flash attention, llama.cpp's CPU code walks through the cells of a row one by one, whatever the batch, and skips
# masked ones. Two shortcuts break that if K and V have one float type (`rest_local.llama.row_wise`), so K and V have
# two types here. Long prompts are slow: they take 1.4 times as long at 1 000 tokens and 1.8 times at 3 500
# (SmolLM2-135M on 2 cores of a Zen 4), and there is no slot and no neighbour that changes a bit.
MIXED: tuple[Choice, ...] = ((True, "bf16", "f16"), (True, "q8_0", "f16"))
# The preferred first. If the shortcuts can be switched, long prompts take them and steps do not. A plain step costs the
# same either way (11.6 ms at 1 000 tokens of context, 17.4 and 17.0 at 3 500).
SAME: tuple[Choice, ...] = (*(((True, "f16", "f16"),) if row_wise.available() else ()), *MIXED)
EXACT: tuple[Choice, ...] = (
    *MIXED, (True, "bf16", "bf16"), (True, "q8_0", "q8_0"), (False, "f16", "f16"), (True, "f16", "f16"),
)  # fmt: skip
FAST: tuple[Choice, ...] = ((False, "f16", "f16"), (True, "f16", "f16"))

# For these architectures llama.cpp copies whole sequences only, and ends the process if it is asked for a part (so that
# it cannot be tried here). The copy also comes with the next pass, over what is restored until then.
NO_COPIES = ("deepseek4",)


def capability_of(model: Model, context: Context, fidelity: Fidelity, longest: int = LONGEST_CHAIN) -> Capability:
    """Return what drafts this model can verify in this context, and why. `longest` is the most drafted tokens of a
    batch whose rows have the bits of plain steps.
    """
    if model.has_encoder:
        return Capability("none", "encoder-decoder models are decoded plainly", shares=False)
    if model.is_recurrent or model.is_hybrid:
        kind, n = "recurrent" if model.is_recurrent else "hybrid", context.rollback
        rolled_back = f"is rolled back {n} tokens, and further by a checkpoint" if n else "goes back to a checkpoint"
        reason = f"{kind} state {rolled_back} before the step"
        copies = model.metadata.get("general.architecture") not in NO_COPIES
        return Capability("chain", reason, longest, shares=False, copies=copies)
    if fidelity != "fast":
        reason = "the cells of a rejected branch would be filled out of order, which changes the sums of attention"
        return Capability("chain", reason, longest)
    return Capability("tree", "full attention over removable cells")


def on_cpu(model: Model) -> bool:
    """Return True if the CPU computes all layers of the model."""
    return not (library.supports_gpu() and model.n_gpu_layers)


def settings_for(
    options: ModelOptions, n_ctx: int, threads: int, n_slots: int = 1, n_cells: int | None = None
) -> ContextSettings:
    """Return the context settings that the user's options fix; flash attention and cache types are still open. Without
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
    """Return the same settings; recurrent state gets one branch and snapshots."""
    recurrent = model.is_recurrent or model.is_hybrid
    return replace(wanted, n_branches=1, n_rs_seq=snapshots(model.options)) if recurrent else wanted


def snapshots(options: ModelOptions) -> int:
    """Return the snapshots of a recurrent state for each slot. llama.cpp makes 0 if it cannot roll a model back."""
    return MOST_SNAPSHOTS if options.rollback is None else options.rollback


def resized(stored: ContextSettings, wanted: ContextSettings) -> ContextSettings:
    """Return stored settings in the size that is wanted now."""
    return replace(
        wanted,
        flash_attention=stored.flash_attention,
        cache_type_k=stored.cache_type_k,
        cache_type_v=stored.cache_type_v,
    )


def candidates(
    wanted: ContextSettings, options: ModelOptions, fidelity: Fidelity, cpu: bool = True
) -> list[ContextSettings]:
    """Return the settings of this fidelity that `options` leave open, the preferred first on a CPU. There may be none
    for `same`, whose settings are known ones: nothing else is taken in their place.

    `cpu` is True if the CPU computes. A GPU may have no kernel for two cache types, and leave attention to the CPU.
    """
    if fidelity == "same":
        known = open_settings(wanted, ModelOptions(), SAME)
        return [settings for settings in open_settings(wanted, options, SAME) if settings in known]
    exact = EXACT if cpu else EXACT[len(MIXED) :]
    return open_settings(wanted, options, exact if fidelity == "exact" else FAST)


def open_settings(wanted: ContextSettings, options: ModelOptions, choices: Iterable[Choice]) -> list[ContextSettings]:
    """Return `wanted` with each of the choices, except for what `options` fix, without duplicates. A quantized V needs
    flash attention.
    """
    result: list[ContextSettings] = []
    for flash, cache_k, cache_v in choices:
        cache_k, cache_v = options.cache_type_k or cache_k, options.cache_type_v or cache_v
        if options.flash_attention != "auto":
            flash = options.flash_attention == "on"
        settings = replace(wanted, flash_attention=flash, cache_type_k=cache_k, cache_type_v=cache_v)
        if (flash or cache_v in FLOAT_CACHE_TYPES) and settings not in result:
            result.append(settings)
    return result


def contexts_to_try(
    options: ModelOptions, n_ctx: int, threads: int, n_slots: int, n_cells: int | None, fidelity: Fidelity
) -> list[ContextSettings]:
    """Return the contexts that a child process tries first (`rest_local.llama.load_fallback`), for a model of unknown
    kind.

    On a CPU this is only the one that will be used, unless the fidelity is `exact`: each takes about 16 plain steps.
    """
    wanted = replace(settings_for(options, n_ctx, threads, n_slots, n_cells), n_rs_seq=snapshots(options))
    if library.supports_gpu():
        return candidates(wanted, options, "exact" if fidelity == "exact" else "fast", cpu=False)
    result = candidates(wanted, options, fidelity) or candidates(wanted, options, "fast")
    return result if fidelity == "exact" else result[:1]


def preferred(model: Model, wanted: ContextSettings) -> list[ContextSettings]:
    """Return the candidates of fast mode, the usually cheaper first: without flash attention on a CPU, where it nearly
    doubles the time of a draft of 16 tokens at 4 096 tokens of context, and with it on a GPU.
    """
    settings = candidates(wanted, model.options, "fast")
    return settings if on_cpu(model) else sorted(settings, key=lambda each: not each.flash_attention)
