"""Clients that know only Ollama: the requests of `recorded.OLLAMA`, and of each answer what that source reads."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from live import Live, Scripted, prompt_of
from recorded import GAP, OLLAMA, ZED_STOPS, Recorded

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "b.py"}}\n</tool_call>'


def send(live: Live, request: Recorded, **changes: Any) -> httpx.Response:
    """Send a request, without a content type if the client sends none, and return the answer."""
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


def test_obsidian_reads_the_lines_of_a_whole_answer(scripted: Scripted) -> None:
    live = scripted(aliases=("coder",))
    answer = send(live, OLLAMA["OBSIDIAN_PROMPT"])
    steps = [json.loads(step) for step in answer.text.split("\n") if step]
    assert "".join(step["response"] for step in steps).strip() == "Hello world"


# ---- The package ollama --------------------------------------------------------------------------------------------


MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]
SAME = {"temperature": 0, "num_predict": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


@pytest.fixture
def client(demo: Live) -> Iterator[ollama.Client]:
    with ollama.Client(host=demo.url) as client:
        yield client


def test_a_prompt_is_answered_in_the_template_and_raw_text_continued(client: ollama.Client) -> None:
    asked = client.generate("demo", "def add(a, b):", system="You write Python.", options=SAME)
    raw = client.generate("demo", "def add(a, b):", raw=True, options=SAME)
    assert asked.response != raw.response
    assert asked.prompt_eval_count > raw.prompt_eval_count


def test_a_gap_is_filled(client: ollama.Client) -> None:
    found = client.generate("demo", "def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))", options=SAME)
    assert found.response


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    listed = client.list().models
    assert [model.model for model in listed] == ["coder:latest", "demo:latest"]
    assert listed[0].size > 1_000_000
    assert (listed[0].details.format, listed[0].details.quantization_level) == ("gguf", "Q8_0")
    (first, _) = client.ps().models
    assert first.context_length == 2048
    assert first.expires_at.year > 2100
    shown = client.show("coder:latest")
    assert shown.modelinfo["llama.context_length"] == 2048
    assert "completion" in shown.capabilities
    assert "insert" in shown.capabilities
    assert "tools" not in shown.capabilities, "the demo model's template knows none"


def test_without_a_prompt_the_model_is_loaded_only(client: ollama.Client) -> None:
    assert client.generate("demo", keep_alive="5m").done_reason == "load"
    assert client.chat("demo", [], keep_alive=0).done_reason == "load"


def test_models_are_neither_fetched_nor_changed(client: ollama.Client) -> None:
    for call in (lambda: client.pull("x"), lambda: client.copy("x", "y"), lambda: client.delete("x")):
        with pytest.raises(ollama.ResponseError, match="is not supported") as caught:
            call()
        assert caught.value.status_code == 501


def test_a_model_without_embeddings_says_so(client: ollama.Client) -> None:
    for call in (lambda: client.embed("demo", "x"), lambda: client.embeddings("demo", "x")):
        with pytest.raises(ollama.ResponseError, match="no embeddings") as caught:
            call()
        assert caught.value.status_code == 501


@pytest.mark.parametrize("stream", [False, True])
def test_calls_arrive_whole(hello: Live, stream: bool) -> None:
    hello.service.answer = ("I read", " it.\n", *CALL, "\n", *CALL.replace("b.py", "c.py"))
    with ollama.Client(host=hello.url) as client:
        answer = client.chat("demo", MESSAGES, tools=[TOOL], stream=stream)
        parts = list(answer) if stream else [answer]
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [(call.name, dict(call.arguments)) for call in calls] == [
        ("read_file", {"path": "b.py"}),
        ("read_file", {"path": "c.py"}),
    ]
    assert "".join(part.message.content or "" for part in parts).strip() == "I read it."
    assert parts[-1].done_reason == "stop"


def test_reasoning_is_apart(hello: Live) -> None:
    hello.service.answer = ("<think>\nhm", " so\n</think>\n\n", "Four.")
    with ollama.Client(host=hello.url) as client:
        whole = client.chat("demo", MESSAGES, think=True)
        parts = list(client.generate("demo", "2 + 2?", think=True, stream=True))
    assert (whole.message.thinking, whole.message.content) == ("hm so", "Four.")
    assert "".join(part.thinking or "" for part in parts) == "hm so"
    assert "".join(part.response or "" for part in parts) == "Four."
