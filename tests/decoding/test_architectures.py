"""Every kind of memory through the engine: half-right drafts at every step change nothing, near a sliding window's
edge, over recurrent state that is rolled back, and after a prefix that is kept or partly taken back.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.half_right import TEXT, HalfRight, finish, half_right

from benchmarks.tiny import ARCHITECTURES, SLIDING_WINDOW
from rest_local import Engine, Sampling
from rest_local.calibration.measuring import LoadMeter
from rest_local.decoding import decode_context, machine_load
from rest_local.decoding.stream import Result
from rest_local.llama import cores
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.options import ModelOptions

TinyModel = Callable[..., Path]
KINDS = {
    "gemma3": "tree", "gpt-oss": "tree", "lfm2": "chain", "llama": "tree", "mamba": "chain", "qwen2": "tree",
    "qwen2vl": "tree",
}  # fmt: skip
SLIDING = ("gemma3", "gpt-oss")
SEEDED = Sampling(temperature=0.8, seed=11)

FACTOR = 4
"""What the self-test reports is the largest of some hundred rows: others may go further, none of these tests' twice as
far. And two logits that change by as much each, towards each other, meet from twice as far away."""
ROUNDED = 0.05
"""Of the spread of the logits: they change by 0.01 of it where one activation is rounded to another number of 8 bits.
With AVX2 and no flash attention that happens in one of 200 rows, and all others are equal to the bit, so that the
self-test may see none."""


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path))


def leaves_at_a_near_tie_only(engine: Engine, prompt: Sequence[int], plain: Result, drafted: Result) -> None:
    """Check that the two tokens' logits are nearly equal where drafted output first differs.

    They are as near as the engine's own self-test reports on the end of that text, by its largest gap at a flip or, if
    it saw none, the largest change of a logit. (Its usual text is a source file, which changes.)
    """
    pairs = enumerate(zip(plain.tokens, drafted.tokens, strict=True))
    differ = next((i for i, (a, b) in pairs if a != b), None)
    if differ is None:
        return
    before = [*prompt, *plain.tokens[:differ]]
    with Context(engine.model, ContextSettings(n_ctx=512, n_branches=1, threads=1)) as context:
        context.batch.fill(before, np.arange(len(before)), 0, 1, np.arange(len(before)) == len(before) - 1)
        assert context.decode() == 0
        row = context.logits(1)[0]
        gap = abs(float(row[plain.tokens[differ]] - row[drafted.tokens[differ]]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rest_local.calibration.tuning.real_text", lambda model, most: before[-most:])
            engine.decoder.context.compare()
        found = engine.decoder.context.tuning.self_test
        change = max(found["largest_gap"], found["largest_change"] * float(np.linalg.norm(row)))
        assert gap <= max(FACTOR * change, ROUNDED * float(row.max() - row.min()))


def test_every_tiny_architecture_is_tried() -> None:
    assert set(KINDS) == set(ARCHITECTURES)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exact(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[tuple[str, Engine]]:
    with Engine.load(tiny_model(request.param, quant="Q8_0"), n_ctx=512, exact=True) as engine:
        yield request.param, engine


def test_exact_drafts_change_nothing(exact: tuple[str, Engine]) -> None:
    """A prompt of several sliding windows, and an answer of several more; seeded for each kind of memory once."""
    arch, engine = exact
    assert engine.decoder.context.capability.kind == "chain", engine.warnings
    assert engine.model.n_swa == (SLIDING_WINDOW if arch in SLIDING else 0)
    prompt = engine.tokenize(TEXT * 5)
    assert len(prompt) > 4 * SLIDING_WINDOW
    for sampling in (Sampling(), SEEDED) if arch in ("gemma3", "llama", "mamba") else (Sampling(),):
        plain = finish(engine, prompt, 3 * SLIDING_WINDOW, policy="off", sampling=sampling)
        half = half_right(engine, prompt, plain.tokens)
        drafted = finish(engine, prompt, 3 * SLIDING_WINDOW, sampling=sampling, policy=half)
        assert drafted.tokens == plain.tokens
        assert 30 < drafted.draft.accepted < drafted.draft.drafted - 30


def test_what_is_kept_of_a_prompt_changes_nothing(exact: tuple[str, Engine]) -> None:
    """The same prompt again, a longer one, one cut in the middle (further back than windows and snapshots reach)."""
    arch, engine = exact
    long = engine.tokenize(TEXT * 6)
    prompts = [long, long, [*long, *long[:7]], [*long[:50], *long[20:30]], long[:50], long[3:60]]
    fresh = []
    for prompt in prompts:
        engine.decoder.forget()
        fresh.append(finish(engine, prompt, 40, policy="off").tokens)
    engine.decoder.forget()
    kept = []
    for prompt, answer in zip(prompts, fresh, strict=True):
        result = finish(engine, prompt, 40, policy=half_right(engine, prompt, answer))
        kept.append(result.timings.cached_tokens)
        assert result.tokens == answer
    assert kept[0] == 0
    if KINDS[arch] == "tree":
        assert kept[1:5] == [len(long) - 1, len(long), 50, 49]


def test_threads_wait_briefly_while_other_programs_run_and_no_bit_changes(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between parts of the prompt, too, and with drafts."""
    told, busy = list[bool](), [False]
    monkeypatch.setattr(cores, "cores", lambda *_: 2)  # whatever this machine has
    monkeypatch.setattr(machine_load, "LOOK_S", 0.0)
    for module in (machine_load, decode_context):
        monkeypatch.setattr(module, "others_run", lambda: busy[0])
    monkeypatch.setattr(LoadMeter, "busy", lambda *_: busy[0])
    wait = machine_load.wait_briefly
    monkeypatch.setattr(machine_load, "wait_briefly", lambda brief: (told.append(brief), wait(brief))[1])
    options = ModelOptions(n_batch=64)  # parts of the prompt are no longer than drafts
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=512, options=options, exact=True) as engine:
        prompt, sampling = engine.tokenize(TEXT * 8), SEEDED
        assert len(prompt) > 3 * 64
        plain = finish(engine, prompt, 20, policy="off", sampling=sampling, logprobs=3)
        assert told
        assert not any(told)
        for policy in ("off", half_right(engine, prompt, plain.tokens)):
            engine.decoder.forget()
            told.clear()
            busy[0] = not busy[0]
            changing = finish(engine, prompt, 20, policy=policy, sampling=sampling, logprobs=3)
            assert changing.tokens == plain.tokens
            assert changing.logprobs == plain.logprobs
            assert told[1:] == [busy[0]] * (len(told) - 1)
            assert len(told) > 3


def test_a_hundred_prompts_say_the_same_with_drafts_in_exact_settings(tiny_model: TinyModel) -> None:
    """RELIABILITY 25, with a real model: right and wrong drafts at every step, the prompts of any length, greedy and
    seeded in turn.
    """
    rng = np.random.default_rng(9)
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=256, exact=True) as engine:
        accepted = 0
        for seed in range(100):
            prompt = rng.integers(40, 200, int(rng.integers(1, 60))).tolist()
            sampling = Sampling(temperature=0.9 * (seed % 2), seed=seed)
            plain = finish(engine, prompt, 12, policy="off", sampling=sampling)
            drafts = HalfRight([*prompt, *plain.tokens], engine.model.n_vocab, seed)
            drafted = finish(engine, prompt, 12, policy=drafts, sampling=sampling)
            assert drafted.tokens == plain.tokens
            accepted += drafted.draft.accepted
        assert accepted > 200


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fast_drafts_leave_plain_output_at_near_ties_only(arch: str, tiny_model: TinyModel) -> None:
    with Engine.load(tiny_model(arch, quant="Q8_0"), n_ctx=512, exact=False) as engine:
        assert engine.decoder.context.capability.kind == KINDS[arch]
        prompt = engine.tokenize(TEXT * 5)
        plain = finish(engine, prompt, 3 * SLIDING_WINDOW, policy="off")
        drafted = finish(engine, prompt, 3 * SLIDING_WINDOW, policy=half_right(engine, prompt, plain.tokens))
        # drafts follow the plain answer: after the first difference, which a router brings soon, none is accepted
        assert drafted.draft.drafted > 20
        assert arch == "gpt-oss" or drafted.draft.accepted > 20
        leaves_at_a_near_tie_only(engine, prompt, plain, drafted)


@pytest.mark.parametrize(("rollback", "sampling"), [(0, Sampling()), (3, SEEDED), (16, Sampling())])
def test_drafts_longer_than_the_snapshots_go_back_to_a_checkpoint(
    rollback: int, sampling: Sampling, tiny_model: TinyModel
) -> None:
    """Others, and those that have none: test_recurrent.py."""
    options = ModelOptions(rollback=rollback)
    with Engine.load(tiny_model("lfm2", quant="Q8_0"), n_ctx=512, exact=True, options=options) as engine:
        prompt = engine.tokenize(TEXT)
        plain = finish(engine, prompt, 150, policy="off", sampling=sampling)
        for longest in (17, 60):
            half = half_right(engine, prompt, plain.tokens)
            half.longest = longest
            drafted = finish(engine, prompt, 150, policy=half, sampling=sampling)
            assert drafted.tokens == plain.tokens
            assert drafted.draft.accepted > 40
        assert max(half.accepted) > 20
