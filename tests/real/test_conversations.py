"""`chat` with a real model: what a newcomer asks first, and what a conversation keeps."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import Call
from support.terminal import Terminal, answered, needs_tmux, prompted

from rest_local import Engine

SENTENCE = "The café in Köln costs 10 € — très bien."
ROWS = "\n".join(
    f"Row {n} of the inventory: {7 * n % 50} boxes of {('nails', 'screws', 'bolts', 'paint')[n % 4]}."
    for n in range(1, 21)
)
PASTED = f"{ROWS}\nThe secret word is pineapple.\n"

TURNS = ("Hi!", "How are you?", "What is the capital of France?")
ENDLESS = "What is the capital of France?"  # The greedy answer is a loop.

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(call: Call, smollm2: Path) -> Ask:
    """Return a function that asks one question and returns the line of --json."""

    def asked(question: str, *options: str) -> dict[str, Any]:
        done = call("chat", "-m", str(smollm2), "--json", *options, question)
        assert (done.code, done.err) == (0, "")
        answer: dict[str, Any] = json.loads(done.out)
        return answer

    return asked


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.load(smollm2, n_ctx=1024) as engine:
        yield engine


def test_the_third_answer_knows_the_capital_of_france(engine: Engine) -> None:
    """In the default settings it does in 20 of 21 seeds, and other processors round otherwise; a loop never does."""
    answers = []
    for seed in range(2, 7):
        messages: list[dict[str, Any]] = []
        for question in TURNS:
            messages.append({"role": "user", "content": question})
            stream = engine.chat(messages, sampling=engine.sampling(seed=seed), max_tokens=24)
            for _ in stream:
                pass
            messages.append(stream.message)
        answers.append(messages[-1]["content"])
    assert sum("Paris" in answer for answer in answers) >= 3, answers


def test_a_session_goes_on_where_it_was_and_evaluates_only_what_is_new(ask: Ask) -> None:
    """A named session keeps the cells of texts of 128 tokens and more."""
    evaluated = 0
    for question in (f"{ROWS[:600]}\nHi!", *TURNS[1:]):
        answer = ask(question, "--session", "first", "--seed", "3", "-n", "24")
        timings = answer["timings"]
        assert timings["cache_n"] >= evaluated
        evaluated = timings["cache_n"] + timings["prompt_n"]
    assert answer["text"]


def test_a_system_message_says_who_answers(ask: Ask) -> None:
    system = "You are a pirate. Answer every question with Arrr."
    answers = (ask("Who are you?", "--system", system, "--seed", seed, "-n", "24")["text"] for seed in ("3", "4", "5"))
    assert any(word in answer.lower() for answer in answers for word in ("arr", "pirate", "captain"))


def test_an_answer_ends_before_a_stop_text(ask: Ask) -> None:
    answer = ask(f"Repeat this sentence: {SENTENCE}", "--temp", "0", "--stop", " costs", "-n", "24")
    assert (answer["text"], answer["finish_reason"]) == ("The café in Köln", "stop")


@needs_tmux
def test_a_terminal_shows_the_characters_of_plain_decoding_takes_a_paste_and_stops(ask: Ask, smollm2: Path) -> None:
    question = f"Repeat this sentence: {SENTENCE}"
    plain = ask(question, "--temp", "0", "--policy", "off", "-n", "60")["text"]
    command = [sys.executable, "-m", "rest_local", "chat", "-m", str(smollm2), "--temp", "0"]
    with Terminal(command, width=100, height=100, env={"LC_ALL": "C.UTF-8"}) as terminal:
        terminal.wait_for("/bye to leave")
        terminal.wait_until(prompted, "prompt")
        terminal.type(question, "Enter")
        assert answer_to(question, answered(terminal)) == plain.strip()
        assert "café in Köln" in plain
        start_anew(terminal, 1)
        terminal.paste(PASTED)
        terminal.wait_for("pineapple.")
        terminal.type("What is the secret word?", "Enter")
        assert "pineapple" in answer_to("What is the secret word?", answered(terminal, 2))
        start_anew(terminal, 2)
        terminal.type(ENDLESS, "Enter")
        terminal.wait_until(lambda screen: ENDLESS in screen and len(screen.rpartition(ENDLESS)[2]) > 200, "answer")
        terminal.type("C-c")
        answered(terminal, 3)
        terminal.type("/bye", "Enter")
        assert terminal.wait_for_exit() == 0


def answer_to(question: str, screen: str) -> str:
    """Return the newest answer on the screen: what is between its question and the line of the speed."""
    return screen.rpartition("\n[")[0].rpartition(question)[2].strip()


def start_anew(terminal: Terminal, times: int) -> None:
    terminal.type("/clear", "Enter")
    terminal.wait_until(lambda screen: screen.count("> /clear") == times and prompted(screen), "prompt")
