"""Pieces between two events are sent as one: complete, in order, at the end of the answer at the latest."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_service import FakeEngine, FakeStream, origin
from hypothesis import given
from hypothesis import strategies as st
from live import Live

from rest_local.api.answers import Choice
from rest_local.chat.tools import AnswerFormat, message_of, tools_of
from rest_local.decoding.logprobs import TokenLogprobs
from rest_local.decoding.stream import Piece
from rest_local.server import streaming as module
from rest_local.server.streaming import Pulse, StreamGroup

NEVER = 3600.0  # seconds: longer than any test waits
TEXTS = st.text('<think>/tool_call"{name:x} \n', max_size=6)
REASONS = "<think></think>\n<tool_call>\n"
TOOLS = [{"type": "function", "function": {"name": "x", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


def piece(number: int, text: str, n_tokens: int) -> Piece:
    """Return the piece of a step, which differs from any other. Its last token is the model's own choice."""
    tokens = tuple(range(300 + 5 * number, 300 + 5 * number + n_tokens))
    return Piece(
        text,
        tokens,
        tuple("target" if token == tokens[-1] else "datastore" for token in tokens),
        tuple(TokenLogprobs(token, -float(token), ((token, -1.0),)) for token in tokens),
        tuple(None if token == tokens[-1] else origin(line=token) for token in tokens),
    )


PIECES = st.lists(st.tuples(TEXTS, st.integers(0, 4)), min_size=1, max_size=12).map(
    lambda steps: [piece(number, *step) for number, step in enumerate(steps)]
)
CUTS = st.lists(st.booleans(), min_size=12, max_size=12)


def groups(pieces: Sequence[Piece], cuts: Sequence[bool]) -> list[list[Piece]]:
    """Return the pieces between events, where a cut is an event."""
    made: list[list[Piece]] = [[]]
    for each, ends in zip(pieces, cuts, strict=False):
        made[-1].append(each)
        if ends:
            made.append([])
    return [group for group in made if group]


def sent(engine: FakeEngine, groups: Sequence[Sequence[Piece]], shows_steps: bool, of_chat: bool) -> dict[str, Any]:
    """Return the joined content of all parts of an answer."""
    parser = AnswerFormat.of(REASONS).parser(tools_of(TOOLS), "", new_id=lambda: "id") if of_chat else None
    choice = Choice(engine, parser, shows_steps=shows_steps, sends_origins=True, ending=[])  # type: ignore[arg-type]
    parts = [*map(choice.feed, groups), choice.finish(cut=False)]
    names = ("tokens", "logprobs", "origins", "steps")
    joined = {name: [each for part in parts for each in getattr(part, name)] for name in names}
    deltas = [delta for part in parts for delta in part.deltas]
    return joined | {"text": "".join(part.text for part in parts), "message": message_of(deltas)}


@pytest.mark.parametrize("shows_steps", [True, False])
@pytest.mark.parametrize("of_chat", [True, False])
@given(pieces=PIECES, cuts=CUTS)
def test_the_parts_of_a_stream_do_not_depend_on_its_pace(
    engine: FakeEngine, of_chat: bool, shows_steps: bool, pieces: list[Piece], cuts: list[bool]
) -> None:
    one_by_one = sent(engine, [[each] for each in pieces], shows_steps, of_chat)
    assert sent(engine, groups(pieces, cuts), shows_steps, of_chat) == one_by_one
    assert one_by_one["text"] == "".join(each.text for each in pieces)
    assert one_by_one["tokens"] == [token for each in pieces for token in each.tokens]
    assert one_by_one["logprobs"] == [entry for each in pieces for entry in each.logprobs]
    if shows_steps:
        assert [each["token"] for each in one_by_one["origins"]] == one_by_one["tokens"]
        assert one_by_one["steps"] == [len(each.tokens) for each in pieces if each.tokens]


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


