"""The requests of editors and tools, as their sources make them (mid-2026), and what they read of the answers.

docs/CLIENTS.md is the table of what was tried. The `openai` package has a module of its own.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from live import Live

PREFIX = "import math\n\n\ndef area(radius):\n"
SUFFIX = "\n\n\nprint(area(2))\n"
CHUNK = {"text": "def volume(radius):\n    return 4 / 3 * math.pi * radius**3\n", "filename": "solids.py"}

VIM = {
    "input_prefix": PREFIX,
    "input_suffix": SUFFIX,
    "input_extra": [CHUNK | {"time": [1763, 5]}],
    "prompt": "    return ",
    "n_predict": 16,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 60_000,
    "t_max_predict_ms": 60_000,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/prompt_per_token_ms",
        "timings/prompt_per_second",
        "timings/predicted_n",
        "timings/predicted_ms",
        "timings/predicted_per_token_ms",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
    ],
}


def test_llama_vim_fills_in(demo: Live) -> None:
    found = demo.post("/infill", VIM, headers={"authorization": "Bearer"}).json()
    read = ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second")
    assert all(isinstance(found[f"timings/{name}"], (int, float)) for name in read)
    assert isinstance(found["content"], str)
    assert found["truncated"] is False
    assert found["tokens_cached"] > 20


@pytest.mark.parametrize("more", [{"id_slot": number} for number in (0, 7, 10**6)] + [{"n_cmpl": 3}, {"lora": []}])
def test_what_llama_vim_and_vscode_add_is_no_error(demo: Live, more: dict[str, Any]) -> None:
    assert "content" in demo.post("/infill", VIM | more).json()


def test_llama_vscode_warms_up(demo: Live) -> None:
    times = {"t_max_prompt_ms": 60_000, "t_max_predict_ms": 1}
    infill = {"input_prefix": "", "input_suffix": "", "input_extra": [CHUNK], "prompt": "", "n_predict": 0}
    found = demo.post("/infill", infill | times | {"samplers": [], "cache_prompt": True})
    assert found.status_code == 200
    assert found.json()["content"] == ""
    messages = [{"role": "system", "content": "You are an expert coder."}, {"role": "user", "content": PREFIX}]
    body = {"messages": messages, "n_predict": 0, "samplers": [], "cache_prompt": True}
    chat = demo.post("/v1/chat/completions", body | times)
    assert chat.status_code == 200
    assert chat.json()["choices"][0]["message"]["content"] == ""


def test_a_warm_up_is_reused(demo: Live) -> None:
    text = "\n".join(f"value_{number} = {number} * {number + 1}" for number in range(40))
    body = VIM | {"input_extra": [{"text": text, "filename": "values.py"}], "response_fields": ["timings"]}
    demo.post("/infill", body | {"n_predict": 0, "samplers": []})
    found = demo.post("/infill", body).json()["timings"]
    assert found["cache_n"] > 200
    assert found["prompt_n"] < 100


def test_llama_vscode_edits(demo: Live) -> None:
    body = {
        "messages": [{"role": "system", "content": "You are an expert coder."}, {"role": "user", "content": "hi"}],
        "stream": False,
        "cache_prompt": True,
        "samplers": "edkypmxt",
        "temperature": 0.8,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 1,
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "max_tokens": -1,
        "timings_per_token": False,
        "n_predict": 12,
        "stop": ["\n\n"],
    }
    found = demo.post("/v1/chat/completions", body).json()
    assert isinstance(found["choices"][0]["message"]["content"], str)


ZED_STOPS = [
    "<|endoftext|>",
    "<|file_separator|>",
    "<|fim_pad|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<PRE>",
    "<SUF>",
    "<MID>",
    "[PREFIX]",
    "[SUFFIX]",
]


def test_zed_predicts_edits(demo: Live) -> None:
    prompt = f"<|fim_prefix|>{PREFIX}    return <|fim_suffix|>{SUFFIX}<|fim_middle|>"
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "stop": ZED_STOPS}
    found = demo.post("/v1/completions", body).json()
    assert found["id"]
    assert found["object"] == "text_completion"
    assert isinstance(found["created"], int)
    assert isinstance(found["choices"][0]["text"], str)
    assert found["usage"]["prompt_tokens"] < len(prompt) // 2, "the special tokens were parsed"


def test_zed_looks_at_the_model(demo: Live) -> None:
    meta = demo.get("/v1/models").json()["data"][0]["meta"]
    assert meta["n_ctx"] == meta["n_ctx_train"] == 2048
    props = demo.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert "supports_tools" in props["chat_template_caps"]


def test_zed_streams_a_chat(demo: Live) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Add two numbers."}]}
    body = {"model": "demo", "messages": [message], "stream": True, "max_tokens": 12, "temperature": 1.0}
    more = {"stream_options": {"include_usage": True}, "stop": [], "prompt_cache_key": "x", "parallel_tool_calls": None}
    text = demo.post("/v1/chat/completions", body | more).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for chunk in chunks:
        assert chunk["model"] == "demo"
        assert chunk["object"] == "chat.completion.chunk"
        assert all(choice.keys() >= {"index", "delta", "finish_reason"} for choice in chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] <= 12


def test_continue_streams_llama_cpp(demo: Live) -> None:
    """Its fill-in-the-middle spells the tokens of the model that the name tells."""
    body = {
        "prompt": f"<|fim_prefix|>{PREFIX}    return <|fim_suffix|>{SUFFIX}<|fim_middle|>",
        "stream": True,
        "n_predict": 16,
        "frequency_penalty": None,
        "stop": ["<|endoftext|>", "\n\n"],
        "temperature": 0.01,
        "mirostat": 0,
    }
    text = demo.post("/completion", body, headers={"authorization": "Bearer undefined"}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert all(isinstance(event["content"], str) for event in events)
    assert [event["stop"] for event in events][-1] is True
    assert events[-1]["tokens_evaluated"] < 60, "the special tokens were parsed"


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


def test_agents_send_more_than_is_known(demo: Live) -> None:
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


def test_curl_as_in_the_documentation(demo: Live) -> None:
    body = '{"messages": [{"role": "user", "content": "Add two numbers."}], "max_tokens": 8, "stream": true}'
    command = ["curl", "-sN", f"{demo.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError:
        pytest.skip("curl is not installed")
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_every_key_stroke_cancels_the_one_before(demo: Live) -> None:
    """40 requests, each cut off by the next (the long form, with times, is the bench's); no slot is lost."""
    import socket

    text = "    return math.pi * radius ** 2  # the area of a circle"
    previous: socket.socket | None = None
    for length in range(40):
        data = json.dumps(VIM | {"prompt": text[:length], "n_predict": 64}).encode()
        connection = socket.create_connection(("127.0.0.1", demo.port), timeout=60)
        head = (
            f"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        if previous is not None:
            previous.close()
        previous = connection
    assert previous is not None
    with previous:
        assert previous.recv(12) == b"HTTP/1.1 200"
    while any(slot["is_processing"] for slot in demo.get("/slots").json()):
        pass
    assert "content" in demo.post("/infill", VIM).json()
