"""The processes of models, real ones: crashes, files that change, and stopping."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.serving import process
from support.toy import demo_model

from rest_local.decoding.config import AUTO_PROJECTOR, EngineConfig
from rest_local.router.memory import need_of
from rest_local.router.process import ModelProcessFailed
from tests.router.conftest import GIGABYTE, Routed, choice, refuses
from tests.router.fake_processes import PATIENCE
from tests.server.live import until

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]

LONG = {
    "prompt": "def main", "n_predict": 1500, "ignore_eos": True, "stream": True, "rest_local": {"policy": "off"},
}  # fmt: skip


def is_answering(live: Routed) -> bool:
    """Return True if a slot of `one` is in use. Between two processes none is."""
    slots = live.get("/slots?model=one")
    return slots.status_code == 200 and any(slot["is_processing"] for slot in slots.json())


def answers(ask: Callable[[], httpx.Response], n: int) -> list[int]:
    """Return the status codes of `n` requests at a time."""
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(ask().status_code)) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def test_a_killed_process_cuts_off_its_streams(pair: Routed) -> None:
    """The other model does not notice, and the next request is answered."""
    assert pair.ask("two").status_code == 200
    other = pair.process("two")
    pair.ask("one")
    killed = pair.process("one")
    with pair.client() as client, client.stream("POST", "/completion", json={"model": "one"} | LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    assert pair.ask("one").status_code == 200
    assert pair.process("one").pid != killed.pid
    assert pair.process("two") is other


def test_a_killed_process_ends_its_other_requests_with_the_reason(pair: Routed) -> None:
    found: list[httpx.Response] = []
    pair.ask("one")
    long = LONG | {"stream": False}
    asking = threading.Thread(target=lambda: found.append(pair.ask("one", **long)))
    asking.start()
    until(partial(is_answering, pair))
    os.kill(pair.process("one").pid, signal.SIGKILL)
    asking.join(PATIENCE)
    assert found[0].status_code == 502
    assert found[0].json()["error"]["code"] == "model_crashed"
    assert "signal 9 (SIGKILL)" in found[0].json()["error"]["message"]
    assert pair.ask("one").status_code == 200


def test_requests_after_a_kill_are_answered(pair: Routed) -> None:
    """They reach no process or the next one, although the pool may not know yet that the first one has ended."""
    pair.ask("one")
    process = pair.process("one")
    os.kill(process.pid, signal.SIGKILL)
    until(partial(refuses, process.port))
    assert answers(lambda: pair.ask("one"), 8) == [200] * 8


@pytest.mark.parametrize(
    ("content", "need", "why"),
    [(b"", 3 * GIGABYTE, "3.2 GB"), (b"PK\x03\x04" + bytes(100), GIGABYTE, "a zip archive")],
    ids=["too large", "no model"],
)
def test_a_default_model_that_cannot_be_loaded_ends_the_server(
    routed: Start, files: Files, content: bytes, need: int, why: str
) -> None:
    (one,) = files("one")
    if content:
        one.write_bytes(content)
    live = routed([choice(one, need=need)], limit=2 * GIGABYTE)
    live.thread.join(PATIENCE)
    (error,) = live.errors
    assert isinstance(error, ModelProcessFailed)
    assert why in str(error)


def test_a_model_whose_file_is_gone_goes_on(routed: Start, files: Files) -> None:
    (one,) = files("one")
    live = routed([choice(one)])
    assert live.ask("one").status_code == 200
    one.unlink()
    assert live.ask("one").status_code == 200


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from /proc")
@pytest.mark.parametrize("options", [(), ("--idle", "10m")], ids=["one process", "a router"])
def test_the_processes_of_models_end_with_a_server_that_is_killed(options: tuple[str, ...]) -> None:
    with process("--no-code", *options) as server:
        server.url()
        children = server.children()
        assert children
        server.process.kill()
        server.process.wait()
        until(lambda: not any(Path(f"/proc/{child}/cmdline").exists() for child in children))


def test_a_need_is_files_cache_and_process(tmp_path: Path) -> None:
    """A projector's file counts."""
    need = need_of(EngineConfig(model=demo_model(), slots=2, n_ctx=1000))
    assert need.files == demo_model().stat().st_size
    assert need.cache == 2 * 1000 * (need_of(EngineConfig(model=demo_model(), n_ctx=8)).cache // 8)
    assert str(need).startswith("about ")
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(bytes(1000))
    linked = tmp_path / "demo.gguf"
    linked.symlink_to(demo_model())
    for given, more in ((projector, 1000), (AUTO_PROJECTOR, 1000), ("none", 0)):
        assert need_of(EngineConfig(model=linked, n_ctx=64, mmproj=given)).files == need.files + more
