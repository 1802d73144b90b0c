"""Batches after a restart, after kills at any time, on a full disk, with damaged records, with a second server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_server import BatchLive, Script, app_of, batch_server, ended, jsonl, lines, records, until
from starlette.testclient import TestClient

import rest_local
from rest_local.batch import output
from rest_local.router import batches as batches_module
from rest_local.router.batches import Batches
from rest_local.router.files import Limits
from rest_local.server.settings import Settings

COMPLETIONS = "/v1/completions"
KILLS = 12
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(rest_local.__file__).parents[1])}


def made(client: openai.OpenAI, count: int) -> Any:
    file = client.files.create(file=("input.jsonl", jsonl(lines(count))), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")


def half_done(folder: Path, script: Script, count: int = 30) -> str:
    """The id of a batch whose server was stopped when a part of it was answered."""
    script.answer = lambda body: (script.hold.clear() if len(script.calls) > 9 else None, (200, {"n": body["prompt"]}))[
        1
    ]
    with batch_server(folder, script.ask) as live:
        batch_id = made(live.openai(), count).id
        until(lambda: script.running and not script.hold.is_set())
        until(lambda: live.openai().batches.retrieve(batch_id).request_counts.completed >= 9)
    script.hold.set()
    script.answer = lambda body: (200, {"n": body["prompt"]})
    return str(batch_id)


def test_a_restart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    script = Script()
    batch_id = half_done(tmp_path, script)
    before = len(script.calls)
    with batch_server(tmp_path, script.ask) as live:
        client = live.openai()
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        found = records(client, batch.output_file_id)
    assert sorted(each["custom_id"] for each in found) == sorted(f"n{number}" for number in range(30))
    assert len(script.calls) - before <= 30 - 9
    with batch_server(tmp_path, script.ask) as live:
        client = live.openai()
        assert client.batches.retrieve(batch_id) == batch
        assert records(client, batch.output_file_id) == found


def test_a_cancelled_batch_stays_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the call and what follows from it: the next start does that."""
    script = Script()
    batch_id = half_done(tmp_path, script)
    path = tmp_path / "batches" / f"{batch_id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "cancelling"}))
    calls = len(script.calls)
    with batch_server(tmp_path, script.ask) as live:
        client = live.openai()
        batch = ended(client, batch_id)
        assert batch.status == "cancelled"
        good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert len(good) >= 9
    assert len(good) + len(bad) == 30
    assert len(script.calls) == calls


@pytest.mark.parametrize("later", [(b"new",), ()])
def test_a_key_that_the_server_no_longer_knows(tmp_path: Path, later: tuple[bytes, ...]) -> None:
    """Or it has no keys any more: what a key has made is not run without it."""
    script = Script()
    script.hold.clear()
    with batch_server(tmp_path, script.ask, keys=(b"old",)) as live:
        batch_id = made(live.openai("old"), 3).id
        until(lambda: script.running)
    script.hold.set()
    calls = len(script.calls)
    with batch_server(tmp_path, script.ask, keys=later) as live:
        until(lambda: all(batch.done for batch in live.batches._batches.values()))
        with pytest.raises(openai.NotFoundError):
            live.openai("new").batches.retrieve(batch_id)
    with batch_server(tmp_path, script.ask, keys=(b"old", b"new")) as live:
        batch = live.openai("old").batches.retrieve(batch_id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "key_unknown")
    assert len(script.calls) == calls


def test_what_was_made_without_keys_is_nobodys_where_there_are_keys(tmp_path: Path) -> None:
    script = Script()
    with batch_server(tmp_path, script.ask) as live:
        batch_id = ended(live.openai(), made(live.openai(), 1).id).id
    with batch_server(tmp_path, script.ask, keys=(b"k",)) as live, pytest.raises(openai.NotFoundError):
        live.openai("k").batches.retrieve(batch_id)


