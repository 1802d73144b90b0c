"""Many requests at once with the demo model: every one is answered, in any order, and one that fails ends alone."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.prices import FixedCurve
from support.toy import demo_model

from rest_local.decoding.batch import RunningBatch, best_width
from rest_local.decoding.core import Pass
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.errors import PromptEmpty, PromptTooLong

PROMPTS = ("import os\n", "import os\nimport sys\n", "def main(", "class A:\n", "for x in", "import os\n", "while")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(demo_model(), slots=3, n_ctx=128, threads=1) as engine:
        yield engine


def requests_of(engine: Engine, n: int = len(PROMPTS)) -> list[Request]:
    return [engine.request(PROMPTS[i % len(PROMPTS)], max_tokens=4 + i % 5, ignore_end=True) for i in range(n)]


@pytest.mark.parametrize("kind", [list, iter])
def test_every_request_is_answered_under_its_number(engine: Engine, kind: type) -> None:
    requests = requests_of(engine, 20)
    found = {done.number: done for done in engine.batch(kind(requests))}
    assert sorted(found) == list(range(20))
    for number, done in found.items():
        assert done.request is requests[number]
        assert done.error is None
        assert len(done.result.tokens) == requests[number].max_tokens


def test_a_list_is_run_in_the_order_of_its_prompts(engine: Engine) -> None:
    """There are three slots and one token each, so the prompts that come first end first."""
    requests = [Request([token, 5], max_tokens=1, ignore_end=True) for token in (9, 3, 7, 4, 8, 6)]
    assert [done.number for done in engine.batch(requests)][:3] == [1, 3, 5]
    assert [done.number for done in engine.batch(iter(requests))][:3] == [0, 1, 2]


def test_requests_that_fail_end_alone(engine: Engine) -> None:
    good = requests_of(engine, 3)
    requests = [good[0], Request([]), good[1], Request([5] * 128), good[2]]
    found = {done.number: done for done in engine.batch(requests)}
    assert {number: type(done.error) for number, done in found.items() if done.error} == {
        1: PromptEmpty,
        3: PromptTooLong,
    }
    assert found[1].result.finish_reason == "error"
    assert all(found[number].result.tokens for number in (0, 2, 4))


def test_requests_are_taken_as_slots_become_free_and_an_iterator_that_is_left_frees_them(engine: Engine) -> None:
    taken: list[Request] = []
    answers = engine.batch(taken.append(request) or request for request in requests_of(engine, 12))
    next(answers)
    assert len(taken) <= 3 + 1
    answers.close()
    assert not engine.decoder.context.scheduler.busy
    assert len(list(engine.batch(requests_of(engine)))) == len(PROMPTS)


def test_prompts_are_evaluated_whole_next_to_others_and_only_in_a_batch(engine: Engine) -> None:
    """No reader waits for the next token, so no prompt is cut into parts."""
    scheduler, evaluated = engine.decoder.context.scheduler, []
    real, before = scheduler.forward.submit, scheduler.prefill.stall_ms

    def submit(at_work: Pass) -> None:
        if at_work.running:
            evaluated.extend(sequence for sequence, _ in at_work.parts)
        real(at_work)

    engine.decoder.forget()
    scheduler.forward.submit = submit  # type: ignore[method-assign]
    try:
        requests = [Request([7 + n, *([5] * 60)], max_tokens=4 + 3 * n, ignore_end=True) for n in range(9)]
        answers = engine.batch(requests)
        next(answers)
        assert scheduler.prefill.stall_ms > 1e6
        for _ in answers:
            pass
    finally:
        scheduler.forward.submit = real  # type: ignore[method-assign]
    assert evaluated
    assert len({id(sequence) for sequence in evaluated}) == len(evaluated)
    assert scheduler.prefill.stall_ms == before


def test_requests_that_are_cancelled_do_not_end(engine: Engine) -> None:
    batch = RunningBatch(engine.decoder)
    numbers = [batch.add(request) for request in requests_of(engine, 3)]
    batch.cancel(numbers[:2])
    ended = []
    while batch.busy:
        ended += [done.number for done in batch.step()]
    assert ended == numbers[2:]


def test_an_exact_engine_gives_the_bits_of_plain_decoding_whatever_the_order() -> None:
    """Some prompts begin with text that is in the cells already, from the request before or another one."""
    begin = "import os\nimport sys\n" * 12
    with Engine.load(demo_model(), n_ctx=128, threads=1, exact=True) as engine:
        requests = [
            engine.request(text, max_tokens=6, ignore_end=True, logprobs=1)
            for text in (*PROMPTS[:5], *(begin + text for text in PROMPTS[:3]))
        ]
        alone = []
        for request in requests:
            engine.decoder.forget()
            stream = engine.generate(request.prompt, max_tokens=6, ignore_end=True, logprobs=1, policy="off")
            alone.append([entry for piece in stream for entry in piece.logprobs])
        for order in (requests[::-1], sorted(requests, key=lambda request: list(request.prompt))):
            found = {id(done.request): done.result.logprobs for done in engine.batch(iter(order))}
            assert [found[id(request)] for request in requests] == alone


def curve_of(weights: float, attention: float) -> FixedCurve:
    """Return a curve by which a pass of n tokens over c cells costs `weights + n * (0.1 + c * attention)`."""
    n = np.arange(1, 65)
    contexts = [0, 100_000]
    return FixedCurve(contexts, np.stack([weights + n * (0.1 + c * attention) for c in contexts]))


def test_the_width_follows_the_cost() -> None:
    widths = (1, 2, 4, 8, 16, 32)
    assert best_width(curve_of(10.0, 0.0), 1000, widths) == 32  # reading the weights is all
    assert best_width(curve_of(0.001, 0.01), 1000, widths) <= 2  # the cells of others cost as much as one's own
    found = [best_width(curve_of(10.0, 0.001), cells, widths) for cells in (10, 200, 2000, 20_000)]
    assert found == sorted(found, reverse=True)  # the longer the texts, the fewer at a time
    assert len(set(found)) == 4
