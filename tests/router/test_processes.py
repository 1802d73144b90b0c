"""The processes of models: crashes, memory, idleness, changed files, stopping."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from rest_local.decoding.config import EngineConfig
from rest_local.paths import demo_model
from rest_local.router import pool
from rest_local.router.memory import need_of
from rest_local.router.process import ModelProcessFailed
from rest_local.server.settings import Settings
from tests.router.conftest import GIGABYTE, PATIENCE, Routed, choice, refuses, until

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]

LONG = {"n_predict": 1500, "ignore_eos": True, "stream": True, "rest_local": {"policy": "off"}}
STREAMS = {
    "/completion": {"prompt": "def main", **LONG},
    "/v1/completions": {"prompt": "def main", **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **LONG},
}


def is_answering(live: Routed) -> bool:
    """Whether a slot of `one` is in use. No slot is, between two processes."""
    slots = live.get("/slots?model=one")
    return slots.status_code == 200 and any(slot["is_processing"] for slot in slots.json())


@pytest.mark.parametrize("path", list(STREAMS))
def test_a_killed_process_ends_its_streams_with_an_error(pair: Routed, path: str) -> None:
    """The other model does not notice, and the next request is answered."""
    other = pair.process("two") if pair.ask("two").status_code == 200 else None
    pair.ask("one")
    with pair.client() as client, client.stream("POST", path, json={"model": "one"} | STREAMS[path]) as answer:
        lines = answer.iter_lines()
        next(lines)
        killed = pair.process("one")
        os.kill(killed.pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "model_crashed" in rest[-1]
    assert "[DONE]" not in rest[-1]
    assert pair.ask("one").status_code == 200
    assert pair.process("one").pid != killed.pid
    assert pair.process("two") is other


def test_a_request_that_was_not_answered_is_sent_once_more(pair: Routed) -> None:
    """To the process that is started again; where that ends, too, the answer is 502 with the reason."""
    found: list[httpx.Response] = []
    pair.ask("one")
    long = STREAMS["/completion"] | {"stream": False}
    asking = threading.Thread(target=lambda: found.append(pair.ask("one", **long)))
    asking.start()
    for _ in range(2):
        until(partial(is_answering, pair))
        os.kill(pair.process("one").pid, signal.SIGKILL)
        until(lambda: not is_answering(pair))
    asking.join(PATIENCE)
    assert found[0].status_code == 502
    assert found[0].json()["error"]["code"] == "model_crashed"
    assert "signal 9 (SIGKILL)" in found[0].json()["error"]["message"]
    assert pair.ask("one").status_code == 200


def test_requests_at_the_moment_of_a_kill_are_answered(pair: Routed) -> None:
    """They reach the process that is ending, or none, or the next one."""
    pair.ask("one")
    os.kill(pair.process("one").pid, signal.SIGKILL)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(pair.ask("one").status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [200] * 8


def test_a_steady_process_is_started_again_without_a_request(
    routed: Start, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STEADY_SECONDS", 0.0)
    live = routed([choice(each) for each in files("one")])
    killed = live.process("one")
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: live.entry("one").process not in (None, killed) and live.entry("one").status == "loaded")


def test_one_that_ends_soon_waits_for_a_request(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one")])
    os.kill(live.process("one").pid, signal.SIGKILL)
    until(lambda: live.entry("one").status == "unloaded")
    assert live.ask("one").status_code == 200


def test_a_request_sent_right_after_a_kill_is_answered(pair: Routed) -> None:
    """The pool may not know yet that the process has ended."""
    for _ in range(3):
        pair.ask("one")
        process = pair.process("one")
        os.kill(process.pid, signal.SIGKILL)
        until(partial(refuses, process.port))
        assert pair.ask("one").status_code == 200


def test_the_least_recently_used_model_makes_room(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one", "two", "three")], limit=2 * GIGABYTE)
    live.ask("two")
    live.ask("one")
    live.ask("three")
    assert live.statuses() == {"one": "loaded", "two": "unloaded", "three": "loaded"}
    live.ask("two")
    assert live.statuses() == {"one": "unloaded", "two": "loaded", "three": "loaded"}


def test_a_model_in_use_is_unloaded_when_its_answer_has_ended(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one", "two")], limit=GIGABYTE)
    with live.client() as client:
        with client.stream("POST", "/completion", json={"model": "one", "prompt": "def main", **LONG}) as answer:
            lines = answer.iter_lines()
            next(lines)
            found: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: found.append(live.ask("two")))
            asking.start()
            until(lambda: live.entry("one").leaving)
            late: list[httpx.Response] = []
            waiting = threading.Thread(target=lambda: late.append(live.ask("one")))
            waiting.start()
            rest = [line for line in lines if line]
        assert '"stop":true' in rest[-1], "the answer was not cut off"
        asking.join(PATIENCE)
        waiting.join(PATIENCE)
    assert found[0].status_code == late[0].status_code == 200
    assert live.statuses() == {"one": "loaded", "two": "unloaded"}


def test_a_model_that_can_never_fit_is_refused_with_the_figures(routed: Start, files: Files) -> None:
    one, two = files("one", "two")
    live = routed([choice(one), choice(two, need=3 * GIGABYTE)], limit=2 * GIGABYTE)
    answer = live.ask("two")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "model_too_large"
    assert "3.2 GB" in error["message"]
    assert "2.1 GB" in error["message"]
    assert live.statuses() == {"one": "loaded", "two": "unloaded"}, "nothing was unloaded for it"


def test_the_default_model_that_does_not_fit_ends_the_server(routed: Start, files: Files) -> None:
    live = routed([choice(each, need=3 * GIGABYTE) for each in files("one")], limit=GIGABYTE)
    live.thread.join(PATIENCE)
    assert [type(error) for error in live.errors] == [ModelProcessFailed]
    assert "3.2 GB" in str(live.errors[0])


def test_a_default_model_that_cannot_be_loaded_ends_the_server(routed: Start, files: Files) -> None:
    (one,) = files("one")
    one.write_bytes(b"PK\x03\x04" + bytes(100))
    live = routed([choice(one)])
    live.thread.join(PATIENCE)
    (error,) = live.errors
    assert "a zip archive" in str(error)


def test_another_model_that_cannot_be_loaded_is_an_error_of_its_requests(routed: Start, files: Files) -> None:
    one, two = files("one", "two")
    two.write_bytes(b"PK\x03\x04" + bytes(100))
    live = routed([choice(one), choice(two)])
    answer = live.ask("two")
    assert answer.status_code == 500
    assert "a zip archive" in answer.json()["error"]["message"]
    assert live.statuses()["one"] == "loaded", "it is not unloaded for a file that can never be loaded"
    assert live.ask("one").status_code == 200


def test_an_idle_model_is_unloaded(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one")], idle=0.2)
    until(lambda: live.entry("one").status == "unloaded")
    assert live.ask("one").status_code == 200


def test_looking_does_not_keep_a_model_loaded(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one")], idle=0.5, settings=Settings(metrics=True))
    until(lambda: live.get("/slots").json() == [])


def test_a_changed_file_is_loaded_anew(routed: Start, files: Files) -> None:
    (one,) = files("one")
    live = routed([choice(one)])
    before = live.process("one").pid
    live.ask("one")
    assert live.process("one").pid == before
    os.utime(one, ns=(1, 1))
    assert live.ask("one").status_code == 200
    assert live.process("one").pid != before


def test_a_file_that_is_gone_is_an_error_and_comes_back(routed: Start, files: Files) -> None:
    (one,) = files("one")
    live = routed([choice(one)])
    content = one.read_bytes()
    one.unlink()
    assert live.ask("one").status_code == 500
    one.write_bytes(content)
    assert live.ask("one").status_code == 200


def test_many_requests_wait_for_one_load(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one")], eager=False)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(live.ask("one").status_code)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [200] * 6


def test_too_many_requests_that_wait_are_refused(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one")], eager=False, queue=1)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(live.ask("one").status_code)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert set(found) == {200, 503}


def test_a_client_that_leaves_frees_its_slot(pair: Routed) -> None:
    pair.ask("one")
    with pair.client() as client:
        with client.stream("POST", "/completion", json={"model": "one", "prompt": "def main", **LONG}) as answer:
            next(answer.iter_lines())
        until(lambda: not is_answering(pair))
    until(lambda: pair.entry("one").users == 0)


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """The command, with its stderr."""
    command = [sys.executable, "-m", "rest_local", "serve", "--port", "0", "--no-history", "--no-code"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    yield process
    process.kill()
    process.communicate()


def children_of(pid: int) -> list[int]:
    return [int(child) for each in Path(f"/proc/{pid}/task").glob("*/children") for child in each.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from /proc")
def test_the_processes_of_models_end_with_a_server_that_is_killed(server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        if '"loaded"' in line:
            break
    children = children_of(server.pid)
    assert children
    server.kill()
    server.wait()
    until(lambda: not any(Path(f"/proc/{child}/cmdline").exists() for child in children))


def test_a_need_is_files_cache_and_process() -> None:
    need = need_of(EngineConfig(model=demo_model(), slots=2, n_ctx=1000))
    assert need.files == demo_model().stat().st_size
    assert need.cache == 2 * 1000 * (need_of(EngineConfig(model=demo_model(), n_ctx=8)).cache // 8)
    assert str(need).startswith("about ")


def test_a_projector_counts(tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(bytes(1000))
    without = need_of(EngineConfig(model=demo_model(), n_ctx=64)).files
    assert need_of(EngineConfig(model=demo_model(), n_ctx=64, mmproj=projector)).files == without + 1000
    assert need_of(EngineConfig(model=demo_model(), n_ctx=64, mmproj="none")).files == without
