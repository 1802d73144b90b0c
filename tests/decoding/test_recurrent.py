"""Models with recurrent state, one of each kind of layer: drafts on is off, and what is kept changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.half_right import TEXT, finish, half_right
from support.recurrent import RECURRENT

from rest_local import Engine, Sampling
from rest_local.catalog import describe
from rest_local.catalog.describe import header_of
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.llama.gguf import read_gguf
from rest_local.llama.options import ModelOptions


@pytest.fixture(scope="module", params=RECURRENT)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RECURRENT[request.param](tmp_path_factory.mktemp("recurrent") / f"{request.param}.gguf")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(model, n_ctx=512, exact=True, threads=1, options=ModelOptions(rollback=4)) as opened:
        yield opened


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=11)], ids=["greedy", "seeded"])
def test_drafts_change_nothing(engine: Engine, sampling: Sampling) -> None:
    """Shorter and longer than the snapshots; after a prompt that is kept, and after an answer that was cancelled."""
    prompt = engine.tokenize(TEXT * 2)
    plain = finish(engine, prompt, 70, policy="off", sampling=sampling)
    half = half_right(engine, prompt, plain.tokens)
    half.longest = 40
    drafted = finish(engine, prompt, 70, policy=half, sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.draft.accepted > 10, engine.warnings
    stream = engine.generate(prompt, max_tokens=70, policy=half, sampling=sampling)
    next(iter(stream))
    stream.cancel()
    again = finish(engine, prompt, 70, policy=half, sampling=sampling)
    assert again.tokens == plain.tokens
    assert again.timings.cached_tokens > 0


def test_the_header_says_how_large_the_state_is(engine: Engine, model: Path) -> None:
    header = header_of(read_gguf(model), model)
    finish(engine, [65, 66, 67], 1, policy="off")
    backend = engine.context.backend
    assert header.state_bytes <= len(backend.save(0, partial=True)) <= header.state_bytes + 1024
    assert describe.snapshots_of(header, 4) == backend.n_rs_seq
    assert header.drafting == "chain"


def test_several_at_once_and_after_a_restart(model: Path, tmp_path: Path) -> None:
    """In slots of one context, and from cells on disk."""
    options = ModelOptions(flash_attention="off", cache_type_k="f16", cache_type_v="f16")
    with Engine.load(model, n_ctx=512, threads=1, slots=3, options=options, policy="off") as engine:
        prompts = [engine.tokenize(TEXT * n) for n in (1, 2, 3)]
        alone = [finish(engine, prompt, 12).tokens for prompt in prompts]
        engine.forget()
        service = Service(engine)
        try:
            streams = [service.submit(Request(prompt, max_tokens=12)) for prompt in prompts]
            together = [stream.wait().tokens for stream in streams]
        finally:
            service.close()
    assert [len(tokens) for tokens in together] == [len(tokens) for tokens in alone]
    assert sum(one == other for one, other in zip(together, alone, strict=True)) >= 2  # others: near ties
    with Engine.load(model, n_ctx=512, threads=1, options=options, policy="off") as engine:
        first = finish(engine, prompts[1], 12).tokens
        assert engine.save_cells(tmp_path / "cells")
    with Engine.load(model, n_ctx=512, threads=1, options=options, policy="off") as engine:
        assert engine.load_cells(tmp_path / "cells") == len(prompts[1]) + 11
        longer = [*prompts[1], *first]
        result = finish(engine, longer, 12)
        assert result.timings.cached_tokens > 0
        engine.forget()
        assert finish(engine, longer, 12).tokens[:3] == result.tokens[:3]
