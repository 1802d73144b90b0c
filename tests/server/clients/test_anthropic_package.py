"""The `anthropic` package: answers, streams, the loop of tools, counts, classes of errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from live import Live, Scripted, data_of, pieces, prompt_of
from recorded import MESSAGES as RECORDED
from recorded import Recorded

from rest_local.errors import DecodeFailed

if TYPE_CHECKING:  # its import takes 3 s, and every process collects all tests
    import anthropic

MESSAGES: Any = [{"role": "user", "content": "What is in a.py?"}]
TOOL: Any = {
    "name": "read_file",
    "description": "Read a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALL = ('<tool_call>\n{"name": "read_file", "arguments": {"path": "a.', 'py", "lines": [1, 2', "]}}\n</tool_call>")


def client_of(live: Live, **options: Any) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=live.url, **{"api_key": "any", "max_retries": 0, "timeout": 60} | options)


GREEDY = {"temperature": 0}  # It goes into the body, since the package's calls have no such parameter since version 2.


def test_an_answer_its_counts_and_its_id(demo: Live) -> None:
    with client_of(demo) as client:
        asked: Any = {"model": "demo", "messages": MESSAGES, "system": "You read files."}
        message = client.messages.create(max_tokens=8, extra_body=GREEDY, **asked)
        counted = client.messages.count_tokens(**asked)
    (block,) = message.content
    assert block.type == "text"
    assert block.text
    assert (message.role, message.model, message.type) == ("assistant", "demo", "message")
    assert 0 < message.usage.output_tokens <= 8
    read, created = message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens
    assert read is not None
    assert created == 0
    assert message.usage.input_tokens + read == counted.input_tokens
    assert message._request_id is not None
    assert message._request_id.startswith("req_")


def test_the_runner_of_tools_makes_the_loop(hello: Live) -> None:
    """It first asks the server to hold the conversation, and sends all of it when that is refused."""
    from anthropic import beta_tool

    @beta_tool
    def read_file(path: str, lines: list[int]) -> str:
        """Read a file.

        Args:
            path: Its name.
            lines: The first and the last.
        """
        return f"x = 1  # {path}"

    class Turns:
        """A call, then the answer to its result."""

        def __init__(self) -> None:
            self.turn = 0

        def __iter__(self) -> Any:
            self.turn += 1
            return iter(CALL if self.turn == 1 else ("It is 1.",))

    hello.service.answer = Turns()
    with client_of(hello) as client:
        runner = client.beta.messages.tool_runner(model="demo", max_tokens=100, messages=MESSAGES, tools=[read_file])
        final = runner.until_done()
    assert final.content[0].text == "It is 1."  # type: ignore[union-attr]
    assert "x = 1  # a.py" in prompt_of(hello, 1)


def test_thoughts_are_blocks_that_can_be_sent_back(hello: Live) -> None:
    hello.service.answer = ("<think>\nI th", "ink.\n</think>\n\nHello")
    asked: Any = {"model": "demo", "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with client_of(hello) as client:
        with client.messages.stream(messages=MESSAGES, **asked) as stream:
            kinds = [event.type for event in stream]
            said = stream.get_final_message()
        again = client.messages.create(messages=[*MESSAGES, said.to_param(), *MESSAGES], **asked)
    assert {"thinking", "signature", "text"} <= set(kinds)
    thought, text = said.content
    assert thought.type == "thinking"
    assert (thought.thinking, bool(thought.signature)) == ("I think.", True)
    assert text.type == "text"
    assert text.text == "Hello"
    assert again.content[0].type == "thinking"


def test_an_error_during_a_stream_is_raised(quiet: Live) -> None:
    import anthropic

    with client_of(quiet) as client:
        stream = client.messages.create(model="demo", max_tokens=9, messages=MESSAGES, stream=True)
        submitted = quiet.service.stream()
        submitted.give("half")
        submitted.end("error", error=DecodeFailed(-3, 4))
        with pytest.raises(anthropic.APIError, match="llama_decode"):
            list(stream)


# ---- Recorded requests of agents -----------------------------------------------------------------------------------


ANSWERED = {name: each for name, each in RECORDED.items() if name != "CLAUDE_SEARCH"}  # CLAUDE_SEARCH is refused.


def asked(live: Live, recorded: Recorded) -> Any:
    return live.post(recorded.path, recorded.body, headers=recorded.headers)


def called(recorded: Recorded) -> tuple[str, dict[str, Any]]:
    """Return a tool of the request that the model calls, and what with. The first that edits is taken."""
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
    assert asked(live, RECORDED["CLAUDE_START"]).status_code == 200
    assert asked(live, RECORDED["CLAUDE_TURN"]).status_code == 200
    first, second = prompt_of(live, 0), prompt_of(live, 1)
    assert second.startswith(first.rpartition("<|im_start|>assistant")[0])
    assert "billing-header" not in second
    assert "return a - b" in second
