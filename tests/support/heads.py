"""Tiny models with what drafts for them, and engines that draft with it whatever it costs."""

import random
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from support.fake_sources import always_draft

from benchmarks.tiny_heads import (
    HEAD,
    tiny_assistant,
    tiny_dflash,
    tiny_eagle3,
    tiny_gemma4,
    tiny_mtp,
    tiny_predictable,
)
from rest_local import Engine, Sampling
from rest_local.decoding import decode_context
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.drafting.models.blocks import DFlash
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.drafting.models.drafter import PassTimes
from rest_local.drafting.models.heads import Head, HeadText
from rest_local.planning.plan import Budget
from tests.support.memory import resident_mb

# What drafts, by name: a draft model, MTP layers inside the file or in one of their own, an EAGLE-3 head, a Gemma
# assistant, a block drafter of each kind. The model of qwen35 is hybrid: every second layer has a recurrent state.
BLOCKS = ("dflash", "dflash2 hybrid", "dspark")
DRAFTERS = ("model", "mtp inside", "mtp alone", "mtp inside hybrid", "mtp alone hybrid", "eagle3", "assistant", *BLOCKS)
HEADS = DRAFTERS[1:]
COVERING = ("model", "mtp inside", "mtp alone hybrid", "eagle3", "dflash2 hybrid")  # each kind of model and file once

_made = tempfile.TemporaryDirectory(prefix="rest-local-heads-")


def model_and_drafter(kind: str, folder: Path, quant: str = "F32") -> tuple[Path, Path | None]:
    """Copy the files of a target, and of what drafts for it unless that is in the same file. Tests damage them."""
    target, drafter = _model_and_drafter(kind, quant)
    return Path(shutil.copy(target, folder)), drafter and Path(shutil.copy(drafter, folder))


@cache
def _model_and_drafter(kind: str, quant: str) -> tuple[Path, Path | None]:
    folder = Path(tempfile.mkdtemp(dir=_made.name))
    arch = "qwen35" if kind.endswith("hybrid") else "mimo2"
    if kind == "mtp chained":
        return tiny_mtp(arch, folder / f"{arch}.gguf", n_mtp=3, quant=quant), None
    if kind.startswith("mtp inside"):
        return tiny_mtp(arch, folder / f"{arch}.gguf", quant=quant), None
    if kind.startswith("mtp alone"):
        trunk = tiny_mtp(arch, folder / f"{arch}-trunk.gguf", part="trunk", quant=quant)
        return trunk, tiny_mtp(arch, folder / f"{arch}-layer.gguf", part="layer", quant=quant)
    if kind.startswith(("dflash", "dspark")):
        return _model_and_block(kind, folder, quant)
    if kind == "assistant":
        target = tiny_gemma4(folder / "gemma4.gguf", quant=quant)
        return target, tiny_assistant(folder / "assistant.gguf", quant=quant)
    target = tiny_predictable(folder / "llama.gguf", quant=quant)
    if kind == "model":
        return target, tiny_predictable(folder / "small.gguf", n_layers=1, quant=quant)
    return target, tiny_eagle3(folder / "eagle3.gguf", quant=quant)


def _model_and_block(kind: str, folder: Path, quant: str) -> tuple[Path, Path]:
    block: Literal["plain", "selector", "markov"]
    block = "markov" if kind.startswith("dspark") else "selector" if kind.startswith("dflash2") else "plain"
    drafter = folder / "drafter.gguf"
    if kind.endswith("hybrid"):  # with M-RoPE
        target = tiny_mtp("qwen35", folder / "qwen35.gguf", part="trunk", n_layers=4, quant=quant, marked=True)
        return target, tiny_dflash(drafter, block, quant=quant, keys={"rope.dimension_sections": [HEAD // 2, 0, 0, 0]})
    target = tiny_predictable(folder / "llama.gguf", quant=quant, marked=True)
    return target, tiny_dflash(drafter, block, quant=quant)


def draft_whatever_it_costs(patch: pytest.MonkeyPatch, most: int = 6) -> None:
    """Make `auto` draft in every step, and ask what drafts, however slow it was measured and also if it was wrong."""
    always_draft(patch, most)
    patch.setattr(PassTimes, "at", lambda self, n: 0.01 * n)
    for kind in (Head, DFlash):
        patch.setattr(kind, "pair_ms", 0.0001)
    patch.setattr(Budget, "settle", lambda self, saved: None)


def forget_learned(engine: Engine) -> None:
    """Have cells and planner begin anew, as in an engine that was just opened. Else what was learned
    in other tests decides whether what drafts is asked.
    """
    engine.decoder.forget()
    context = engine.decoder.context
    auto = decode_context.Auto(context.tuning.curve)
    auto.shared.drafter = context.auto.shared.drafter
    context.auto = context._policies[auto.name] = auto


def serve_many(engine: Engine, requests: int, seed: int = 1) -> dict[str, float]:
    """Serve many short requests at a time, of which some are cancelled, share prefixes or are sampled.

    Then every cell of the target and of what drafts must be free. Return figures: `first_mb` and `last_mb` are the
    resident memory after a third of them, and at the end.
    """
    rng = random.Random(seed)
    drafter = engine.decoder.context.drafter
    assert isinstance(drafter, Head | DraftModel)
    cancelled, first_mb, begun = 0, 0.0, time.perf_counter()
    with Service(engine, queue=64) as service:
        done = 0
        while done < requests:
            streams = []
            for _ in range(min(16, requests - done)):
                words = rng.choices(("x = 1\n", "return self", "for i in ", "abc"), k=rng.randrange(1, 12))
                sampling = Sampling() if rng.random() < 0.6 else Sampling(temperature=0.8, seed=rng.randrange(99))
                request = Request(engine.tokenize("".join(words)), max_tokens=rng.randrange(1, 14), sampling=sampling)
                streams.append(service.submit(request))
            for stream in streams:
                if rng.random() < 0.25:
                    if rng.random() < 0.5:
                        next(iter(stream), None)
                    stream.cancel()
                    cancelled += 1
            for stream in streams:
                assert stream.wait(120).finish_reason in ("cancelled", "length", "stop")
            done += len(streams)
            if not first_mb and done >= requests / 3:
                first_mb = resident_mb()
        service.run(lambda engine: engine.decoder.forget())
        last_mb = resident_mb()
    assert not drafter.failed
    counts = engine.decoder.totals.by_source["model"]
    for context in (engine.decoder.context.backend, drafter.context):
        ids = range(context.n_slots * context.n_branches)
        assert [seq for seq in ids if context.begin(seq) >= 0] == []
    if isinstance(drafter, Head):
        for slot in engine.decoder.slots:
            text = slot.draft_text
            assert isinstance(text, HeadText)
            assert not text._pending
            assert not text._states
            assert not text._tips
    return {
        "requests": requests, "cancelled": cancelled, "drafted": counts["drafted"], "accepted": counts["accepted"],
        "first_mb": round(first_mb, 1), "last_mb": round(last_mb, 1), "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip
