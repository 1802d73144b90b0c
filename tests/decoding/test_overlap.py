"""On a device that computes on its own, what no pass waits for is done while the next one is computed: once, for every
step, and without a difference in any answer.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from support.fake_backend import N_VOCAB, Draws, FakeBackend, logits_of
from support.fake_device import FakeDevice
from support.fake_sequences import check_cells, prompts_of, run, said, scheduler_of, sequence_of, submit_all
from support.fake_sources import SHAPES, Keen, fortune
from support.prices import FLAT

from rest_local.decoding.core import RequestState
from rest_local.decoding.engine import Engine
from rest_local.decoding.forward import Forward
from rest_local.decoding.logprobs import logprobs_of
from rest_local.decoding.request import Request
from rest_local.decoding.scheduler import Scheduler
from rest_local.decoding.service import Service
from rest_local.decoding.stream import Piece, Result
from rest_local.errors import GenerationError
from rest_local.llama.options import Sampling
from rest_local.planning.policy import Off


class Reader:
    """The owner of a sequence: what it reads, and whether a pass was under way whenever it was woken."""

    def __init__(self, sequence: RequestState, device: FakeDevice) -> None:
        self.pieces: list[Piece] = []
        self.woken: list[bool] = []
        self._job, self._device = sequence, device
        sequence.outbox.wake = self._wake

    def _wake(self, done: bool) -> None:
        self.woken.append(self._device.under_way)
        self.pieces += self._job.outbox.read()

    def check(self) -> None:
        """Check that everything was read once, in order."""
        result = self._job.result
        assert "".join(piece.text for piece in self.pieces) == result.text
        assert [token for piece in self.pieces for token in piece.tokens] == result.tokens
        assert [source for piece in self.pieces for source in piece.sources] == result.sources
        assert [told for piece in self.pieces for told in piece.logprobs] == result.logprobs


def ahead(device: FakeDevice) -> Scheduler:
    return scheduler_of(device, overlaps=True)


@pytest.mark.parametrize(
    ("shape", "drafts", "n_slots"),
    [*((shape, True, 4) for shape in SHAPES), ("tree", True, 1), ("tree", False, 1), ("tree", False, 4)],
)
def test_answers_are_those_of_a_backend_that_computes_at_once(shape: str, drafts: bool, n_slots: int) -> None:
    """They have log-probabilities, whose rows the next pass overwrites."""
    device = FakeDevice(n_ctx=1024, n_slots=n_slots)
    asked = prompts_of(5)
    sequences = [
        sequence_of(
            device, prompt, 25, Draws(seed, 0.7) if seed % 2 else None, fortune(shape),
            Keen(FLAT) if drafts else Off(), logprobs=2 if seed % 3 else None,
        )
        for seed, prompt in enumerate(asked)
    ]  # fmt: skip
    readers = [Reader(sequence, device) for sequence in sequences]
    run(ahead(device), sequences)
    for seed, (prompt, sequence, reader) in enumerate(zip(asked, sequences, readers, strict=True)):
        tokens = said(prompt, 25, Draws(seed, 0.7) if seed % 2 else None)
        assert sequence.error is None
        assert sequence.result.tokens == tokens
        assert sequence.result.text == "".join(chr(97 + token) for token in tokens)
        if seed % 3:
            rows = [logits_of([*prompt, *tokens[:n]]) for n in range(len(tokens))]
            assert sequence.result.logprobs == [logprobs_of(r, t, 2) for r, t in zip(rows, tokens, strict=True)]
        assert sequence.statistics.generated >= len(tokens)
        reader.check()
    statistics = [sequence.statistics for sequence in sequences]
    assert sum(each.accepted for each in statistics) > 5 or not drafts or shape == "wrong"


@pytest.mark.parametrize(("overlaps", "stop"), [(True, ()), (True, ("aba",)), (False, ())])
def test_text_is_delivered_while_the_next_pass_is_computed(overlaps: bool, stop: tuple[str, ...]) -> None:
    """All but the last step, whose end is known from its tokens; at once where a decode returns with all computed."""
    device = FakeDevice(n_slots=2)
    sequences = [sequence_of(device, [n], 20, Draws(n), stop=stop) for n in (3, 5)]
    readers = [Reader(sequence, device) for sequence in sequences]
    run(scheduler_of(device, overlaps=overlaps), sequences)
    for reader in readers:
        steps = len(reader.woken) - 2
        assert steps > 3
        assert reader.woken == [overlaps] * steps + [False, False]  # the last piece, and the end
        reader.check()


def finds(text: str, stop: str) -> str:
    return text[: text.index(stop)] if stop in text else text


@pytest.mark.parametrize("drafts", [True, False])
def test_a_stop_string_ends_an_answer_without_a_pass_too_many(drafts: bool) -> None:
    """Across pieces: no token after it is submitted, so there is nothing to take back."""
    found = 0
    for seed, prompt in enumerate(prompts_of(16, 12)):
        whole = "".join(chr(97 + token) for token in said(prompt, 40, Draws(seed)))
        if len(whole) < 20:
            continue
        stop = whole[12:15]

        def sequence(
            backend: FakeBackend, prompt: list[int] = prompt, seed: int = seed, stop: str = stop
        ) -> RequestState:
            policy = Keen(FLAT) if drafts else Off()
            return sequence_of(backend, prompt, 40, Draws(seed), fortune("chain"), policy, stop=(stop,))

        device, plain = FakeDevice(), FakeBackend()
        late, once = sequence(device), sequence(plain)
        reader = Reader(late, device)
        run(ahead(device), [late])
        run(scheduler_of(plain, overlaps=False), [once])
        assert late.result.text == once.result.text == finds(whole, stop)
        assert (late.result.finish_reason, late.result.stopping_word) == ("stop", stop)
        assert late.result.tokens == once.result.tokens
        assert drafts or device.calls == plain.calls
        reader.check()
        found += 1
    assert found > 5


@pytest.mark.parametrize("call", range(2, 8))
def test_an_error_while_waiting_for_logits_keeps_the_text_so_far(call: int) -> None:
    """An unexpected error ends the step; the pass before was delivered, the cells are what is committed."""
    device = FakeDevice(n_slots=2)
    scheduler = ahead(device)
    sequences = [sequence_of(device, [n], 12, Draws(n)) for n in (3, 5)]
    readers = [Reader(sequence, device) for sequence in sequences]
    device.faults = {call: RuntimeError("lost")}
    with pytest.raises(RuntimeError, match="lost"):
        run(scheduler, sequences)
    check_cells(scheduler)
    run(scheduler, [])
    for n, sequence, reader in zip((3, 5), sequences, readers, strict=True):
        assert sequence.result.tokens == said([n], 12, Draws(n))
        reader.check()


def test_a_sequence_sent_back_for_lack_of_cells_has_its_text_delivered() -> None:
    device = FakeDevice(n_ctx=64, n_slots=2)
    scheduler = ahead(device)
    asked = [[1] * 20, [2] * 20]
    sequences = [sequence_of(device, prompt, 40, Draws(n + 3)) for n, prompt in enumerate(asked)]
    readers = [Reader(sequence, device) for sequence in sequences]
    submit_all(scheduler, sequences)
    while sequences[1] not in scheduler.queue.waiting or sequences[1].speculation.sources is None:
        scheduler.step()
    assert len(sequences[1].text.tokens) - len(asked[1]) == len(sequences[1].result.tokens) > 0
    run(scheduler, [])
    for n, (prompt, sequence, reader) in enumerate(zip(asked, sequences, readers, strict=True)):
        assert sequence.result.tokens == said(prompt, 40, Draws(n + 3))
        reader.check()


@few(20)
@given(
    seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    n_slots=st.integers(1, 4),
    n_ctx=st.sampled_from([64, 128, 512]),
    failures=st.dictionaries(st.integers(1, 40), st.sampled_from([1, 2, -1, -2]), max_size=4),
    drafts=st.booleans(),
    overlaps=st.booleans(),
)
def test_every_step_is_delivered_once_whatever_happens(
    seeds: list[int], n_slots: int, n_ctx: int, failures: dict[int, int], drafts: bool, overlaps: bool
) -> None:
    """Cells that run out, decodes that fail, stop strings, cancelled requests, in any order."""
    device = FakeDevice(n_ctx=n_ctx, n_slots=n_slots)
    scheduler = scheduler_of(device, overlaps=overlaps)
    device.failures = dict(failures)
    ended: list[Any] = []
    sequences, asked = [], []
    for seed in seeds:
        prompt = np.random.default_rng(seed).integers(0, N_VOCAB - 1, 1 + seed % 20).tolist()
        stop = ("a", "bcd", "e") if seed % 3 == 0 else ()
        policy = Keen(FLAT) if drafts else Off()
        shape = [*SHAPES][seed % len(SHAPES)]
        sequence = sequence_of(
            device, prompt, 5 + seed % 30, Draws(seed), fortune(shape), policy, finished=ended.append, stop=stop
        )
        sequences.append(sequence)
        asked.append(prompt)
    readers = [Reader(sequence, device) for sequence in sequences]
    cancelled = next((sequence for sequence, seed in zip(sequences, seeds, strict=True) if seed % 5 == 0), None)
    submit_all(scheduler, sequences)
    for step in range(1000):
        if not scheduler.busy:
            break
        scheduler.step()
        check_cells(scheduler)
        if step == 6 and cancelled is not None:
            scheduler.cancel(cancelled)
    assert len(ended) == len(sequences)
    harmless = len(failures) <= 1 and 1 not in failures.values()  # a pass that fails once is done again
    for seed, prompt, sequence, reader in zip(seeds, asked, sequences, readers, strict=True):
        expected = said(prompt, 5 + seed % 30, Draws(seed))
        reader.check()
        assert sequence.result.tokens == expected[: len(sequence.result.tokens)]
        assert sequence.statistics.generated >= len(sequence.result.tokens)
        if sequence is not cancelled and seed % 3 and n_ctx == 512 and harmless:
            assert (sequence.error, sequence.result.tokens) == (None, expected)


class Forgetful(Off):
    """Cannot learn from its n-th step."""

    def __init__(self, n: int) -> None:
        self._left = n

    def catch_up(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("cannot learn")


@pytest.mark.parametrize("step", [1, 2, 5])
def test_what_fails_later_costs_only_its_own_request(step: int) -> None:
    device = FakeDevice(n_slots=3)
    ended: list[Any] = []
    policies = [Off(), Forgetful(step), Keen(FLAT)]
    sequences = [
        sequence_of(device, [n], 20, Draws(n), fortune("tree"), policy, finished=ended.append, ignore_end=True)
        for n, policy in enumerate(policies)
    ]
    scheduler = ahead(device)
    run(scheduler, sequences)
    for n in (0, 2):
        assert sequences[n].error is None
        assert sequences[n].result.tokens == said([n], 20, Draws(n))
    assert isinstance(sequences[1].error, GenerationError)
    assert "cannot learn" in str(sequences[1].error)
    assert sequences[1].result.tokens == said([1], 20, Draws(1))[: step - 1]
    assert len(ended) == 3
    run(scheduler, [again := sequence_of(device, [1], 10)])
    assert again.result.tokens == said([1], 10)


@pytest.mark.parametrize("wait", [0.2, 5.0])
def test_overlap_of_the_device_is_measured(wait: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It overlaps if reading the logits takes longer than submitting, which takes a second here."""
    now = 0.0

    def let_pass(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Slow(FakeBackend):
        def decode(self) -> int:
            let_pass(1.0)
            return super().decode()

        def logits(self, n_outputs: int) -> np.ndarray:
            let_pass(wait)
            return super().logits(n_outputs)

    monkeypatch.setattr("rest_local.decoding.forward.time", SimpleNamespace(perf_counter=lambda: now))
    backend = Slow()
    scheduler = scheduler_of(backend)
    sequence = sequence_of(backend, [1, 2], 10, Draws(5), ignore_end=True)
    scheduler.submit(sequence)
    missing = []
    while not sequence.done:
        scheduler.step()
        if not sequence.done:
            assert sequence.speculation.sources is not None
            missing.append(len(sequence.text.tokens) - len(sequence.request.prompt) - len(sequence.result.tokens))
    assert set(missing[1:]) == {1 if wait > 1.0 else 0}
    assert sequence.result.tokens == said([1, 2], 10, Draws(5))


# ---- Of a real engine ----------------------------------------------------------------------------------------------


PROMPT = "def main():\n    for x in range(3):\n"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that lets engines which are loaded from then on learn late, or at once."""
    made = Forward.__init__

    def choose(overlaps: bool) -> None:
        def init(self: Forward, backend: Any, capability: Any, slots: Any, _: Any, *more: Any) -> None:
            made(self, backend, capability, slots, overlaps, *more)

        monkeypatch.setattr(Forward, "__init__", init)

    return choose


@pytest.mark.parametrize("policy", ["off", "auto", "respec"])
def test_answers_log_probabilities_and_stops_are_the_same(
    policy: str, tiny_model: Callable[..., Path], late: Callable[[bool], None]
) -> None:
    """Exact mode gives the same bits. Closing the engine in the middle of an answer keeps what was said."""
    model = tiny_model("llama", quant="Q8_0")
    told: dict[bool, list[Result]] = {}
    for overlaps in (False, True):
        late(overlaps)
        with Engine.load(model, n_ctx=512, exact=True) as engine:
            prompt = engine.tokenize(PROMPT)
            whole = engine.generate(prompt, max_tokens=80, policy="off")
            text = "".join(piece.text for piece in whole)
            engine.decoder.forget()
            with Service(engine) as service:
                requests = [
                    Request(prompt, max_tokens=80, policy=policy, logprobs=3),
                    Request(prompt, max_tokens=80, policy=policy, stop=(text[30:33],)),
                    Request(prompt, max_tokens=80, policy=policy, sampling=Sampling(temperature=0.8, seed=5)),
                ]
                told[overlaps] = [service.submit(request).wait(60) for request in requests]
            unfinished = engine.generate(prompt, max_tokens=80, policy=policy)
            for _ in range(5):
                next(iter(unfinished))
        assert 5 <= len(unfinished.result.tokens) < 80
        assert unfinished.result.finish_reason == "cancelled"
        assert unfinished.result.tokens == whole.result.tokens[: len(unfinished.result.tokens)]
        assert unfinished.statistics.generated == len(unfinished.result.tokens)
        told[overlaps].append(unfinished.result)
    for once, after in zip(told[False][:3], told[True][:3], strict=True):
        assert (after.tokens, after.text, after.finish_reason) == (once.tokens, once.text, once.finish_reason)
        assert after.logprobs == once.logprobs
        assert after.stopping_word == once.stopping_word
    assert len(told[True][3].tokens) == len(told[False][3].tokens) + 1 or policy != "off"
