"""Tiny models with what drafts for them, and engines that draft with it whatever it costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_sources import always_draft

from benchmarks.tiny_heads import tiny_eagle3, tiny_mtp, tiny_predictable
from rest_local import Engine
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.drafting.models.heads import Head
from rest_local.drafting.models.seam import PassTimes
from rest_local.planning.plan import Budget

# What drafts, by name: a draft model, MTP layers inside the file or in one of their own, an EAGLE-3 head. The model of
# qwen35 is hybrid: every second layer has a recurrent state.
DRAFTERS = ("model", "mtp inside", "mtp alone", "mtp inside hybrid", "mtp alone hybrid", "eagle3")


def model_and_drafter(kind: str, folder: Path, quant: str = "F32") -> tuple[Path, Path | None]:
    """The files of a target, and of what drafts for it unless that is in the same file."""
    arch = "qwen35" if kind.endswith("hybrid") else "mimo2"
    if kind == "mtp chained":
        return tiny_mtp(arch, folder / f"{arch}.gguf", n_mtp=3, quant=quant), None
    if kind.startswith("mtp inside"):
        return tiny_mtp(arch, folder / f"{arch}.gguf", quant=quant), None
    if kind.startswith("mtp alone"):
        trunk = tiny_mtp(arch, folder / f"{arch}-trunk.gguf", part="trunk", quant=quant)
        return trunk, tiny_mtp(arch, folder / f"{arch}-layer.gguf", part="layer", quant=quant)
    target = tiny_predictable(folder / "llama.gguf", quant=quant)
    if kind == "model":
        return target, tiny_predictable(folder / "small.gguf", n_layers=1, quant=quant)
    return target, tiny_eagle3(folder / "eagle3.gguf", quant=quant)


def draft_whatever_it_costs(patch: pytest.MonkeyPatch, most: int = 6) -> None:
    """Makes `auto` draft in every step, and ask what drafts, also when it was wrong before."""
    always_draft(patch, most)
    patch.setattr(Budget, "settle", lambda self, saved: None)


def free(engine: Engine) -> Head | DraftModel:
    """Tell the planner that passes of what drafts take no time, else a busy machine asks it less. Returns it."""
    for lane in engine._core.lanes:
        drafter = lane.drafter
        assert isinstance(drafter, Head | DraftModel)
        drafter.times = PassTimes(0.0, 0.0)
        if isinstance(drafter, DraftModel):
            drafter.token_ms = 0.0
    assert isinstance(drafter, Head | DraftModel)
    return drafter
