"""Another thread can abort a running decode. An abort without a running decode has no effect."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from benchmarks.synthetic import Shape, synthetic
from rest_local.errors import ServiceClosed
from rest_local.llama.context import Context, ContextSettings, abort_all
from rest_local.llama.model import Model
from rest_local.stop import Stop

N = 2048
SLOW = Shape(layers=8, width=512, heads=8, kv_heads=8, feed=2048, vocab=512, tied=True)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Yield a model for which a batch of N tokens takes seconds, while an abort takes milliseconds."""
    path = synthetic(SLOW, "Q8_0", tmp_path_factory.mktemp("slow") / "slow.gguf")
    with Model.open(path) as model:
        yield model


def _context(model: Model) -> Context:
    return Context(model, ContextSettings(n_ctx=2 * N, n_batch=N, n_branches=1, threads=1))


def _fill(context: Context, begin: int, count: int) -> None:
    context.batch.fill(np.arange(count) % 200 + 40, np.arange(begin, begin + count), 0, 1, 0)


def _decode_aborted_by(context: Context, abort: Callable[[], bool]) -> int:
    """Decode, abort that in another thread as soon as it runs, and return its code."""
    code = []

    def decode() -> None:
        code.append(context.decode())

    thread = threading.Thread(target=decode)
    thread.start()
    while not abort():
        assert thread.is_alive(), "the decode ended before it could be broken off"
    thread.join()
    return code[0]


def test_a_running_decode_returns_2_and_the_next_one_works(slow: Model) -> None:
    with _context(slow) as context:
        _fill(context, 0, 16)
        assert context.decode() == 0
        _fill(context, 16, N)
        assert _decode_aborted_by(context, context.breaker.abort) == 2
        assert context.remove(0, 16)
        assert context.end(0) == 16
        _fill(context, 16, 16)
        assert context.decode() == 0
        assert context.end(0) == 32


def test_an_abort_with_a_number_aborts_only_decodes_of_that_number(slow: Model) -> None:
    """It also aborts those that begin after it, because it may come between two decodes of one purpose."""
    with _context(slow) as context:
        context.breaker.number = 7
        assert not context.breaker.abort(7)
        _fill(context, 0, 16)
        assert context.decode() == 2
        assert context.decode() == 2
        assert context.remove(0, 0)
        context.breaker.number = 8
        assert context.decode() == 0
        _fill(context, 16, N)
        assert _decode_aborted_by(context, lambda: not context.breaker.abort(7) and context.breaker.abort(8)) == 2
        assert context.remove(0, 16)
        context.breaker.number = 0
        assert not context.breaker.abort(0)
        _fill(context, 16, 16)
        assert context.decode() == 0


def test_abort_all_aborts_all_contexts_of_the_process(slow: Model) -> None:
    with _context(slow) as idle, _context(slow) as context:
        _fill(context, 0, N)
        assert _decode_aborted_by(context, abort_all) == 2
        _fill(idle, 0, 16)
        assert idle.decode() == 0
    assert not abort_all()


def test_without_a_running_decode_an_abort_has_no_effect(slow: Model) -> None:
    context = _context(slow)
    assert not context.breaker.abort()
    _fill(context, 0, 16)
    assert context.decode() == 0
    assert not context.breaker.abort()
    context.close()
    assert not context.breaker.abort()


def test_a_stopped_thread_cannot_decode(slow: Model) -> None:
    """Its decode is aborted and its next one refused. Other threads continue, and so does this one after the block."""
    stop, codes = Stop(), []
    with _context(slow) as context:

        def work() -> None:
            with stop.here():
                _fill(context, 0, N)
                codes.append(context.decode())
                with pytest.raises(ServiceClosed):
                    context.decode()
            _fill(context, 0, 2)
            codes.append(context.decode())

        thread = threading.Thread(target=work)
        thread.start()
        while not context.breaker._running:
            assert thread.is_alive()
        stop.set()
        thread.join()
        assert codes == [2, 0]
        _fill(context, 2, 2)
        assert context.decode() == 0
