"""What many clients do: unknown fields, model names, cancelled requests. docs/CLIENTS.md has the table."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from live import Live, becomes_idle, sent
from recorded import OPENAI

VIM = OPENAI["VIM_INFILL"].body


@pytest.mark.parametrize("more", [{"id_slot": number} for number in (0, 7, 10**6)] + [{"n_cmpl": 3}, {"lora": []}])
def test_additional_fields_of_llama_vim_and_vscode_are_accepted(demo: Live, more: dict[str, Any]) -> None:
    assert "content" in demo.post("/infill", VIM | more).json()


def test_aliases_pass_through(scripted: Any) -> None:
    live = scripted(aliases=("qwen2.5-coder-1.5b", "gpt-4o-mini"))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for name in ("qwen2.5-coder-1.5b", "gpt-4o-mini", "demo"):
        assert live.post("/v1/chat/completions", body | {"model": name}).json()["model"] == name
    for name in ("", None):
        assert live.post("/v1/chat/completions", body | {"model": name}).json()["model"] == "qwen2.5-coder-1.5b"
    assert live.post("/v1/chat/completions", body | {"model": "GPT-4"}).status_code == 404
    anything = scripted(aliases=("*",))
    assert anything.post("/v1/chat/completions", body | {"model": "GPT-4"}).json()["model"] == "GPT-4"
    assert [model["id"] for model in anything.get("/v1/models").json()["data"]] == ["demo"]


def test_unknown_fields_of_agents_are_accepted(demo: Live) -> None:
    """aider, Cline, Roo, llm, Open WebUI: temperature 0, parts, cache marks, fields of other servers."""
    part = {"type": "text", "text": "Add two numbers.", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "coder",
        "messages": [{"role": "system", "content": [part]}, {"role": "user", "content": [part, part], "name": "me"}],
        "temperature": 0,
        "max_tokens": 8,
        "draft_model": "small",
        "reasoning_effort": "low",
        "user": "u",
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "metadata": {"a": "b"},
        "options": {"num_ctx": 8192},
    }
    assert demo.post("/v1/chat/completions", body, headers={"x-api-key": "sk-dummy"}).status_code == 200


def test_every_keystroke_cancels_the_request_before(demo: Live) -> None:
    """40 requests, each cancelled by the next; no slot is lost. benchmarks/server.py has a long form with times."""
    text = "    return math.pi * radius ** 2  # the area of a circle"
    previous: socket.socket | None = None
    for length in range(40):
        connection = sent(demo, "/infill", VIM | {"prompt": text[:length], "n_predict": 64})
        if previous is not None:
            previous.close()
        previous = connection
    assert previous is not None
    with previous:
        assert previous.recv(12) == b"HTTP/1.1 200"
    becomes_idle(demo)
    assert "content" in demo.post("/infill", VIM).json()
