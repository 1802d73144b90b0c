"""Models of every architecture that has recurrent state: drafts on is off, and what is kept changes nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forked import trust
from support.half_right import TEXT, finish, half_right
from support.heads import model_and_drafter
from support.recurrent import RECURRENT, recurrent

from rest_local import Engine, Sampling
from rest_local.catalog import describe
from rest_local.catalog.describe import header_of
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.drafting.models.heads import HeadText
from rest_local.errors import ModelInvalid
from rest_local.llama.context import Context
from rest_local.llama.gguf import read_gguf
from rest_local.llama.options import ModelOptions

N_CTX, ANSWER = 256, 48
BLOCKS = "deepseek4"
"""Attends to compressed blocks, and rounds them otherwise where tokens are evaluated together: no setting is exact."""


@pytest.fixture(scope="module", params=RECURRENT)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recurrent(request.param, tmp_path_factory.mktemp("recurrent") / f"{request.param}.gguf")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    exact, options = model.stem != BLOCKS, ModelOptions(rollback=4)
    trust(model)
    with Engine.load(model, n_ctx=N_CTX, threads=1, slots=3, options=options, exact=exact, policy="off") as opened:
        yield opened


def test_answers_are_those_without_drafts(engine: Engine, model: Path) -> None:
    """Drafts shorter and longer than the snapshots; greedy, seeded, and to the end of the context; after an answer
    that was cancelled, and in several slots at once.
    """
    prompts = [engine.tokenize(TEXT * n) for n in (2, 1, 12)]
    prompts[2] = prompts[2][: N_CTX - ANSWER // 2]
    common = Request([1], max_tokens=ANSWER)
    samplings = (Sampling(), Sampling(temperature=0.8, seed=11), Sampling())
    plain = [replace(common, prompt=each, sampling=how) for each, how in zip(prompts, samplings, strict=True)]
    with Service(engine) as service:
        known = [service.submit(request).wait().tokens for request in plain]

        def drafted(number: int) -> Request:
            policy = half_right(engine, prompts[number], known[number])
            policy.longest = 40
            return replace(plain[number], policy=policy)

        cancelled = service.submit(drafted(0))
        next(iter(cancelled))
        cancelled.cancel()
        alone = [service.submit(drafted(number)).wait() for number in range(3)]
        together = [stream.wait() for stream in service.submit_all(map(drafted, range(3)))]
    same = ANSWER if engine.config.exact else ANSWER // 2
    for results in (alone, together):
        assert [result.tokens[:same] for result in results] == [tokens[:same] for tokens in known]
        assert min(result.draft.accepted for result in results) > 9, engine.warnings
        assert [len(result.tokens) < ANSWER for result in results] == [False, False, True]
    assert alone[0].timings.cached_tokens > 0
    _check_size_of_state(engine, model)


def _check_size_of_state(engine: Engine, model: Path) -> None:
    """Check that the header says how large the state is."""
    header = header_of(read_gguf(model), model)
    backend = engine.decoder.context.backend
    assert header.drafting == "chain"
    if model.stem != BLOCKS:  # The keys of BLOCKS do not say it.
        assert header.state_bytes <= len(backend.save(0, partial=True)) <= header.state_bytes + 1024
        assert describe.snapshots_of(header, 4) == backend.rollback


@pytest.mark.parametrize("without", ["ssm_conv1d", "ssm_out", "ssm.state_size", "ssm.conv_kernel"])
def test_a_model_that_says_it_is_hybrid_and_lacks_the_state_is_one_line(without: str, tmp_path: Path) -> None:
    path = recurrent("qwen35", tmp_path / "hollow.gguf", without)
    with pytest.raises(ModelInvalid, match=without.replace(".", r"\.")) as refused:
        Engine.load(path, n_ctx=N_CTX, threads=1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("rollback", [0, 4])
def test_without_a_checkpoint_drafts_are_as_long_as_the_snapshots(
    rollback: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the device has no memory for a checkpoint, llama.cpp writes nothing."""
    path, options = recurrent("lfm2", tmp_path / "full.gguf"), ModelOptions(rollback=rollback)
    with Engine.load(path, n_ctx=N_CTX, threads=1, exact=True, options=options, policy="off") as engine:
        prompt = engine.tokenize(TEXT)
        plain = finish(engine, prompt, ANSWER)
        half, save = half_right(engine, prompt, plain.tokens), Context.save
        monkeypatch.setattr(Context, "save", lambda *a, **k: b"" if k.get("on_device") else save(*a, **k))
        drafted = finish(engine, prompt, ANSWER, policy=half)
        assert drafted.tokens == plain.tokens
        assert max(half.accepted) <= rollback
        assert (drafted.draft.accepted > 0) == (rollback > 0)


def test_a_head_gets_the_features_of_its_tokens_after_tokens_that_are_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[int, NDArray[np.float32]] = {}
    take = HeadText.take

    def recorded(self: HeadText, start: int, tokens: list[int], features: NDArray[np.float32]) -> None:
        taken.update(enumerate(features.copy(), start))
        take(self, start, tokens, features)

    monkeypatch.setattr(HeadText, "take", recorded)
    model, head = model_and_drafter("mtp alone hybrid", tmp_path, "Q8_0")
    with Engine.load(
        model, draft_model=head, n_ctx=512, threads=1, exact=True, options=ModelOptions(rollback=0), policy="off"
    ) as engine:
        prompt = engine.tokenize("for number in range(10): print(number)\n")
        plain = engine.generate(prompt, max_tokens=40).wait()
        wanted = dict(taken)
        engine.decoder.forget()
        taken.clear()
        half = half_right(engine, prompt, plain.tokens)
        drafted = engine.generate(prompt, max_tokens=40, policy=half).wait()
    assert drafted.tokens == plain.tokens
    assert drafted.draft.accepted > 0
    assert taken.keys() == wanted.keys()
    for place, features in wanted.items():
        np.testing.assert_allclose(taken[place], features, rtol=1e-3, atol=1e-3)
