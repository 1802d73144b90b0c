"""`rest-local demo`: what is shown, what is printed, how it ends. With a fake engine, and once with the real model."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import HELLO, Call, FakeEngine, FakePiece, Install
from rich.console import Console

from rest_local.catalog.stores import default_model
from rest_local.cli import comparing
from rest_local.cli.comparing import QUESTION, Prompt
from rest_local.cli.demo import Screen
from rest_local.errors import ModelNotFound

LOOP = [FakePiece("na", tuple([5, 6] * 20), ("target",) * 40)]


def test_a_pipe_gets_both_texts_and_a_table_of_what_was_measured(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    done = call("demo", "-m", "model.gguf", "--repeats", "1")
    assert (done.code, done.err, engine.closed) == (0, "", True)
    assert done.out.count("-- plain\nHello\n-- drafted\nHello\n") == 2
    *_, heading, question, edit, last = lines = done.out.splitlines()
    assert heading.split() == ["plain", "with", "drafts", "drafted", "output"]
    assert question == "question  100 tokens/s  150 tokens/s  1.50 x      60%  the same"
    assert edit == "edit      100 tokens/s  150 tokens/s  1.50 x      60%  the same"
    assert last == "Go on: rest-local chat -m model.gguf"
    assert max(map(len, lines)) <= 80
    assert {arguments["sampling"].is_greedy for arguments in engine.arguments} == {True}


def test_what_differs_repeats_or_ends_at_once_is_said(fake_engine: Install, call: Call) -> None:
    other = [FakePiece("x", (72, 9), ("target",) * 2)]
    fake_engine(HELLO, other, HELLO, HELLO, LOOP)
    done = call("demo", "--repeats", "1")
    assert done.code == 0
    assert "  differs after 1 token\n" in done.out
    assert "The answer to the edit repeats itself, which is easy to draft.\n" in done.out
    fake_engine([])
    done = call("demo", "--repeats", "1")
    assert done.code == 0
    assert "the model ended its answer at once\n" in done.out
    assert " 0 tokens/s" not in done.out


def test_a_model_with_a_template_is_asked_and_any_other_continues_a_text(fake_engine: Install, call: Call) -> None:
    engine = fake_engine()
    engine.model.chat_template = "{{ messages }}"
    call("demo", "--repeats", "1")
    assert engine.prompts[0] == f"<user>{QUESTION}<assistant>"
    assert engine.prompts[-1].startswith("<user>Rename `")
    engine = fake_engine()
    engine.model.chat_template = None
    call("demo", "--repeats", "1")
    assert not any("<user>" in prompt for prompt in engine.prompts)


def test_the_users_file_is_edited_and_json_is_one_line(fake_engine: Install, call: Call, tmp_path: Path) -> None:
    engine, code = fake_engine(), tmp_path / "totals.py"
    engine.model.chat_template = "{{ messages }}"
    code.write_text("".join(f"def total_{i}(price):\n    return price + {i}\n\n\n" for i in range(50)))
    done = call("demo", "--repeats", "1", "--json", "--code", str(code))
    question, edit = json.loads(done.out)["prompts"]
    assert (question["title"], question["text"], question["identical"]) == (QUESTION, "Hello", True)
    assert edit["title"] == "totals.py: rename price to new_price"
    assert "def total_0(new_price):\n    return new_price + 0\n" in engine.prompts[-1]


def test_a_file_without_code_is_refused(fake_engine: Install, call: Call, tmp_path: Path) -> None:
    fake_engine()
    (tmp_path / "empty.py").touch()
    done = call("demo", "--code", str(tmp_path / "empty.py"))
    assert done.code == 2
    assert done.err.endswith("empty.py: holds no name to change\n")


def test_terminal_shows_two_columns_with_tokens_in_the_colour_of_their_source() -> None:
    console = Console(force_terminal=True, width=80, height=30, record=True, color_system="standard", no_color=False)
    engine: Any = FakeEngine([HELLO])
    screen = Screen(engine, console)
    with console.capture() as capture:
        screen.begin(Prompt("a title", "text"))
        for side in ("plain", "drafted"):
            for piece in HELLO:
                screen.piece(side, piece)  # type: ignore[arg-type]
        screen.end()
    shown = capture.get()
    assert "\x1b[1;32mH\x1b[0m" in shown  # datastore
    assert "\x1b[1;36ml\x1b[0m" in shown  # context
    assert any("plain" in line and "drafted" in line for line in shown.splitlines())


def test_the_default_model_answers_in_sentences(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REST_LOCAL_MODEL")
    try:
        default_model()
    except ModelNotFound as error:
        pytest.skip(str(error))
    (tmp_path / "a.py").write_text("def area(width, height):\n    return width * height\n" * 3)
    done = call("demo", "-n", "16", "--repeats", "1", "--json", "--code", str(tmp_path / "a.py"))
    assert done.code == 0, done.err
    question, edit = json.loads(done.out)["prompts"]
    assert len(question["text"].split()) > 8
    assert edit["plain"]["n_tokens"] > 0
    assert "SmolLM2" in done.err


def test_runs_are_interleaved_and_the_speedup_is_the_median_of_pairs() -> None:
    engine: Any = FakeEngine([list(HELLO)])
    policies: list[str | None] = []

    def generate(prompt: str, *, policy: str | None, **more: Any) -> Any:
        policies.append(policy)
        engine.speeds[None] = 100.0 + 10 * len(policies)
        return FakeEngine.generate(engine, prompt, policy=policy, **more)

    engine.generate = generate
    measured = comparing.compare(engine, Prompt("a title", "text", chat=False), max_tokens=30, repeats=3)
    assert policies == ["off", None] * 4
    assert measured.drafted.speeds == (140.0, 160.0, 180.0), "the first pair is shown and does not count"
    assert measured.speedup == pytest.approx(1.6)


@pytest.mark.parametrize("chat", [True, False])
def test_an_edit_is_begun_up_to_the_new_name_without_the_newline(tmp_path: Path, chat: bool) -> None:
    code = tmp_path / "a.go"
    code.write_text("import x\n" * 9 + "func total(price int) int {\n\treturn price + price\n}\n" * 60)
    _, edit = comparing.prompts(code, chat)
    assert edit.title == "a.go: rename price to new_price"
    assert edit.chat is chat
    begun = edit.begun.removeprefix("```\n")
    assert begun.startswith("func total(new_price int) int {\n\treturn new_price + new_price\n}\n")
    assert not begun.endswith("\n")
    assert 0.3 * comparing.PASSAGE < len(begun) < 0.6 * comparing.PASSAGE
    assert "import" not in edit.text


@pytest.mark.parametrize("text", ["price", "price\n", "\n\nprice = price\n", "caf\u00e9s\r\n" * 999, "long_" * 999])
def test_any_file_has_a_passage_to_edit(tmp_path: Path, text: str) -> None:
    code = tmp_path / "a.txt"
    code.write_text(text)
    question, edit = comparing.prompts(code, True)
    assert question.title == comparing.QUESTION
    assert "new_" in edit.begun
