"""Kept responses: bounded, and forgotten where they are damaged."""

import gc
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live

from rest_local.api.response_storage import KeptResponse, ResponseStorage, item_id, items_of, new_response_id

ME, OTHER = "a" * 64, "b" * 64


def add(store: ResponseStorage, text: str, previous: str | None = None, owner: str = ME) -> KeptResponse:
    new = new_response_id(previous)
    asked = {"type": "message", "role": "user", "content": text, "id": item_id("msg", new, "i", 0)}
    said = {"type": "message", "role": "assistant", "content": text.upper(), "id": item_id("msg", new, "o", 0)}
    kept = KeptResponse(new, previous, owner, [asked], {"id": new, "output": [said]})
    assert store.keep(kept)
    return kept


def texts(kept: list[KeptResponse] | None) -> list[str] | None:
    return None if kept is None else [item["content"] for item in items_of(kept)]


def test_a_conversation_is_read_in_order(tmp_path: Path) -> None:
    store = ResponseStorage(tmp_path)
    first = add(store, "a")
    second = add(store, "b", first.id)
    third = add(store, "c", second.id)
    branch = add(store, "d", first.id)
    assert texts(store.conversation(third.id, ME)) == ["a", "A", "b", "B", "c", "C"]
    assert texts(store.conversation(branch.id, ME)) == ["a", "A", "d", "D"]
    assert store.get(second.id, ME) == ResponseStorage(tmp_path).get(second.id, ME) == second, "another process, too"
    assert store.item(second.added[0]["id"], ME) == second.added[0]
    assert store.item(second.output[0]["id"], ME) == second.output[0]


def test_a_conversation_is_its_owners(tmp_path: Path) -> None:
    store = ResponseStorage(tmp_path)
    kept = add(store, "a")
    assert store.get(kept.id, OTHER) is None
    assert store.conversation(kept.id, OTHER) is None
    assert store.item(kept.output[0]["id"], OTHER) is None


@pytest.mark.parametrize("wrong", ["", "resp_", "resp_" + "0" * 48, "resp_" + "A" * 48, "../../etc/passwd", "msg_1_o0"])
def test_an_unknown_id_is_none(tmp_path: Path, wrong: str) -> None:
    store = ResponseStorage(tmp_path)
    add(store, "a")
    assert store.get(wrong, ME) is None
    assert store.conversation(wrong, ME) is None
    assert store.item(wrong, ME) is None
    store.remove(wrong)


def test_a_removed_response_ends_what_continues_it(tmp_path: Path) -> None:
    store = ResponseStorage(tmp_path)
    first = add(store, "a")
    second = add(store, "b", first.id)
    store.remove(first.id)
    assert store.get(first.id, ME) is None
    assert store.get(second.id, ME) == second
    assert store.conversation(second.id, ME) is None


def test_only_this_user_reads_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        add(ResponseStorage(tmp_path), "a")
    finally:
        os.umask(old)
    for path in (tmp_path / "responses").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "responses").stat().st_mode) & 0o077 == 0


def test_a_damaged_file_is_a_forgotten_response(tmp_path: Path) -> None:
    store = ResponseStorage(tmp_path)
    kept = add(store, "a")
    (path,) = (tmp_path / "responses").rglob("*.json")
    whole = path.read_bytes()
    draw = random.Random(0)
    damaged: list[bytes] = [b"", b"{", b"[]", b"null", whole[:-1], whole.replace(b'"version":1', b'"version":2')]
    damaged += [whole[: draw.randrange(len(whole))] for _ in range(50)]
    damaged += [whole.replace(b'"output":[', b'"output":[3,'), whole.replace(kept.id.encode(), b"resp_0")]
    damaged.append(b"[" * 100_000)
    for data in damaged:
        path.write_bytes(data)
        assert store.get(kept.id, ME) is None, data[:80]
        assert store.conversation(kept.id, ME) is None
        assert store.item(kept.output[0]["id"], ME) is None
    path.write_bytes(whole)
    assert store.get(kept.id, ME) == kept


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStorage(tmp_path)

    def full(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rest_local.paths.os.replace", full)
    new = new_response_id()
    assert not store.keep(KeptResponse(new, None, ME, [], {"id": new, "output": []}))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert "is not kept" in caplog.text
    assert "No space left" in caplog.text
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "responses").write_text("a file in place of the folder")
    assert not ResponseStorage(tmp_path / "taken").keep(KeptResponse(new, None, ME, [], {"id": new, "output": []}))


def aged(folder: Path, seconds: float) -> None:
    """Let what is kept now look as if it was written so long ago."""
    for path in folder.rglob("*.json"):
        state = path.stat()
        os.utime(path, (state.st_atime - seconds, state.st_mtime - seconds))


def test_old_conversations_are_forgotten(tmp_path: Path) -> None:
    store = ResponseStorage(tmp_path, seconds=3600)
    old = add(store, "a")
    grown = add(store, "b")
    aged(tmp_path, 4000)
    later = add(store, "c", grown.id)
    store.sweep()
    assert store.get(old.id, ME) is None
    assert texts(store.conversation(later.id, ME)) == ["b", "B", "c", "C"], "a conversation that grew is kept whole"


@pytest.mark.parametrize("bound", ["count", "bytes"])
def test_the_conversations_longest_unused_go_first(tmp_path: Path, bound: str) -> None:
    (tmp_path / "other").mkdir()
    size = len(add(ResponseStorage(tmp_path / "other"), "word").to_bytes())
    limits = {"max_responses": 10} if bound == "count" else {"max_bytes": 11 * size + size // 2}
    store = ResponseStorage(tmp_path, **limits)
    starts = []
    for _ in range(5):  # five conversations of three
        aged(tmp_path, 10)
        first = add(store, "word")
        second = add(store, "word", first.id)
        add(store, "word", second.id)
        starts.append(second.id)
    aged(tmp_path, 10)
    newest = add(store, "word", starts[1])
    store.sweep()
    there = [store.get(start, ME) is not None for start in starts]
    assert there == [False, True, False, True, True], "16 were kept; the second conversation has just grown"
    assert store.conversation(newest.id, ME) is not None


def test_many_threads_share_a_store(tmp_path: Path) -> None:
    store = ResponseStorage(tmp_path, max_responses=40)
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        draw, mine = random.Random(seed), [None]
        try:
            for _ in range(40):
                kept = add(store, "x", draw.choice(mine))
                mine.append(kept.id)  # type: ignore[arg-type]
                store.conversation(kept.id, ME)
                store.sweep()
                if draw.random() < 0.2:
                    store.remove(kept.id)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_without_a_folder_they_are_in_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = ResponseStorage(None)
    kept = add(store, "a")
    assert store.get(kept.id, ME) == kept
    assert len([*tmp_path.rglob("*.json")]) == 1
    del store
    gc.collect()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("stream", [False, True])
def test_other_requests_are_answered_while_a_response_is_stored(
    hello: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A request within `keep` ends in a timeout where the event loop itself stores the response."""
    statuses: list[int] = []
    keep = ResponseStorage.keep

    def slowly(self: ResponseStorage, kept: KeptResponse) -> bool:
        statuses.append(httpx.get(f"{hello.url}/health", timeout=20).status_code)
        return keep(self, kept)

    monkeypatch.setattr(ResponseStorage, "keep", slowly)
    assert hello.post("/v1/responses", {"model": "demo", "input": "hi", "stream": stream}).status_code == 200
    assert statuses == [200]
