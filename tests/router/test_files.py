"""Files of clients: uploads as a stream, pages of the list, limits, hostile names and forms, what stays on the disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from batch_server import BatchLive, Script, batch_server, jsonl, lines, until
from hypothesis import given
from hypothesis import strategies as st

from rest_local.router.batch_bodies import MOST_PARTS, Form
from rest_local.router.files import Limits
from rest_local.server.errors import ApiError

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3
HOSTILE = [
    "../../etc/passwd",
    "/etc/passwd",
    "..\\..\\x",
    "a\x00b",
    "a\r\nx: y",
    'a"; name="purpose"',
    "\u202egpj.exe",
    "x" * 900,
]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[BatchLive]:
    with batch_server(tmp_path / "kept", Script().ask, limits=Limits(file_bytes=1 << 20, files=30)) as live:
        yield live


def put(live: BatchLive, data: bytes = b"{}\n", name: str = "a.jsonl", **fields: str) -> httpx.Response:
    return live.call("POST", "/v1/files", files={"file": (name, data)}, data={"purpose": "batch"} | fields)


def test_a_file_comes_back_as_it_was_sent(live: BatchLive) -> None:
    client = live.openai()
    begun = int(time.time())
    for data in (b"", b"x", PNG, b"\r\n--boundary\r\n" * 100, os.urandom(1 << 20)):
        file = client.files.create(file=("night.jsonl", data), purpose="batch")
        assert (file.object, file.filename, file.purpose, file.bytes) == ("file", "night.jsonl", "batch", len(data))
        assert begun <= file.created_at <= time.time()
        assert file.expires_at == pytest.approx(file.created_at + 30 * 86400, abs=1)
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).content == data


def test_a_content_is_never_a_page(live: BatchLive) -> None:
    file_id = put(live, b"<script>alert(1)</script>", "a.html").json()["id"]
    headers = live.call("GET", f"/v1/files/{file_id}/content").headers
    assert headers["content-type"] == "application/octet-stream"
    assert (headers["content-disposition"], headers["x-content-type-options"]) == ("attachment", "nosniff")


def test_files_are_deleted(live: BatchLive, tmp_path: Path) -> None:
    client = live.openai()
    file = client.files.create(file=("a", b"x"), purpose="batch")
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert list((tmp_path / "kept" / "files").iterdir()) == []


def test_files_are_listed_in_pages(live: BatchLive) -> None:
    client = live.openai()
    ids = [client.files.create(file=(f"{n}", b"x"), purpose="batch").id for n in range(5)]
    assert [each.id for each in client.files.list(limit=2)] == ids[::-1]
    assert [each.id for each in client.files.list(order="asc", limit=3)] == ids
    assert [each.id for each in client.files.list(order="asc", after=ids[3]).data] == [ids[4]]
    assert client.files.list(purpose="batch_output").data == []
    assert len(client.files.list(purpose="batch").data) == 5
    for query in ("limit=0", "limit=10001", "limit=-1", "limit=1e3", "limit=%B2", "order=up", "after=file-x"):
        answer = live.call("GET", f"/v1/files?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), query


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_shown(live: BatchLive, tmp_path: Path, name: str) -> None:
    answer = put(live, b"{}\n", name)
    assert answer.status_code == 200, answer.text
    shown = answer.json()["filename"]
    assert shown.isprintable()
    assert len(shown) <= 255
    assert answer.json()["purpose"] == "batch"
    assert {path.name[:5] for path in (tmp_path / "kept" / "files").iterdir()} == {"file-"}
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}


@pytest.mark.parametrize("file_id", ["x", "file-", "..", "%2e%2e%2flock", "file-%00", "file-" + "0" * 32, "0" * 9000])
def test_an_unknown_id(live: BatchLive, file_id: str) -> None:
    for path in (file_id, f"{file_id}/content"):
        assert live.call("GET", f"/v1/files/{path}").status_code == 404
    assert live.call("DELETE", f"/v1/files/{file_id}").status_code in (404, 405)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"purpose": "x" * 5000}, "purpose"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "10"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 4000}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after"),
    ],
)
def test_wrong_fields_of_a_form(live: BatchLive, tmp_path: Path, fields: dict[str, str], param: str) -> None:
    answer = put(live, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert list((tmp_path / "kept" / "files").iterdir()) == []


def test_a_file_is_kept_as_long_as_its_client_says(live: BatchLive) -> None:
    client = live.openai()
    expiry = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("a", b"x"), purpose="batch", expires_after=expiry)
    assert file.expires_at == pytest.approx(file.created_at + 3600, abs=1)


def form(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    body = b"".join(b"--b\r\ncontent-disposition: %s\r\n\r\n%s\r\n" % (head.encode(), data) for head, data in parts)
    return body + b"--b" + end


FILE = ('form-data; name="file"; filename="a"', b"{}\n")
PURPOSE = ('form-data; name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data; boundary=b", form(FILE, PURPOSE), 200),
        ("multipart/form-data; boundary=b", form(PURPOSE, FILE), 200),
        ('multipart/form-data; boundary="b"', form(PURPOSE, FILE), 200),
        ("multipart/form-data; boundary=b", form(PURPOSE), 400),
        ("multipart/form-data; boundary=b", form(FILE), 400),
        ("multipart/form-data; boundary=b", form(FILE, FILE, PURPOSE), 400),
        ("multipart/form-data; boundary=b", form(FILE, PURPOSE, end=b""), 400),
        ("multipart/form-data; boundary=b", form(FILE, *[PURPOSE] * MOST_PARTS), 400),
        ("multipart/form-data; boundary=b", form(("form-data; " + "x" * 9000, b""), FILE, PURPOSE), 400),
        ("multipart/form-data; boundary=b", b"", 400),
        ("multipart/form-data; boundary=b", b"{}", 400),
        ("multipart/form-data; boundary=b", b"--b\r\n\xff\xfe: x\r\n\r\n\r\n--b--\r\n", 400),
        ("multipart/form-data; boundary=" + "b" * 300, form(FILE, PURPOSE), 400),
        ("multipart/form-data; boundary=", form(FILE, PURPOSE), 400),
        ("multipart/form-data", form(FILE, PURPOSE), 400),
        ("application/json", b"{}", 415),
        ("text/plain", form(FILE, PURPOSE), 415),
    ],
)
def test_forms(live: BatchLive, tmp_path: Path, kind: str, body: bytes, status: int) -> None:
    answer = live.call("POST", "/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert len(list((tmp_path / "kept" / "files").iterdir())) == (2 if status == 200 else 0)


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=30), st.binary(max_size=60))
def test_a_form_may_come_in_any_parts(data: bytes, cuts: list[int], noise: bytes) -> None:
    """The file is the same however it arrives, and no bytes are a fault."""
    read = bytearray()
    boundary = b"\r\n--b"
    if boundary in data + boundary[:3]:
        return
    whole = form((FILE[0], data), PURPOSE)
    one = Form("multipart/form-data; boundary=b", read.extend)
    for cut in (*cuts, len(whole)):
        if whole:
            one.feed(whole[:cut])
            whole = whole[cut:]
    one.finish()
    assert (bytes(read), one.fields) == (data, {"purpose": "batch"})
    with contextlib.suppress(ApiError):
        Form("multipart/form-data; boundary=b", read.extend).feed(b"--b\r\n" + noise)


def test_json_routes_take_no_form(live: BatchLive) -> None:
    """A page of another origin could send one without being asked."""
    answer = live.call("POST", "/v1/batches", files={"file": ("a", b"x")})
    assert answer.status_code == 415


def test_pages_of_other_origins_cannot_upload(live: BatchLive, tmp_path: Path) -> None:
    for origin in ("https://evil.example", "null"):
        answer = live.call("POST", "/v1/files", files={"file": ("a", b"x")}, headers={"origin": origin})
        assert answer.status_code == 403
    assert list((tmp_path / "kept" / "files").iterdir()) == []


def test_a_file_that_is_too_large(live: BatchLive, tmp_path: Path) -> None:
    for data in (b"x" * ((1 << 20) + 1), b"x" * (3 << 20)):
        answer = put(live, data)
        assert answer.status_code == 413
        chunks = (data[at : at + 65536] for at in range(0, len(data), 65536))
        head = b"--b\r\ncontent-disposition: " + FILE[0].encode() + b"\r\n\r\n"
        try:
            answer = live.call(
                "POST", "/v1/files", content=(each for part in ([head], chunks) for each in part),
                headers={"content-type": "multipart/form-data; boundary=b"},
            )  # fmt: skip
            assert answer.status_code == 413
        except httpx.TransportError:  # the server closed the connection while the client still sent
            pass
    assert list((tmp_path / "kept" / "files").iterdir()) == []
    assert live.batches is not None
    assert live.batches.files.used == 0


def test_all_files_together_are_bounded(tmp_path: Path) -> None:
    with batch_server(tmp_path, Script().ask, limits=Limits(total_bytes=10_000, files=100)) as live:
        ids = [put(live, b"x" * 3000).json()["id"] for _ in range(3)]
        answer = put(live, b"x" * 3000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "storage_full")
        assert live.call("DELETE", f"/v1/files/{ids[0]}").status_code == 200
        assert put(live, b"x" * 3000).status_code == 200


def test_the_number_of_files_is_bounded(live: BatchLive) -> None:
    for _ in range(30):
        assert put(live).status_code == 200
    assert put(live).json()["error"]["code"] == "storage_full"


def test_a_client_that_leaves_leaves_nothing(live: BatchLive, tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "files"
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
            b"content-length: 90000\r\n\r\n" + form(FILE)[:-4] + b"x" * 30_000
        )
        until(lambda: list(folder.iterdir()))
    until(lambda: not list(folder.iterdir()))
    assert live.batches is not None
    assert live.batches.files.used == 0


def test_files_expire(tmp_path: Path) -> None:
    late = 0.0
    with batch_server(tmp_path, Script().ask, clock=lambda: time.time() + late) as live:
        file_id = put(live).json()["id"]
        late = 30 * 86400 + 1
        assert live.call("GET", f"/v1/files/{file_id}").status_code == 404
        assert live.openai().files.list().data == []
        assert live.batches is not None
        assert live.loop is not None
        asyncio.run_coroutine_threadsafe(live.batches._sweep(), live.loop).result(30)
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_only_the_user_reads_what_is_kept(live: BatchLive, tmp_path: Path) -> None:
    client = live.openai()
    file = client.files.create(file=("a", jsonl(lines(1))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    until(lambda: client.batches.retrieve(batch.id).status == "completed")
    for path in (tmp_path / "kept").rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        if path.name != "lock":
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def test_a_disk_without_room_refuses_an_upload(live: BatchLive, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rest_local.router.files.write_atomically", full)
        answer = put(live)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
    assert put(live).status_code == 200
    assert len(live.openai().files.list().data) == 1