class Talk:
    """The streams of one request, and what their consumer received."""

    def __init__(self, engine: FakeEngine, number: int = 1) -> None:
        self.pulse = Pulse()
        request: Any = SimpleNamespace(prompt=[])
        self.streams = [FakeStream(i, request, engine.model.vocabulary, self.pulse) for i in range(number)]
        self.group = StreamGroup(self.streams, self.pulse)  # type: ignore[arg-type]
        self.handed: list[list[tuple[int, str | None]]] = []
        self.came = asyncio.Event()

    async def consume(self, meanwhile: bool = True) -> None:
        async for news in self.group.pieces(meanwhile=meanwhile):
            self.handed.append([(number, None if came is None else _text(came)) for number, came in news])
            self.came.set()

    async def next(self) -> None:
        """Wait until the consumer has received more."""
        await asyncio.wait_for(self.came.wait(), 30)
        self.came.clear()


def talking(engine: FakeEngine, script: Callable[[Talk], Awaitable[None]], number: int = 1, **how: Any) -> Talk:
    """Run the script and the consumer until the consumer has everything."""

    async def main() -> Talk:
        talk = Talk(engine, number)
        consumer = asyncio.create_task(talk.consume(**how))
        await asyncio.sleep(0)  # it looks, and waits
        await script(talk)
        await asyncio.wait_for(consumer, 30)
        return talk

    return asyncio.run(main())


def test_collected_pieces_are_sent_after_the_pause(engine: FakeEngine) -> None:
    async def script(talk: Talk) -> None:
        for word in ("one", "two", "three"):
            talk.streams[0].give(word)
            await talk.next()
        talk.streams[0].give("four")
        talk.streams[0].give("five")
        await talk.next()
        talk.streams[0].end()

    assert talking(engine, script).handed == [
        [(0, "one")], [(0, "two")], [(0, "three")], [(0, "fourfive")], [(0, None)],
    ]  # fmt: skip


def test_tokens_wake_no_task_during_the_pause(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACE", NEVER)
    calls: list[Any] = []

    async def script(talk: Talk) -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: calls.append(given) or wake(*given))
        talk.streams[0].give("first")
        assert len(calls) == 1
        talk.streams[0].give("second")
        assert len(calls) == 1, "it was woken already"
        await talk.next()
        for _ in range(100):
            talk.streams[0].give("x")
        assert len(calls) == 1
        talk.streams[0].end()
        assert len(calls) == 2

    assert talking(engine, script).handed[-1] == [(0, 100 * "x"), (0, None)]


@pytest.mark.parametrize("meanwhile", [True, False])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_nothing_is_lost_between_the_threads(engine: FakeEngine, meanwhile: bool, counts: list[int]) -> None:
    """A fast engine thread against a consumer that arms, looks and pauses."""

    async def script(talk: Talk) -> None:
        def speak(number: int, count: int) -> None:
            for each in range(count):
                talk.streams[number].give(f"{each} ")
            talk.streams[number].end()

        threads = [threading.Thread(target=speak, args=each) for each in enumerate(counts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)

    handed = [
        news for together in talking(engine, script, len(counts), meanwhile=meanwhile).handed for news in together
    ]
    for number, count in enumerate(counts):
        mine = [text for owner, text in handed if owner == number]
        assert "".join(text or "" for text in mine) == "".join(f"{each} " for each in range(count))
        assert mine.index(None) == len(mine) - 1


def test_a_disconnect_during_the_pause_ends_the_request(
    scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PACE", NEVER)
    live = scripted(answer=None)
    with live.client() as client:
        with client.stream("POST", "/completion", json={"prompt": "x", "stream": True}) as answer:
            stream = live.service.stream()
            stream.give("first")
            assert next(answer.iter_text())
            stream.give("held")
        assert stream.cancelled.wait(30)
    live.service.answer = ("next",)
    assert live.post("/completion", {"prompt": "x"}).json()["content"] == "next"
