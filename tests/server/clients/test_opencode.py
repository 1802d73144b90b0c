"""opencode edits a file: its requests by OpenAI's Responses API, as recorded from the program with a scripted model.
Those by Anthropic's Messages API are in `test_messages_agents`."""

import json

from live import Scripted, call, data_of
from recorded import OPENAI
from test_codex import DONE, SED, THOUGHT

CALL = THOUGHT + call("bash", command=SED, description="fix the sign")


def test_its_recorded_requests_edit_a_file(scripted: Scripted) -> None:
    """The AI SDK reads items as they are begun and done, and sends reasoning back as `encrypted_content` alone."""
    live = scripted(n_ctx=8192)
    headers = dict(OPENAI["OPENCODE_TITLE"].headers)
    title = live.post(OPENAI["OPENCODE_TITLE"].path, OPENAI["OPENCODE_TITLE"].body, headers=headers)
    assert '"delta":"Hello' in title.text
    live.service.answer = (CALL[:20], CALL[20:])
    first = live.post(OPENAI["OPENCODE_TASK"].path, OPENAI["OPENCODE_TASK"].body, headers=headers)
    events = data_of(first.text)
    added = {event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.added"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == list(added)
    thought, called = done
    assert added[called["id"]]["name"] == "bash"
    assert "".join(e["delta"] for e in events if e["type"].endswith("arguments.delta")) == called["arguments"]
    items = [
        *OPENAI["OPENCODE_TASK"].body["input"],
        {"type": "reasoning", "encrypted_content": thought["encrypted_content"], "summary": []},
        {"type": "function_call", "call_id": called["call_id"], "name": "bash", "arguments": called["arguments"]},
        {"type": "function_call_output", "call_id": called["call_id"], "output": ""},
    ]
    live.service.answer = (DONE,)
    second = live.post(OPENAI["OPENCODE_TASK"].path, OPENAI["OPENCODE_TASK"].body | {"input": items}, headers=headers)
    last = json.loads(second.text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"] == DONE