def test_what_an_upload_left_is_removed(tmp_path: Path) -> None:
    for folder in ("files", "batches"):
        (tmp_path / folder).mkdir()
    (tmp_path / "files" / f"file-{'1' * 32}.data").write_bytes(b"half")
    (tmp_path / "files" / f"file-{'2' * 32}.json").write_bytes(b"{}")
    (tmp_path / "files" / f".rest-local-new-{'3' * 16}").write_bytes(b"{")
    (tmp_path / "batches" / f".rest-local-new-{'3' * 16}").write_bytes(b"{")
    with batch_server(tmp_path, Script().ask) as live:
        assert live.openai().files.list().data == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in (["lock"], [])


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b'"x"', b"\x00" * 100, b'{"id": "../x"}'],
)
def test_a_damaged_record_is_no_batch(tmp_path: Path, content: bytes) -> None:
    script = Script()
    with batch_server(tmp_path, script.ask) as live:
        good = ended(live.openai(), made(live.openai(), 1).id).id
    (tmp_path / "batches" / f"batch_{'0' * 32}.json").write_bytes(content)
    with batch_server(tmp_path, script.ask) as live:
        assert [each.id for each in live.openai().batches.list()] == [good]


@pytest.mark.parametrize("change", [{"output": "../../x"}, {"input": 5}, {"status": "odd"}, {"id": "batch_x"}])
def test_a_hostile_record_is_no_batch(tmp_path: Path, change: dict[str, Any]) -> None:
    script = Script()
    batch_id = half_done(tmp_path, script)
    path = tmp_path / "batches" / f"{batch_id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    calls = len(script.calls)
    with batch_server(tmp_path, script.ask) as live:
        assert live.openai().batches.list().data == []
    assert len(script.calls) == calls


def test_an_output_that_was_changed_fails_its_batch(tmp_path: Path) -> None:
    script = Script()
    batch_id = half_done(tmp_path, script)
    record = json.loads((tmp_path / "batches" / f"{batch_id}.json").read_text())
    (tmp_path / "files" / f"{record['output']}.data").write_bytes(b'{"custom_id": "other", "id": "x"}\n')
    with batch_server(tmp_path, script.ask) as live:
        batch = ended(live.openai(), batch_id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "output_unusable")
    assert str(tmp_path) not in batch.errors.data[0].message


def test_an_input_that_is_gone_fails_its_batch(tmp_path: Path) -> None:
    script = Script()
    batch_id = half_done(tmp_path, script)
    record = json.loads((tmp_path / "batches" / f"{batch_id}.json").read_text())
    (tmp_path / "files" / f"{record['input']}.data").unlink()
    with batch_server(tmp_path, script.ask) as live:
        batch = ended(live.openai(), batch_id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "input_unreadable")


