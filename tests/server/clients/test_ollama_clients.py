"""Clients that know only Ollama: the requests of `recorded.OLLAMA`, and of each answer what that source reads."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from live import Live, Scripted, prompt_of
from recorded import GAP, OLLAMA, TOOLS, ZED_STOPS, Recorded

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "b.py"}}\n</tool_call>'


def send(live: Live, request: Recorded, **changes: Any) -> httpx.Response:
    """The answer. Without a content type where the client sends none."""
    headers = {name: value for name, value in request.headers.items() if value}
    with live.client() as client:
        answer = client.post(request.path, content=json.dumps(request.body | changes).encode(), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.split("\n") if line]


@pytest.mark.parametrize("request_", [OLLAMA["ZED_CHAT"], OLLAMA["WEBUI_CHAT"]], ids=lambda each: each.client)
def test_agents_read_a_call(scripted: Scripted, request_: Recorded) -> None:
    live = scripted(aliases=("coder",), answer=("I read", " it.\n", *CALL))
    found = lines(send(live, request_))
    calls = [call["function"] for each in found for call in each["message"].get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [("read_file", {"path": "b.py"})]
    assert "".join(each["message"]["content"] for each in found).strip() == "I read it."
    spelled = prompt_of(live)
    assert "x = 1" in spelled
    assert "read_file" in spelled, "the tools are in the prompt although the template knows none"


def test_zed_reads_every_line(scripted: Scripted) -> None:
    """Its parser refuses a line without one of these, and a call with more than its function."""
    live = scripted(aliases=("coder",), answer=tuple(CALL))
    found = lines(send(live, OLLAMA["ZED_CHAT"]))
    for each in found:
        assert each["model"] == "coder:latest"
        assert isinstance(each["created_at"], str)
        assert isinstance(each["done"], bool)
        assert each["message"]["role"] == "assistant"
        assert isinstance(each["message"]["content"], str)
        for call in each["message"].get("tool_calls", ()):
            assert call.keys() == {"function"}
    assert found[-1]["prompt_eval_count"] > 0
    assert found[-1]["eval_count"] > 0
    assert live.service.stream().request.stop == ("<end>",)


def test_zed_lists_models_and_asks_what_they_can(demo: Live) -> None:
    (first, _) = demo.get("/api/tags", headers={"accept": "application/json"}).json()["models"]
    assert first["name"] == "coder:latest"
    assert isinstance(first["modified_at"], str)
    assert isinstance(first["size"], int)
    assert isinstance(first["digest"], str)
    details = first["details"]
    names = ("format", "family", "parameter_size", "quantization_level")
    assert all(isinstance(details[name], str) for name in names)
    shown = demo.post("/api/show", {"model": first["name"]}).json()
    assert set(shown["capabilities"]) <= {"completion", "insert", "tools", "thinking", "vision"}


def test_zed_predicts_edits(demo: Live) -> None:
    found = send(demo, OLLAMA["ZED_EDIT_PREDICTION"]).json()
    assert isinstance(found["response"], str)
    assert not any(stop in found["response"] for stop in ZED_STOPS)
    assert found["prompt_eval_count"] < len(GAP) // 2, "the special tokens were parsed"


def test_continue_learns_the_context_and_that_gaps_are_filled(demo: Live) -> None:
    shown = demo.post("/api/show", {"name": "coder"}).json()
    matches = [re.match(r'^(\S+)\s+((?:".*")|\S+)$', line) for line in shown["parameters"].split("\n")]
    assert [match.groups() for match in matches if match] == [("num_ctx", "2048")]
    assert all(matches), "it takes each line apart"
    assert ".Suffix" in shown["template"]


def test_continue_chats_and_fills_gaps(demo: Live) -> None:
    chat = lines(send(demo, OLLAMA["CONTINUE_CHAT"], stream=True))
    assert "".join(each["message"]["content"] for each in chat)
    gap = lines(send(demo, OLLAMA["CONTINUE_GAP"]))
    assert all("error" not in each for each in gap)
    assert all(isinstance(each["response"], str) for each in gap)


def test_continue_calls_tools_without_a_stream(scripted: Scripted) -> None:
    live = scripted(aliases=("coder",), answer=tuple(CALL))
    message = send(live, OLLAMA["CONTINUE_TOOLS"]).json()["message"]
    assert message["role"] == "assistant"
    assert [call["function"]["name"] for call in message["tool_calls"]] == [TOOLS[0]["function"]["name"]]


def test_raycast_reads_each_part_of_the_body_as_one_line(scripted: Scripted) -> None:
    """It sends text without saying that it is JSON, and parses what the HTTP library gives it at once."""
    live = scripted(aliases=("coder",))
    headers = dict(OLLAMA["RAYCAST_CHAT"].headers)
    content = json.dumps(OLLAMA["RAYCAST_CHAT"].body).encode()
    with live.client() as client, client.stream("POST", "/api/chat", content=content, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["transfer-encoding"] == "chunked"
    parts = chunks(live, content)
    assert [json.loads(part)["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(json.loads(part)["message"]["content"] for part in parts) == "Hello world"


def chunks(live: Live, content: bytes) -> list[bytes]:
    """The chunks of the body, as they are framed."""
    import socket

    head = "POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain;charset=UTF-8\r\n"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    body, found = received.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16):
            found.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return found


def test_obsidian_reads_the_lines_of_a_whole_answer(scripted: Scripted) -> None:
    live = scripted(aliases=("coder",))
    answer = send(live, OLLAMA["OBSIDIAN_PROMPT"])
    steps = [json.loads(step) for step in answer.text.split("\n") if step]
    assert "".join(step["response"] for step in steps).strip() == "Hello world"
