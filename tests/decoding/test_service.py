"""The engine in its own thread over real llama.cpp contexts of tiny models: many clients, errors, the end."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rest_local import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.results import Totals
from rest_local.decoding.service import Service
from rest_local.decoding.streaming import Stream
from rest_local.errors import OptionError, PromptEmpty, QueueFull, RestLocalError, ServiceClosed
from rest_local.planning.policy import Policy
from rest_local.retrieval import Datastore, build_from_texts

TinyModel = Callable[..., Path]
PROMPTS = [f"for {name} in range({n}): print({name})\n" * 2 for n, name in enumerate(("i", "j", "key", "x", "row"))]


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[Engine]:
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=1024, slots=4) as engine:
        yield engine


@pytest.fixture
def service(engine: Engine) -> Iterator[Service]:
    with Service(engine, queue=8) as service:
        yield service


def asked(engine: Engine, prompt: str, n: int = 40, **options: object) -> Request:
    return Request(engine.tokenize(prompt), max_tokens=n, **options)  # type: ignore[arg-type]


def test_pieces_are_the_text_and_the_totals_count_it(engine: Engine, service: Service) -> None:
    before = service.statistics()
    streams = [service.submit(asked(engine, prompt)) for prompt in PROMPTS]
    for stream in streams:
        pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == stream.result.text
        assert [token for piece in pieces for token in piece.tokens] == stream.result.tokens
        assert stream.done
        assert len(stream.result.tokens) == 40
    after = service.statistics()
    assert after["requests"] - before["requests"] == len(PROMPTS)
    assert after["predicted_tokens"] - before["predicted_tokens"] == 40 * len(PROMPTS)
    assert (after["running"], after["waiting"]) == (0, 0)
    assert {row["state"] for row in service.slots()} == {"idle"}


@contextlib.contextmanager
def held(service: Service) -> Iterator[threading.Event]:
    """Keep the engine's thread busy until the event is set, so that no request gets a slot."""
    begun, release = threading.Event(), threading.Event()
    blocker = threading.Thread(target=lambda: service.run(lambda engine: (begun.set(), release.wait(30))))
    blocker.start()
    assert begun.wait(30)
    try:
        yield release
    finally:
        release.set()
        blocker.join()


def test_a_full_queue_refuses_until_a_request_leaves(engine: Engine) -> None:
    with Service(engine, queue=3) as service, held(service) as release:
        streams = [service.submit(asked(engine, "a", 5)) for _ in range(3)]
        with pytest.raises(QueueFull, match="3 requests"):
            service.submit(asked(engine, "a", 5))
        release.set()
        for stream in streams:
            stream.wait(30)
        assert len(service.submit(asked(engine, "a", 5)).wait(30).tokens) == 5


def test_requests_that_belong_together_are_queued_or_refused_together(engine: Engine) -> None:
    """More of them than may wait, where there is room for one."""
    with Service(engine, queue=3) as service, held(service) as release:
        several = [asked(engine, "a", 2) for _ in range(20)]
        streams = service.submit_all(several)
        with pytest.raises(QueueFull):
            service.submit_all(several)
        with pytest.raises(PromptEmpty):
            service.submit_all([several[0], Request([])])
        assert service.waiting == 20
        release.set()
        assert [len(stream.wait(30).tokens) for stream in streams] == [2] * 20