class FullDisk:
    """Writes of outputs and records fail while `full`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full, self.written = False, 0
        write, whole = os.write, batches_module.write_atomically

        def write_part(descriptor: int, data: Any) -> int:
            self.check()
            return write(descriptor, data)

        def write_whole(*arguments: Any, **options: Any) -> None:
            self.check()
            whole(*arguments, **options)

        patch.setattr(output.os, "write", write_part)
        for module in ("batches", "files"):
            patch.setattr(f"rest_local.router.{module}.write_atomically", write_whole)

    def check(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


def test_a_full_disk_fails_the_batch_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, script = FullDisk(monkeypatch), Script()

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        disk.full = disk.full or len(script.calls) > 6  # of those before, two are not written yet at most
        return 200, {}

    script.answer = answer
    with batch_server(tmp_path, script.ask) as live:
        client = live.openai()
        batch = ended(client, made(client, 20).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "disk_full")
        assert "No space left" in batch.errors.data[0].message
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=("a", b"x"), purpose="batch")
        assert refused.value.status_code == 507
        assert len(client.files.list().data) == 1
        disk.full = False
        asyncio.run_coroutine_threadsafe(live.batches._sweep(), live.loop).result(30)
        batch = client.batches.retrieve(batch.id)
        good = records(client, batch.output_file_id)
        assert len(good) == batch.request_counts.completed >= 4
        script.calls.clear()
        script.answer = lambda body: (200, {})
        assert ended(client, made(client, 3).id).status == "completed"
    with batch_server(tmp_path, script.ask) as live:
        assert live.openai().batches.retrieve(batch.id) == batch
        assert records(live.openai(), batch.output_file_id) == good


def test_a_batch_that_fills_the_storage_fails(tmp_path: Path) -> None:
    script = Script()
    script.answer = lambda body: (200, {"text": "x" * 1000})
    with batch_server(tmp_path, script.ask, limits=Limits(total_bytes=15_000)) as live:
        client = live.openai()
        batch = ended(client, made(client, 30).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
        assert 0 < len(records(client, batch.output_file_id)) < 30
        assert live.batches.files.used == sum(file.bytes for file in client.files.list())


def test_a_second_server_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "LOCK_SECONDS", 0.02)
    code = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire()"
    code += "; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            script = Script()
            app = app_of(Batches(tmp_path, script.ask), Settings())
            with TestClient(app, base_url="http://localhost") as client:
                until(lambda: "another server" in client.get("/v1/files").text)
                answer = client.get("/v1/batches")
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                other.kill()
                until(lambda: client.get("/v1/batches").status_code == 200)
        finally:
            other.kill()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with TestClient(
        app_of(Batches(tmp_path / "file" / "x", Script().ask), Settings()), base_url="http://localhost"
    ) as c:
        until(lambda: "cannot be kept" in c.get("/v1/files").text)
        assert str(tmp_path) not in c.get("/v1/files").text


class Killable:
    """A server in a process of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        port_file = folder.parent / f"port-{name}"
        program = Path(__file__).parent / "batch_server.py"
        self.process = subprocess.Popen([sys.executable, program, folder, port_file, "0.03"], env=ENVIRONMENT)
        until(port_file.exists)
        self.live = BatchLive(int(port_file.read_text()), None, None)
        until(self._ready)

    def _ready(self) -> bool:
        try:
            return self.live.call("GET", "/v1/batches").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


def partly_uploaded(live: BatchLive) -> None:
    """A kill finds an upload that has not ended."""
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
            b"content-length: 90000\r\n\r\n--b\r\n"
            b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 30_000
        )
        live.call("GET", "/v1/batches")


def test_kills_at_any_time_lose_and_double_nothing(tmp_path: Path) -> None:
    """Half of the kills come while a file is uploaded as well."""
    rng, folder = random.Random(5), tmp_path / "kept"
    count, batch_ids, kills = 150, [], 0
    while True:
        server = Killable(folder, str(kills))
        try:
            client = server.live.openai()
            if not batch_ids:
                batch_ids = [made(client, count).id, made(client, count).id]
            found = [client.batches.retrieve(batch_id) for batch_id in batch_ids]
            if all(batch.status == "completed" for batch in found):
                break
            if kills < KILLS:
                time.sleep(rng.uniform(0.0, 0.25))
                if rng.random() < 0.5:
                    partly_uploaded(server.live)
            else:
                for batch_id in batch_ids:
                    ended(client, batch_id)
                continue
        finally:
            server.kill()
            kills += 1
    server = Killable(folder, "last")
    try:
        client = server.live.openai()
        for batch in found:
            names = Counter(each["custom_id"] for each in records(client, batch.output_file_id))
            assert names == Counter(f"n{number}" for number in range(count))
            assert batch.request_counts.completed == count
            assert batch.error_file_id is None
        known = {f"{file.id}{end}" for file in client.files.list() for end in (".data", ".json")}
        assert {path.name for path in (folder / "files").iterdir()} == known
    finally:
        server.process.send_signal(signal.SIGTERM if os.name != "nt" else signal.SIGINT)
        server.process.wait(60)
    assert kills > KILLS // 2
