"""`rest-local edit` with a fake engine: which answers become files, and that nothing else ever does."""

import json
import os
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import Call, FakePiece, Install

from rest_local.cli import edit as edit_module
from rest_local.errors import PromptTooLong
from rest_local.llama.options import Sampling

Script = list[Any]

OLD = "x = 1\ny = 2\nz = 3\n"
NEW = "x = 1\ny = 20\nz = 3\n"
PATCH = "--- {0}\n+++ {0}\n@@ -1,3 +1,3 @@\n x = 1\n-y = 2\n+y = 20\n z = 3\n"
SPEED = "500 tokens/s, 2.0 x plain, 50% from the prediction"


def answer(text: str, *after: Any) -> Script:
    """Script an answer of four tokens, half of them drafted from the prediction, and what may come `after` it."""
    half = len(text) // 2
    drafted, own = ("prediction",) * 2, ("target",) * 2
    return [FakePiece(text[:half], (1, 2), drafted), FakePiece(text[half:], (3, 4), own), *after]


def fenced(text: str) -> Script:
    return answer(f"Here it is:\n\n```py\n{text}```\n")


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder where answers to refused files are kept."""
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.py"
    path.write_text(OLD)
    return path


@pytest.fixture
def edit(call: Call) -> Call:
    """Return `call("edit", "-m", ...)` with a model that is not the demo model."""
    return lambda *arguments, **more: call("edit", "-m", "m.gguf", *map(str, arguments), **more)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, call: Call) -> Call:
    """`edit` at a terminal whose user types the given line."""

    def at_terminal(*arguments: Any, typed: str = "") -> Any:
        monkeypatch.setattr(edit_module, "_at_terminal", lambda: True)
        return call("edit", "-m", "m.gguf", *map(str, arguments), stdin=typed.encode())

    return at_terminal


def test_yes_writes_the_file_and_tells_the_speed(chat_engine: Install, edit: Call, file: Path) -> None:
    """The file is in the prompt, and is the prediction."""
    engine = chat_engine(fenced(NEW))
    done = edit(file, "make y 20", "--yes", "--temp", "0.5")
    assert (done.code, done.out, done.err) == (0, PATCH.format(file), f"{file}: +1 -1, {SPEED}\n")
    assert file.read_text() == NEW
    assert engine.closed
    [[message]] = engine.messages
    assert message["role"] == "user"
    assert f"```py\n{OLD}```" in message["content"]
    assert "make y 20" in message["content"]
    [given] = engine.arguments
    assert given == {
        "prediction": f"```py\n{OLD}```",
        "max_tokens": engine.n_ctx,
        "sampling": Sampling(temperature=0.5),
    }


def test_without_a_terminal_the_patch_is_printed_and_nothing_written(
    chat_engine: Install, edit: Call, file: Path
) -> None:
    chat_engine(fenced(NEW))
    done = edit(file, "make y 20")
    assert (done.code, done.out) == (1, PATCH.format(file))
    assert done.err.endswith("1 file would change; nothing was written, --yes writes\n")
    assert file.read_text() == OLD


def test_patch_of_a_relative_path_is_applied_by_git(
    chat_engine: Install, edit: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = "\ufeffa\r\nb\tb\r\nc\rc\r\nd", "\ufeffa\r\nb\tB\r\nc\rc\r\nnew\r\nd"
    Path("sub").mkdir()
    Path("sub/f.txt").write_bytes(old.encode())
    chat_engine(fenced("a\nb\tB\nc\rc\nnew\nd\n"))
    patch = edit("sub/f.txt", "change").out
    subprocess.run(["git", "apply", "-"], input=patch.encode(), check=True)
    assert Path("sub/f.txt").read_bytes() == new.encode()


@pytest.mark.parametrize(
    ("typed", "changed", "asked"),
    [("y\n\nY\n", "ac", 3), ("n\na\n", "bc", 2), ("y\nq\n", "a", 2), ("a\n", "abc", 1), ("y\ny\n", "", 2)],
)
def test_several_files_are_asked_about_one_by_one(
    chat_engine: Install, terminal: Call, tmp_path: Path, typed: str, changed: str, asked: int
) -> None:
    """The last case is an interrupt at the third question: then nothing is written, whatever was said before."""
    paths = [tmp_path / f"{name}.py" for name in "abc"]
    for path in paths:
        path.write_text(OLD)
    engine = chat_engine(fenced(NEW))
    done = terminal(*paths, "make y 20", typed=typed)
    assert f"Write {paths[0]}? [y]es [n]o [a]ll [q]uit [n]: " in done.out
    assert "".join(path.stem for path in paths if path.read_text() == NEW) == changed
    assert done.code == (0 if changed else 130)
    assert len(engine.prompts) == max(asked, 3 if "a\n" in typed else 0) + (not changed)


@pytest.mark.parametrize(
    ("script", "options", "cause"),
    [
        (fenced(NEW), ["-n", "4"], "the answer was cut off after 4 tokens"),
        (answer(""), [], "empty answer"),
        (answer(f"```py\n{NEW}"), [], "has no end"),
        (answer("```py\n```"), [], "is empty"),
        (
            [PromptTooLong(900, 64)],
            [],
            "the prompt has 900 tokens and the context holds 64; nothing was written; give a",
        ),
        ([*answer("```py\nx"), PromptTooLong(900, 64)], [], "the context holds 64"),
    ],
)
def test_what_is_no_whole_file_is_refused_in_one_line(
    chat_engine: Install, edit: Call, file: Path, script: Script, options: list[str], cause: str
) -> None:
    chat_engine(script)
    done = edit(file, "make y 20", "--yes", *options)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith("rest-local: error: ")
    assert cause in done.err
    assert file.read_text() == OLD


def test_the_answer_to_a_refused_file_is_kept(chat_engine: Install, edit: Call, file: Path, kept: Path) -> None:
    chat_engine(answer("I cannot\x1b[2J do that."))
    done = edit(file, "make y 20")
    (path,) = kept.iterdir()
    assert path.read_text() == "I cannot\x1b[2J do that."
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert done.err.endswith(f"; the answer is in {path}\n")
    assert json.loads(edit(file, "make y 20", "--json").out)["answer"].startswith(str(kept))
    assert "; the answer is in " not in edit(file, "make y 20", "--no-history").err
    assert len(list(kept.iterdir())) == 2


def test_a_file_that_changed_meanwhile_is_not_written(chat_engine: Install, edit: Call, file: Path) -> None:
    chat_engine([*fenced(NEW), lambda: file.write_text("other\n")])
    done = edit(file, "make y 20", "--yes")
    assert (done.code, file.read_text()) == (1, "other\n")
    assert (
        f"error: file {file}: changed on the disk meanwhile; nothing was written; edit it again; the answer is in "
        in done.err
    )


def test_interrupt_leaves_every_file_as_it_was(chat_engine: Install, edit: Call, file: Path) -> None:
    other = file.parent / "b.py"
    other.write_text(OLD)
    engine = chat_engine(fenced(NEW), [*fenced(NEW)[:1], KeyboardInterrupt()])
    done = edit(file, other, "make y 20", "--yes")
    assert (done.code, file.read_text(), other.read_text()) == (130, OLD, OLD)
    assert done.err.endswith("interrupted; no file was changed\n")
    assert sorted(os.listdir(file.parent)) == ["a.py", "b.py"]
    assert engine.closed


def test_interrupt_while_files_are_written_waits(
    chat_engine: Install, edit: Call, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = file.parent / "b.py"
    other.write_text(OLD)
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (os.kill(os.getpid(), 2), replace(*names)))
    chat_engine(fenced(NEW))
    assert edit(file, other, "make y 20", "--yes").code == 0
    assert (file.read_text(), other.read_text()) == (NEW, NEW)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([], "give FILE and an instruction"),
        (["a.py"], "give FILE and an instruction"),
        (["a.py", "a.py"], "a.py is a file"),
        (["a.py", " "], "the instruction is empty"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    chat_engine: Install, edit: Call, file: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], cause: str
) -> None:
    engine = chat_engine(fenced(NEW))
    monkeypatch.chdir(file.parent)
    Path("b.py").write_text("b\n")
    done = edit(*arguments)
    assert (done.code, done.err.count("\n"), cause in done.err) == (2, 1, True), done.err
    assert not engine.prompts


@pytest.mark.parametrize("content", [None, b"a\xff", "a".encode("utf-16"), b"a\0"])
def test_a_file_that_is_no_text_is_one_line_before_the_model_is_opened(
    chat_engine: Install, edit: Call, tmp_path: Path, file: Path, content: bytes | None
) -> None:
    engine = chat_engine(fenced(NEW))
    bad = tmp_path / "bad"
    if content is not None:
        bad.write_bytes(content)
    done = edit(file, bad, "make y 20", "--yes")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"error: file {bad}: " in done.err
    assert (engine.prompts, file.read_text()) == ([], OLD)


def test_json_is_one_line_for_each_file(chat_engine: Install, edit: Call, file: Path) -> None:
    other = file.parent / "b.py"
    other.write_text(OLD)
    chat_engine(fenced(NEW), answer(""))
    done = edit(file, other, "make y 20", "--yes", "--json")
    first, second = map(json.loads, done.out.splitlines())
    assert (first["file"], first["written"], first["error"], first["speedup"]) == (str(file), True, None, 2.0)
    assert (first["diff"], first["finish_reason"]) == (PATCH.format(file), "stop")
    assert (second["file"], second["written"], second["diff"]) == (str(other), False, "")
    assert "empty answer" in second["error"]
    assert done.code == 1


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    chat_engine: Install, terminal: Call, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    file.write_text("a\x1b[2J\tb\n")
    chat_engine(fenced("a\x1b]0;c\x07\tb\n"))
    out = terminal(file, "change it", typed="y\n").out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "-a\ufffd[2J\tb\n" in out
    assert file.read_text() == "a\x1b]0;c\x07\tb\n"
