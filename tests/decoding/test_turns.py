"""No prompt is evaluated twice: sessions of 20 turns, in which a template removes, changes and repeats what it does.

What has to be evaluated is what comes after the beginning that a prompt shares with an earlier text of its slots: what
a model with full attention evaluates. Recurrent state evaluates what comes after its last checkpoint there.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rest_local import Engine
from rest_local.kv_cache import checkpoints
from rest_local.llama.options import ModelOptions

TinyModel = Callable[..., Path]
TURNS, MOST = 20, 1.1
LONG, SHORT = 150, 48  # tokens of a message, of an answer


class Session:
    """A conversation as a template writes it: control tokens before and after each message."""

    def __init__(self, engine: Engine, seed: int) -> None:
        vocabulary = engine.model.vocabulary
        start, end = (vocabulary.special_token(name) for name in ("<|im_start|>", "<|im_end|>"))
        assert start is not None
        assert end is not None
        self._engine, self._start, self._end = engine, start, end
        self._random = random.Random(seed)
        self.text = self.message(0, self.words(300, random.Random(0)))  # one system prompt of all
        self._known: list[list[int]] = []  # texts that were in the cells
        self.evaluated = self.new = 0

    def words(self, n: int, source: random.Random | None = None) -> list[int]:
        return [(source or self._random).randrange(40, 120) for _ in range(n)]

    def message(self, role: int, words: list[int]) -> list[int]:
        return [self._start, 60 + role, *words, self._end, 33]

    def ask(self, text: list[int], compared: bool = False) -> list[int]:
        """Answer a text, which ends with the header of one and a word that later turns leave out. If it is `compared`,
        a request that reuses nothing has the same answer.
        """
        prompt = [*text, self._start, 61, 62, 63]
        result = self._engine.generate(prompt, max_tokens=SHORT, ignore_end=True).wait()
        answer = list(result.tokens)
        if compared:
            plain = self._engine.generate(prompt, max_tokens=SHORT, ignore_end=True, keep_prefix=False).wait()
            assert answer == plain.tokens
        self.evaluated += result.timings.prompt_tokens
        same = max((_same(prompt, known) for known in self._known), default=0)
        self.new += len(prompt) - same
        self._known.append([*prompt, *answer])
        return answer


def _same(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def agent(session: Session) -> Iterator[None]:
    """Send a tool result each turn. The template trims the end of each answer."""
    while True:
        session.text += session.message(2, session.words(LONG))
        answer = session.ask(session.text)
        session.text += [session._start, 61, 62, 63, *answer[:-2], session._end, 33]
        yield


def thinking(session: Session) -> Iterator[None]:
    """Talk with a template that removes the first part of each answer from the next turn on."""
    while True:
        session.text += session.message(1, session.words(LONG))
        answer = session.ask(session.text)
        session.text += session.message(1, answer[SHORT // 2 :])
        yield


def loop(session: Session) -> Iterator[None]:
    """Send a user's message and four calls of tools, whose thinking goes with the next message of the user."""
    while True:
        session.text += session.message(1, session.words(LONG))
        kept, full = list(session.text), list(session.text)
        for _ in range(4):
            answer, result = session.ask(full), session.message(2, session.words(LONG))
            full += [session._start, 61, 62, 63, *answer, session._end, 33, *result]
            kept += [*session.message(1, answer[SHORT // 2 :]), *result]
            yield
        session.text = kept


def edited(session: Session) -> Iterator[None]:
    """Edit the user's last message every time, and every fourth time keep an answer first."""
    for turn in range(1000):
        answer = session.ask([*session.text, *session.message(1, (last := session.words(LONG)))])
        if turn % 4 == 3:
            session.text += [*session.message(1, last), session._start, 61, 62, 63, *answer, session._end, 33]
        yield


def clock(session: Session) -> Iterator[None]:
    """Tell the time in the middle of the system prompt, another one in each turn."""
    system, talk = session.text, list[int]()
    for turn in range(1000):
        talk += session.message(1, session.words(LONG))
        answer = session.ask([*system[:150], *session.words(4), *system[150:], *talk], compared=turn % 7 == 6)
        talk += [session._start, 61, 62, 63, *answer, session._end, 33]
        yield


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Engine]:
    options = ModelOptions(n_batch=256)
    model = tiny_model(request.param, n_ctx=8192, n_layers=2)
    with Engine.load(model, n_ctx=8192, slots=3, policy="off", threads=1, options=options) as opened:
        yield opened


@pytest.mark.parametrize(
    ("engine", "kind", "at_once"),
    [
        *(("lfm2", kind, at_once) for kind, at_once in ((agent, 2), (thinking, 1), (loop, 2), (edited, 1))),
        *(("mamba", kind, at_once) for kind, at_once in ((loop, 2), (edited, 1))),
        *(("gemma3", kind, at_once) for kind, at_once in ((agent, 2), (loop, 2))),
        *(("gpt-oss", kind, at_once) for kind, at_once in ((thinking, 1), (edited, 1))),
        *((arch, clock, 1) for arch in ("llama", "gemma3", "lfm2")),
    ],
    indirect=["engine"],
)
def test_a_session_of_twenty_turns_evaluates_what_is_new(
    engine: Engine, kind: Callable[[Session], Iterator[None]], at_once: int
) -> None:
    """`at_once`: conversations that take turns, with one system prompt."""
    engine.decoder.forget()
    sessions = [Session(engine, seed) for seed in range(1, at_once + 1)]
    turns = [kind(session) for session in sessions]
    for turn in range(TURNS):
        next(turns[turn % at_once])
    evaluated, new = (sum(getattr(session, name) for session in sessions) for name in ("evaluated", "new"))
    print(f"evaluated {evaluated / new:.3f} of what is new")
    assert evaluated <= MOST * new


def test_checkpoints_are_bounded_in_number_and_bytes(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(tiny_model("mamba", n_ctx=8192), n_ctx=8192, policy="off", threads=1) as engine:
        prompt = Session(engine, 1).words(6000)
        list(engine.generate(prompt, max_tokens=2))
        (slot,) = engine.decoder.slots
        places = [at for at, _ in slot.checkpoints.states]
        assert len(places) <= checkpoints.MOST_CHECKPOINTS
        state = engine.statistics()["checkpoint_bytes"] // len(places)
        monkeypatch.setattr(checkpoints, "CHECKPOINT_BYTES", 6 * state + state // 2)
        list(engine.generate(prompt[::-1], max_tokens=2))
        places = [at for at, _ in slot.checkpoints.states]
        assert len(places) == 6
        assert places[-1] == 5999
        ahead = [(at - before) / (6000 - before) for before, at in zip([0, *places], places, strict=False)]
        assert max(ahead[:-2]) < 0.7, places
