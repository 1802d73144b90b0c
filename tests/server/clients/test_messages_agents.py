"""Recorded requests of agents to Anthropic's Messages API: each is answered with the events that its source reads."""

import json
from typing import Any

import pytest
from live import Live, Scripted, data_of, pieces, prompt_of
from recorded import MESSAGES, Recorded

ANSWERED = {name: each for name, each in MESSAGES.items() if name != "CLAUDE_SEARCH"}  # which is refused


def asked(live: Live, recorded: Recorded) -> Any:
    return live.post(recorded.path, recorded.body, headers=recorded.headers)


def called(recorded: Recorded) -> tuple[str, dict[str, Any]]:
    """A tool of the request that the model calls, and what with; the first that edits."""
    tools = [tool for tool in recorded.body.get("tools", ()) if "input_schema" in tool]
    tool = next((tool for tool in tools if "edit" in tool["name"].lower()), tools[0])
    return tool["name"], dict.fromkeys(tool["input_schema"]["required"], 'a "b"\n')


@pytest.mark.parametrize("recorded", ANSWERED.values(), ids=list(ANSWERED))
def test_a_request_is_answered_with_text_and_with_a_call(scripted: Scripted, recorded: Recorded) -> None:
    live = scripted(n_ctx=65536, aliases=("*",))
    name, arguments = called(recorded) if "tools" in recorded.body else ("", {})
    call = json.dumps({"name": name, "arguments": arguments})
    said = "I look." + (f"\n<tool_call>\n{call}\n</tool_call>" if name else "")
    live.service.answer = pieces(said, 5)
    answer = asked(live, recorded)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = data_of(answer.text)
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[0]["message"]["model"] == recorded.body["model"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "I look."
    assert events[-1]["type"] == "message_stop"
    stopped = next(event for event in events if event["type"] == "message_delta")
    assert stopped["delta"]["stop_reason"] == ("tool_use" if name else "end_turn")
    assert stopped["usage"]["output_tokens"] > 0
    if name:
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [(each["type"], each.get("name")) for each in starts] == [("text", None), ("tool_use", name)]
        assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == arguments
    request = live.service.stream().request
    assert request.max_tokens == min(recorded.body["max_tokens"], 65536 - len(request.prompt), 65536)
    names = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
    body = {name: recorded.body[name] for name in names if name in recorded.body}  # Anthropic's count refuses others
    counted = live.post("/v1/messages/count_tokens?beta=true", body, headers=recorded.headers).json()
    assert counted == {"input_tokens": len(request.prompt)}


def test_a_second_turn_of_claude_code_begins_as_the_first(scripted: Scripted) -> None:
    """Up to where the first answer began, so that only what is new is evaluated."""
    live = scripted(n_ctx=65536)
    assert asked(live, MESSAGES["CLAUDE_START"]).status_code == 200
    assert asked(live, MESSAGES["CLAUDE_TURN"]).status_code == 200
    first, second = prompt_of(live, 0), prompt_of(live, 1)
    assert second.startswith(first.rpartition("<|im_start|>assistant")[0])
    assert "billing-header" not in second
    assert "return a - b" in second