def test_a_full_queue_has_room_for_a_client_with_less_than_its_share(engine: Engine) -> None:
    with Service(engine, queue=6) as service, held(service) as release:

        def queued(client: str, n: int) -> list[Stream]:
            return [service.submit(asked(engine, "a", 2, client=client)) for _ in range(n)]

        streams = queued("one", 6)
        with pytest.raises(QueueFull):
            queued("one", 1)
        streams += queued("two", 3)
        for client in ("one", "two"):
            with pytest.raises(QueueFull):
                queued(client, 1)
        streams += queued("three", 2)
        for client in ("one", "two", "three"):
            with pytest.raises(QueueFull):
                queued(client, 1)
        release.set()
        assert all(len(stream.wait(30).tokens) == 2 for stream in streams)


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_a_request_cancelled_while_its_prompt_is_evaluated_leaves_right_answers(
    arch: str, tiny_model: TinyModel
) -> None:
    """At many moments the pass under way is broken off, and what was evaluated before stays right."""
    with Engine.load(tiny_model(arch, quant="Q8_0"), n_ctx=2048, slots=2, exact=True) as engine:
        prompt = (engine.tokenize("\n".join(PROMPTS)) * 20)[:700]
        with Service(engine) as service:
            wanted = service.submit(Request(prompt, max_tokens=8)).wait(60).tokens
            seconds = service.statistics()["prompt_seconds"]
            for moment in (1, 4, 8):
                service.run(lambda engine: engine.decoder.forget())
                stream = service.submit(Request(prompt, max_tokens=500))
                with contextlib.suppress(TimeoutError):
                    stream.wait(seconds * moment / 10)
                stream.cancel()
                assert stream.wait(30).finish_reason in ("cancelled", "length", "stop")
                assert service.submit(Request(prompt, max_tokens=8)).wait(60).tokens == wanted


def test_a_late_abort_breaks_off_no_other_pass(engine: Engine) -> None:
    """Between finding a request alone and breaking off its pass, another one may have come and be served."""
    state = engine.decoder.prepare(asked(engine, PROMPTS[1], policy="off"))
    engine.decoder.submit(state)
    for number in (1, 2, 3, 4):
        engine.decoder.abort(number - 1)
        engine.decoder.step(number)
    assert len(state.result.tokens) >= 3  # The first step may evaluate the prompt alone.
    engine.decoder.cancel(state)


class Waiting(Policy):
    """Decodes plainly. The first pass of a request, which has begun by then, waits for `go_on`."""

    name = "waiting"

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def begin(self, n_ctx: int) -> None:
        self.begun.set()
        assert self.go_on.wait(30)


def test_closing_breaks_off_the_pass(engine: Engine) -> None:
    service, policy = Service(engine), Waiting()
    stream = service.submit(asked(engine, PROMPTS[0] * 5, 5, policy=policy, keep_prefix=False))
    assert policy.begun.wait(30)
    thread = threading.Thread(target=service.close)
    thread.start()
    with contextlib.suppress(ServiceClosed):
        while True:  # The service refuses from the moment on in which it breaks off the pass.
            service.submit_all([])
    policy.go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.n_evaluated == 0
    with Service(engine) as again:
        assert len(again.submit(asked(engine, "a", 5)).wait(30).tokens) == 5


@pytest.mark.parametrize("again", [True, False])
def test_a_prompt_whose_client_gave_up_is_not_evaluated_again(again: bool, engine: Engine) -> None:
    """The part under way is finished for the next try, and broken off for another prompt."""
    engine.decoder.forget()
    prompt, policy = "".join(PROMPTS) * 4, Waiting()
    with Service(engine) as service:
        first = service.submit(asked(engine, prompt, 5, policy=policy))
        assert policy.begun.wait(30)
        first.cancel()
        second = service.submit(asked(engine, prompt if again else "x = 1\n" * 100, 5))
        policy.go_on.set()
        assert len(second.wait(30).tokens) == 5
    assert first.result.finish_reason == "cancelled"
    assert second.result.timings.cached_tokens == first.result.n_evaluated
    assert (first.result.n_evaluated >= 500) == again


def test_closing_drains_or_cancels_and_then_refuses(engine: Engine) -> None:
    service = Service(engine)
    stream = service.submit(asked(engine, "a", 30))
    service.close(drain_seconds=30)
    assert len(stream.result.tokens) == 30
    with pytest.raises(ServiceClosed):
        service.submit(asked(engine, "a"))
    with pytest.raises(ServiceClosed):
        service.run(lambda e: None)
    service = Service(engine)
    stream = service.submit(asked(engine, "a", 1000))
    next(iter(stream))
    service.close()
    assert stream.done
    assert stream.result.finish_reason == "cancelled"


