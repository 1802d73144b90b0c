"""The log: one line of JSON per request, without text of prompts or answers, and escaped (RELIABILITY 34)."""

import io
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from live import Scripted, sent

from rest_local.server.security import JsonLines, TerminalLines

LOGGERS = ("rest_local.server", "uvicorn.error")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return everything that any logger says, as the server writes it."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonLines())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield text
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_a_request_is_one_line_without_what_was_said(scripted: Scripted, log: io.StringIO) -> None:
    live = scripted(keys=(b"topsecretkey",), answer=("the completion text",))
    body = {"messages": [{"role": "user", "content": "the prompt text"}]}
    claims = {"x-forwarded-for": "203.0.113.9", "forwarded": "for=203.0.113.9"}
    live.get("/page/page.js", headers={"x-api-key": "topsecretkey"})
    live.post("/v1/chat/completions?x=query", body, headers=claims | {"authorization": "Bearer topsecretkey"})
    live.post("/v1/chat/completions", body, headers={"authorization": "Bearer wrongkey"})
    live.post("/v1/chat/completions", body | {"temperature": "x"}, headers={"x-api-key": "topsecretkey"})
    live.stop()
    text = log.getvalue()
    for secret in ("prompt text", "completion text", "topsecretkey", "wrongkey", "query"):
        assert secret not in text
    found = {(line["logger"], line.get("status")): line for line in lines(log) if line.get("event") == "request"}
    assert set(found) >= {("rest_local.server", status) for status in (200, 400, 401)}
    good = found["rest_local.server", 200]
    assert (good["path"], good["client"]) == ("/v1/chat/completions", "127.0.0.1"), "not what a proxy claims"
    assert good["completion_tokens"] > 0
    assert good["finish"] == ["stop"]
    assert "loop" not in good
    assert [line["level"] for line in lines(log) if line.get("path") == "/page/page.js"] == ["debug"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("said", ["some text", ""])
def test_a_client_that_leaves_is_499_with_its_counts(
    scripted: Scripted, log: io.StringIO, path: str, stream: bool, said: str
) -> None:
    """Of the prompt, too: else nobody could tell whether the next attempt goes on where this one was cut off."""
    live = scripted(answer=None)
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "x", "max_tokens": 9}
    connection = sent(live, path, body | {"model": "demo", "stream": stream})
    asked = live.service.stream()
    if said:
        asked.give(said)
    connection.close()
    assert asked.cancelled.wait(30)
    live.stop()
    (line,) = [line for line in lines(log) if line.get("event") == "request"]
    assert line["status"] == 499
    assert (line["prompt_tokens"], line["cached_tokens"]) == (len(asked.request.prompt), 0)
    assert (line["completion_tokens"] > 0) == bool(said)
    assert line["finish"] == ["cancelled"]


def test_an_answer_that_repeats_itself_is_said_to_be_one(scripted: Scripted, log: io.StringIO) -> None:
    live = scripted(answer=("la la",) * 100)
    live.post("/v1/completions", {"prompt": "x"})
    live.stop()
    (line,) = [line for line in lines(log) if line.get("event") == "request"]
    assert line["loop"][0] > 0


def test_a_client_cannot_write_lines_of_its_own(scripted: Scripted, log: io.StringIO) -> None:
    live = scripted()
    for target in (b"/a%0d%0a%7b%22fake%22:1%7d", b"/%1b[2J%1b[31m", b"/" + b"x" * 5000, b"/%ff%fe%e2%80%a8"):
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
            connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while connection.recv(4096):
                pass
    live.stop()
    text = log.getvalue()
    assert text.isascii()
    assert all(character == "\n" or character.isprintable() for character in text)
    requests = [line for line in lines(log) if line.get("event") == "request"]
    assert len({line["path"] for line in requests}) == 4
    assert all(len(line["path"]) <= 200 for line in requests)
    assert not any("fake" in line for line in lines(log))


def test_at_a_terminal_lines_are_short_and_escaped() -> None:
    def line(message: str, fields: dict[str, Any] | None = None, error: BaseException | None = None) -> str:
        info = (type(error), error, None) if error else None
        record = logging.LogRecord("rest_local.server", logging.INFO, "", 0, message, (), info)
        record.fields = fields
        return TerminalLines().format(record)

    asked = {"event": "request", "method": "POST", "path": "/v1/\x1b[2J\n12:00:00", "status": 200, "milliseconds": 39.6}
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/\\x1b\[2J\\n12:00:00: 200, 40 ms", line("", asked))
    assert line("", asked | {"completion_tokens": 7}).endswith("40 ms, 7 tokens")
    assert line("", asked | {"completion_tokens": 7, "loop": [2]}).endswith("40 ms, 7 tokens, repeats itself")
    assert line("", {"event": "loaded", "model": "a"})[8:] == " loaded a"
    assert line("a warning\r")[8:] == r" a warning\r"
    assert line("failed", error=KeyError("\x1b")).splitlines()[1].endswith(r"KeyError: '\\x1b'")


def test_a_server_error_is_logged_and_not_shown(
    scripted: Scripted, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = scripted()

    def broken() -> None:
        raise KeyError("inner detail")

    monkeypatch.setattr(live.service, "slots", broken)
    answer = live.get("/slots")
    assert answer.status_code == 500
    assert "inner detail" not in answer.text
    assert live.get("/health").status_code == 200
    live.stop()
    assert "inner detail" in log.getvalue()
    assert [line["status"] for line in lines(log) if line.get("path") == "/slots"] == [500]
