"""`rest-local history`, and how generate and chat are kept from writing one."""

import io
import json
import sys
from pathlib import Path

import pytest
from fake_cli_engine import Call

from rest_local.cli import terminal
from rest_local.cli.chat.conversation import NamedSession
from rest_local.errors import DatastoreLocked
from rest_local.retrieval import History, VocabularyId, history_home, list_histories


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make two histories, and something that was learned about the first model."""
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    for name, answers in (("toy-1", [[1, 2, 3], [4]]), ("big-2", [[5] * 1200])):
        kept = History.open(history_home() / name, VocabularyId("ab" * 32, 1000, "toy"), {"model": f"{name}\x1b[31m"})
        for answer in answers:
            kept.add(answer)
        kept.close()
    return history_home()


def names() -> list[str]:
    return [listed.name for listed in list_histories()]


def test_list(call: Call, two: Path) -> None:
    shown = call("history", "list")
    assert shown.code == 0
    big, toy = shown.out.splitlines()
    assert big.startswith("big-2 ")
    assert "  1 answer  " in big
    assert "1,200 tokens" in big
    assert "\x1b" not in shown.out
    assert "2 answers" in toy
    done = call("history", "list", "--json")
    (line,) = done.out.splitlines()
    found = json.loads(line)
    assert found["home"] == str(two)
    assert [(row["name"], row["answers"], row["tokens"]) for row in found["histories"]] == [
        ("big-2", 1, 1200),
        ("toy-1", 2, 4),
    ]
    assert {"model", "bytes", "last_use", "error"} < found["histories"][0].keys()


def test_forget_one_damaged_or_not(call: Call, two: Path) -> None:
    (two / "toy-1" / "manifest.json").write_text("{}")
    shown = call("history", "list")
    assert (shown.code, "checksum" in shown.out) == (0, True)
    done = call("history", "forget", "toy-1", "--yes")
    assert (done.code, done.out) == (0, "forgotten: toy-1\n")
    assert names() == ["big-2"]
    assert call("history", "forget", "big-2", "--yes", "--json").out == '{"forgotten": ["big-2"]}\n'
    assert call("history", "list").out == f"no answers are kept in {two}\n"
    assert json.loads(call("history", "list", "--json").out)["histories"] == []


def test_forget_all_says_what_is_gone_where_the_next_cannot_be(
    call: Call, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rest_local.retrieval import history as histories

    remove = histories.remove

    def only_big(path: Path, wait_s: float) -> None:
        if path.name == "toy-1":
            raise DatastoreLocked(path, "process 1")
        remove(path, wait_s)

    monkeypatch.setattr(histories, "remove", only_big)
    done = call("history", "forget", "--all", "--yes", "--json")
    assert done.code == 1
    assert json.loads(done.out) == {"forgotten": ["big-2"]}
    assert "toy-1" in done.err
    assert names() == ["toy-1"]


@pytest.mark.parametrize("arguments", [(), ("toy-1", "--all"), ("toy-1",), ("--all",)])
def test_wrong_usage_forgets_nothing(call: Call, two: Path, arguments: tuple[str, ...]) -> None:
    """It is wrong to give neither or both of NAME and --all, or to ask through a pipe."""
    done = call("history", "forget", *arguments)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert len(names()) == 2


@pytest.mark.parametrize(("answer", "left"), [("y\n", ["big-2"]), ("n\n", ["big-2", "toy-1"])])
def test_a_terminal_is_asked(
    two: Path, answer: str, left: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rest_local.cli.main import run

    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert run(["history", "forget", "toy-1"]) == (0 if len(left) == 1 else 1)
    out, err = capsys.readouterr()
    assert "Delete the answers of toy-1?" in err
    assert "Delete" not in out
    assert names() == left


def test_prompts_are_forgotten_wherever_they_are(call: Call, two: Path) -> None:
    """Saved chats with their cells, typed lines, cells and slots of servers, and what killed processes left of them."""
    secret = b"the secret"
    data, cache = two.parent, two.parent.parent / "cache"
    kept = [
        *(data / "sessions" / name for name in ("mine.json", "mine.cells", "my.other.cells")),
        *(folder / f".rest-local-new-{'1' * 16}" for folder in (data, data / "sessions", cache / "sessions" / "f00d")),
        data / "chat_history",
        cache / "sessions" / "f00d" / "1234.cells",
        cache / "sessions" / "slots" / "slot-mine.cells",
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(secret)
    assert call("history", "forget", "--prompts").code == 2, "without a terminal --yes is needed"
    with NamedSession("mine"):
        refused = call("history", "forget", "--prompts", "--yes")
        assert refused.code == 1
        assert "open in another process" in refused.err
    done = call("history", "forget", "--prompts", "--yes")
    assert (done.code, done.out) == (0, "forgotten: the questions that were asked\n")
    assert [path for path in kept if path.exists()] == []
    assert names() == ["big-2", "toy-1"], "answers stay"
    assert json.loads(call("history", "forget", "--all", "--prompts", "--yes", "--json").out) == {
        "forgotten": ["big-2", "toy-1"],
        "prompts": True,
    }