def test_an_unexpected_fault_ends_every_request_with_an_error(engine: Engine) -> None:
    class Fault(BaseException):
        """An error that belongs to no request."""

    class Failing(Policy):
        name = "failing"

        def begin(self, n_ctx: int) -> None:
            raise Fault

    service = Service(engine)
    streams = service.submit_all([asked(engine, "a"), asked(engine, "a", policy=Failing()), asked(engine, "a")])
    for stream in streams:
        with pytest.raises(ServiceClosed):
            stream.wait(30)
    with pytest.raises(ServiceClosed):
        service.submit(asked(engine, "a"))
    service.close()
    engine.decoder.context.scheduler.cancel_all()
    with Service(engine) as again:
        assert len(again.submit(asked(engine, "a", 5)).wait(30).tokens) == 5


def test_calls_run_between_passes_and_raise_where_they_were_asked(engine: Engine, service: Service) -> None:
    stream = service.submit(asked(engine, PROMPTS[0], 200))
    assert service.run(lambda e: e.n_ctx) == 1024

    def refuse(engine: Engine) -> None:
        raise OptionError("no")

    with pytest.raises(RestLocalError, match="no"):
        service.run(refuse)
    assert len(stream.wait(30).tokens) == 200


def test_a_request_sent_back_keeps_its_sources_to_itself(tiny_model: TinyModel) -> None:
    """It goes on in another slot; the sequence that gets its first slot has other sources."""
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=512, slots=2) as engine:
        scheduler = engine.decoder.context.scheduler
        first, moved, last = (engine.decoder.prepare(asked(engine, PROMPTS[n], 40)) for n in (0, 0, 1))
        for sequence in (first, moved):
            engine.decoder.submit(sequence)
            while not sequence.text.has_slot:
                engine.decoder.step()
        left = moved.text.slot
        scheduler.queue.make_room()
        engine.decoder.cancel(first)  # Its slot holds the same prompt.
        engine.decoder.submit(last)
        engine.decoder.step()
        assert moved.text.slot is not left
        assert last.text.slot is left
        assert moved.speculation.sources is not last.speculation.sources


def test_totals_can_be_read_while_a_source_is_counted_for_the_first_time() -> None:
    totals = Totals()

    class Meddling(str):
        """Counts another source whenever it is looked at."""

        def __hash__(self) -> int:
            totals.by_source.setdefault(f"another {len(totals.by_source)}", {})
            return str.__hash__(self)

        def __deepcopy__(self, memo: object) -> str:
            hash(self)
            return str(self)

    totals.by_source[Meddling("context")] = {"drafted": 1, "accepted": 1}
    assert totals.to_dict()["by_source"]["context"] == {"drafted": 1, "accepted": 1}


def test_an_idle_service_trims_mapped_datastores_once(engine: Engine, tmp_path: Path) -> None:
    """It does so at first, and each time that there was work since."""
    trimmed = threading.Semaphore(0)

    class Trimmed(Datastore):
        def trim(self) -> None:
            trimmed.release()

    path = build_from_texts(tmp_path / "store", [("a", "x = 1")], vocabulary=engine.model.vocabulary).path
    engine.datastores.offer(path, Trimmed.open(path), is_new=True)
    engine.decoder.use_datastores()
    with Service(engine, idle_s=0.01) as service:
        assert trimmed.acquire(timeout=30)
        for _ in range(3):
            assert len(service.submit(asked(engine, "a", 5)).wait(30).tokens) == 5
            assert trimmed.acquire(timeout=30)
        service.run(lambda engine: None)  # A lookup may have happened.
        assert trimmed.acquire(timeout=30)
    assert not trimmed.acquire(blocking=False)
    engine.datastores.offer(path, None)
    engine.decoder.use_datastores()


def test_a_request_that_comes_at_the_end_of_an_idle_moment_is_served_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notification finds the thread neither waiting nor at work."""
    streams: list[Any] = []
    started, submitted = threading.Event(), threading.Event()

    def use_idle_time(seconds: float) -> bool:
        if not streams and started.wait(30):
            streams.append(service.submit(asked(engine, PROMPTS[0], 4)))
            submitted.set()
        return False

    monkeypatch.setattr(engine.decoder, "use_idle_time", use_idle_time)
    with Service(engine, idle_s=3600) as service:
        started.set()
        assert submitted.wait(30)
        assert len(streams[0].wait(60).tokens) == 4
