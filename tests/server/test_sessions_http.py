"""Slots saved and restored by name, and conversations that come back after the server was stopped."""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live, served
from support.files import mounted, write_with

from rest_local.decoding.engine import Engine
from rest_local.kv_cache import cell_files, sessions, slot_files
from rest_local.paths import cache_dir
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

TEXT = "def first(values):\n    return values[0]\n\n\n" * 30
Start = Callable[..., Live]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 256)


@pytest.fixture
def start() -> Iterator[Start]:
    """Return `start(model=..., **settings)`, which starts a server with a real engine and two slots."""
    with ExitStack() as stack:

        def begin(*, model: Path | None = None, limit: int = 1 << 30, **options: Any) -> Live:
            engine = {"slots": 2, "n_ctx": 1024, "sessions": limit, "policy": "off", "threads": 1}
            engine |= {name: options.pop(name) for name in ("slots", "exact", "n_ctx") if name in options}
            serving = Serving(
                replace(ServerSettings(port=0, aliases=("*",)), **options),
                "model",
                lambda: Engine.load(model, **engine),  # type: ignore[arg-type]
                drain_seconds=5,
            )
            live = stack.enter_context(served(serving))
            assert serving.loaded.wait(300)
            return live

        yield begin


def complete(live: Live, prompt: str = TEXT, n: int = 8, **fields: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {fields.pop('key')}"} if "key" in fields else {}
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, **fields}
    answer = live.post("/completion", body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def act(live: Live, action: str, name: str | None = "talk", slot: int | str = 0, **options: Any) -> httpx.Response:
    return live.post(f"/slots/{slot}?action={action}", {} if name is None else {"filename": name}, **options)


def slot_of(live: Live) -> int:
    """Return the slot that holds the most."""
    return int(max(live.get("/slots").json(), key=lambda slot: slot["n_past"])["id"])


def saved_file(name: str = "talk") -> Path:
    path = slot_files.path_of(cache_dir() / "sessions", name)
    assert path is not None
    return path


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize("arch", [None, "gemma3", "mamba", "lfm2"])
def test_saved_erased_and_restored(start: Start, tiny_model: Callable[..., Path], arch: str | None) -> None:
    live = start(model=tiny_model(arch) if arch else None)
    prompt = TEXT[: 1200 if arch is None else 400]
    said = complete(live, prompt)
    longer = prompt + said["content"] if arch is None else prompt
    slot = said["id_slot"]
    assert slot == slot_of(live)
    n = next(each["n_past"] for each in live.get("/slots").json() if each["id"] == slot)
    told = act(live, "save", slot=slot)
    assert told.status_code == 200, told.text
    assert told.json().keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
    assert told.json() | {"timings": 0} == {
        "id_slot": slot, "filename": "talk", "n_saved": n, "n_written": saved_file().stat().st_size, "timings": 0,
    }  # fmt: skip
    assert told.json()["timings"].keys() == {"save_ms"}
    expected = complete(live, longer)["content"]
    assert act(live, "erase", None, slot).json()["n_erased"] > 0
    assert act(live, "erase", None, slot).json() == {"id_slot": slot, "n_erased": 0}
    shutil.rmtree(next(path for path in saved_file().parents[1].iterdir() if path.name != cell_files.NAMED), True)
    restored = act(live, "restore", slot=slot).json()
    assert restored.keys() == {"id_slot", "filename", "n_restored", "n_read", "timings"}
    assert (restored["n_restored"], restored["n_read"]) == (n, saved_file().stat().st_size)
    again = complete(live, longer)
    assert again["content"] == expected
    assert again["timings"]["prompt_n"] <= 40
    assert again["timings"]["cache_n"] > 150


def test_a_later_server_restores_into_another_slot(start: Start) -> None:
    live = start()
    complete(live)
    assert act(live, "save", slot=slot_of(live)).status_code == 200
    expected = complete(live)["content"]
    live.stop()
    for folder in saved_file().parents[1].iterdir():
        if folder.name != cell_files.NAMED:
            shutil.rmtree(folder)
    live = start()
    assert act(live, "restore", slot=1).status_code == 200
    found = complete(live)
    assert found["content"] == expected
    assert found["timings"]["prompt_n"] == 1


NAMES = ["", "..", ".", "../x", "a/b", "a\\b", "/etc/passwd", "a\0b", ".hidden", "x" * 200, "C:x", "é", "a.", "a\n"]


def test_what_is_no_plain_name_is_refused(start: Start) -> None:
    live = start()
    complete(live, n=1)
    slot = slot_of(live)
    for name in NAMES:
        for action in ("save", "restore"):
            assert error_of(act(live, action, name, slot), 400)["param"] == "filename", name
    assert not list(cache_dir().rglob("slot-*"))


def test_wrong_calls_name_what_is_wrong(start: Start) -> None:
    live = start()
    assert error_of(act(live, "save"), 400)["param"] == "id_slot"  # it holds nothing
    assert error_of(act(live, "save", None), 400)["param"] == "filename"
    assert error_of(live.post("/slots/0?action=save", {"filename": 3}), 400)["param"] == "filename"
    assert error_of(act(live, "restore", "none"), 404)["param"] == "filename"
    for slot in ("2", "-1", "x", "99999999", "٣"):
        assert error_of(act(live, "save", slot=slot), 400)["param"] == "id_slot"
    for action in ("", "load", "SAVE"):
        assert error_of(act(live, action), 400)["param"] == "action"
    assert error_of(live.post("/slots/0", {}), 400)["param"] == "action"
    body = {"prompt": "x", "n_predict": 1, "prompt_cache_key": 3}
    assert error_of(live.post("/completion", body), 400)["param"] == "prompt_cache_key"


@pytest.mark.parametrize(("limit", "status", "code"), [(0, 501, "sessions_off"), (100_000, 507, "disk_full")])
def test_no_more_is_saved_than_the_limit_allows(start: Start, limit: int, status: int, code: str) -> None:
    live = start(slots=1, limit=limit)
    complete(live)
    assert error_of(act(live, "save"), status)["code"] == code


def test_other_machines_may_not(start: Start) -> None:
    live = start(keys=(b"k",), allowed_hosts=("example.org",))
    complete(live, key="k")
    for action in ("save", "restore", "erase"):
        error = error_of(act(live, action, headers={"authorization": "Bearer k"}), 403)
        assert error["code"] == "withheld"


def damage(kind: str) -> str:
    """Damage the saved file; what the error says."""
    path = saved_file()
    content = bytearray(path.read_bytes())
    if kind == "a byte":
        content[-1000] ^= 1
    elif kind == "the head":
        content[100] ^= 1
    elif kind == "cut":
        del content[len(content) // 2 :]
    elif kind == "a record":
        del content[-100:]
    elif kind == "empty":
        content.clear()
    elif kind == "a length":
        content[8:16] = (1 << 62).to_bytes(8, "little")
    else:
        content[:] = b"GGUF" + bytes(1000)
    path.write_bytes(content)
    return "no file of cells" if kind == "another file" else "damaged"


def test_a_damaged_file_is_not_restored(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    live = start(slots=1)
    expected = complete(live)["content"]
    for kind in ("a byte", "the head", "cut", "a record", "empty", "a length", "another file"):
        assert act(live, "save").status_code == 200
        caplog.clear()
        said = damage(kind)
        error = error_of(act(live, "restore"), 400)
        assert said in error["message"], kind
        assert said in caplog.text, kind
        assert complete(live)["content"] == expected


def test_a_file_of_another_model_or_beyond_the_context_is_not_restored(
    start: Start, tiny_model: Callable[..., Path]
) -> None:
    live = start()
    complete(live)
    assert act(live, "save", slot=slot_of(live)).status_code == 200
    live.stop()
    for options, said in (
        ({"model": tiny_model("llama")}, "another model"),
        ({"n_ctx": 200}, "do not fit the context"),
    ):
        live = start(**options)
        assert said in error_of(act(live, "restore"), 400)["message"]
        live.stop()


def test_a_slot_at_work_is_busy(start: Start) -> None:
    live = start(slots=1)
    body = {"prompt": "x = 1\n", "n_predict": 900, "ignore_eos": True, "stream": True}
    with live.client() as client, client.stream("POST", "/completion", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for action in ("save", "erase"):
            found = act(live, action)
            assert error_of(found, 503)["code"] == "busy"
            assert found.headers["retry-after"]


# A full disk


def test_a_disk_that_fills_up_while_a_slot_is_saved(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    live = start(slots=1)
    expected = complete(live)["content"]
    assert act(live, "save").status_code == 200
    before = saved_file().read_bytes()
    for after in range(4):
        room = iter(range(after))

        def full(write: Callable[[Any], int], data: Any, room: Iterator[int] = room) -> int:
            if next(room, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(data)

        with monkeypatch.context() as patched:
            write_with(patched, full)
            error = error_of(act(live, "save"), 507)
        assert error["code"] == "disk_full"
        assert "No space left" in error["message"]
        assert saved_file().read_bytes() == before
        assert [path.name for path in saved_file().parent.iterdir()] == [saved_file().name]
    assert act(live, "save").status_code == 200
    assert complete(live)["content"] == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a real file system of 2 MB."""
    with mounted(tmp_path / "disk", 2 << 20) as folder:
        yield folder


def test_a_small_disk_is_full(
    start: Start, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First what is saved by itself, then a slot: 1.3 MB a text."""
    monkeypatch.setattr(cell_files, "LEAST_FREE", 0)
    home = cache_dir() / "sessions"
    home.symlink_to(small_disk)
    live = start(slots=2)
    expected = [complete(live, f"# {number}\n{TEXT}")["content"] for number in range(4)]
    assert error_of(act(live, "save"), 507)["code"] == "disk_full"
    assert [complete(live, f"# {number}\n{TEXT}")["content"] for number in range(4)] == expected
    live.stop()
    assert "sessions are not kept on disk for now" in caplog.text
    assert not list(small_disk.rglob(".*"))
    assert all(path.stat().st_size for path in small_disk.rglob("*.cells"))


# Keys and their owners


def test_another_key_restores_nothing(start: Start) -> None:
    """The log tells it, and no answer tells what was in memory."""
    options: dict[str, Any] = {"keys": (b"one", b"two"), "allowed_hosts": ("example.org",), "slots": 1}
    live = start(**options)
    complete(live, key="one")
    live.stop()

    def restored(key: str) -> int:
        live = start(**options)
        found = complete(live, key=key)
        engine = live.serving.state.engine
        assert engine is not None
        n = int(engine.statistics()["cached_tokens"])
        assert "cache_n" not in found["timings"]
        live.stop()
        return n

    assert restored("two") == 0
    assert restored("one") > 256
    assert restored("two") > 256, "its own"


TWO = {"keys": (b"one", b"two")}  # Both are on the loopback.


def test_keys_are_other_users_on_the_loopback_too(start: Start) -> None:
    """A proxy on this machine may send the requests of others as its own."""
    live = start(**TWO)
    complete(live, key="one")
    found = complete(live, key="one")
    assert "cache_n" not in found["timings"]
    for action in ("save", "restore", "erase"):
        assert error_of(act(live, action, headers={"x-api-key": "two"}), 403)["code"] == "withheld"
    assert all("n_past" not in slot for slot in live.get("/slots", headers={"x-api-key": "two"}).json())


def test_a_key_finds_nothing_of_another_in_memory_or_in_files(start: Start) -> None:
    """If counts and slots are shown at all, they are those of the key."""
    live = start(**TWO, statistics=True)
    one, two = ({"headers": {"x-api-key": key}} for key in ("one", "two"))
    said = complete(live, key="one")["content"]
    slot = int(max(live.get("/slots", **one).json(), key=lambda each: each["n_past"])["id"])
    assert complete(live, key="two")["timings"]["cache_n"] == 0
    assert complete(live, key="two")["timings"]["cache_n"] > 256
    assert complete(live, key="one")["timings"]["cache_n"] > 256
    saved = act(live, "save", slot=slot, **one).json()
    assert saved["n_saved"] > 256
    assert "holds nothing" in error_of(act(live, "save", slot=slot, **two), 400)["message"]
    assert error_of(act(live, "restore", slot=slot, **two), 404)["code"] == "not_found"
    assert act(live, "erase", None, slot, **two).json()["n_erased"] == 0
    assert complete(live, key="one")["timings"]["cache_n"] > 256, "it was not erased"
    other = 1 - slot
    assert act(live, "save", slot=other, **two).status_code == 200, "under the same name"
    assert complete(live, TEXT + "#", key="two")["timings"]["cache_n"] > 256, "its own"
    assert act(live, "erase", None, slot, **one).json()["n_erased"] > 256
    assert act(live, "restore", slot=other, **one).json()["n_restored"] == saved["n_saved"]
    assert act(live, "erase", None, other, **two).json()["n_erased"] == 0, "it was the slot of that key before"
    again = complete(live, key="one")
    assert (again["content"], again["timings"]["prompt_n"]) == (said, 1)


def test_of_one_key_nothing_is_withheld(start: Start) -> None:
    live = start(keys=(b"one",))
    headers = {"x-api-key": "one"}
    complete(live, key="one")
    assert complete(live, key="one")["timings"]["cache_n"] > 256
    found = live.get("/slots", headers=headers).json()
    slot = int(max(found, key=lambda each: each["n_past"])["id"])
    assert act(live, "save", slot=slot, headers=headers).status_code == 200


def test_saving_goes_on_while_others_are_answered(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes long, and another slot gets tokens between two parts."""
    live = start(slots=2)
    complete(live)
    slot = slot_of(live)
    turn, waits = threading.Semaphore(0), threading.Semaphore(0)

    def slow(write: Callable[[Any], int], data: Any) -> int:
        if len(data) > 10_000:
            waits.release()
            assert turn.acquire(timeout=60)
        return write(data)

    write_with(monkeypatch, slow)
    saved: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: saved.append(act(live, "save", slot=slot)))
    thread.start()
    for number in range(2):
        assert waits.acquire(timeout=60)
        assert len(complete(live, f"y = {number}\n", 4)["content"])
        turn.release()
    for _ in range(50):
        turn.release()
    thread.join(60)
    assert saved[0].status_code == 200, saved[0].text
