"""Clients that know only Ollama: the requests of `recorded.OLLAMA`, and of each answer what that source reads."""

import json
import re
from typing import Any

import httpx
import pytest
from live import Live, Scripted, prompt_of
from recorded import GAP, OLLAMA, ZED_STOPS, Recorded

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
