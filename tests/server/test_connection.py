"""Clients that send a request too slowly."""

import json
import logging
import select
import socket
from collections.abc import Iterable

import pytest
from live import Live, Scripted

from rest_local.server import http as module

WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n"

TRICKLED = 600  # parts, over half a minute: a request that is let send as many is not cut off


def trickled(live: Live, first: bytes, more: Iterable[bytes]) -> bytes:
    """Send `first` and then single bytes, and return the server's response when it closes the connection."""
    said = b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(first)
        try:
            for part in more:
                if select.select([connection], [], [], 0.05)[0]:
                    break
                connection.sendall(part)
            while part := connection.recv(1 << 16):
                said += part
        except ConnectionError:  # a byte crossed the server's close
            pass
    return said


def test_a_head_that_trickles_is_cut_off(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    live = scripted()
    with monkeypatch.context() as limits:
        limits.setattr(module, "HEAD_SECONDS", 0.3)
        said = trickled(live, b"GET /health HTTP/1.1\r\nx: ", (b"x" for _ in range(TRICKLED)))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["message"]
    assert live.get("/health").status_code == 200


def test_a_silent_connection_is_closed(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.3)
    assert trickled(scripted(), b"", ()) == b""


def test_a_second_head_that_trickles_is_408(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    live = scripted()
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(WHOLE)
        said = b""
        while not said.endswith(b"}"):
            said += connection.recv(1 << 16)
        assert said.startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(module, "HEAD_SECONDS", 0.3)
        connection.sendall(b"GET /hea")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", [b"/tokenize", b"/nothing"])
def test_a_body_that_trickles_is_cut_off(scripted: Scripted, monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    """A body that a route waits for, and one after a response that was sent before it."""
    live, sent = scripted(), 0
    with monkeypatch.context() as limits, socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        limits.setattr(module, "BODY_SECONDS", 0.3)
        connection.sendall(POST.replace(b"/tokenize", path).replace(b"400", b"1000000"))
        try:
            while sent < TRICKLED and (not select.select([connection], [], [], 0.05)[0] or connection.recv(1 << 16)):
                connection.sendall(b" ")
                sent += 1
        except ConnectionError:
            pass
    assert 0 < sent < TRICKLED
    assert live.post("/tokenize", {"content": "next"}).status_code == 200


def test_an_answer_may_take_longer_than_a_request(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    live, said = scripted(), b""
    live.service.answer = None
    body = b'{"prompt": "x", "stream": true}'
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(WHOLE)
        while not said.endswith(b"}"):
            said += connection.recv(1 << 16)
        monkeypatch.setattr(module, "HEAD_SECONDS", 0.3)
        monkeypatch.setattr(module, "BODY_SECONDS", 0.3)
        head = POST.replace(b"/tokenize", b"/completion").replace(b"400", str(len(body)).encode())
        connection.sendall(head + body)  # No slow machine makes one part late.
        stream = live.service.stream()
        assert not stream.cancelled.wait(1)
        stream.give("late")
        stream.end()
        while not said.endswith(b"\r\n0\r\n\r\n"):
            part = connection.recv(1 << 16)
            assert part, "cut off"
            said += part
    assert b"late" in said


CHUNKED = b" HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n12345\r\nno size\r\n"


@pytest.mark.parametrize("request_line", [b"GET /health", b"POST /completion", b"HEAD /health", b"CONNECT /health"])
def test_bytes_that_are_no_request_are_no_fault(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, request_line: bytes
) -> None:
    """Found by the fuzzer: the answer to the request before was sent to a connection that was answered already."""
    live = scripted()
    with caplog.at_level(logging.INFO):
        with socket.create_connection(("127.0.0.1", live.port), timeout=60) as client:
            client.sendall(request_line + CHUNKED)
            while client.recv(1 << 16):
                pass
        assert live.post("/completion", {"prompt": "x"}).status_code == 200
        live.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
