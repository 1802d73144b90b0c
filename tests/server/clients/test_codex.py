"""Codex edits a file: its requests, as recorded from the program with a scripted model.

Codex has three ways to edit, by what it knows of the model's name: functions, the tool `apply_patch`, whose call is
text, and scripts that call its tools.
"""

import json
from typing import Any

import pytest
from live import Live, Scripted, call, data_of, prompt_of
from openai.types.responses import Response
from recorded import OPENAI

PATCH = """*** Begin Patch
*** Update File: m.py
@@
 def add(a, b):
-    return a - b
+    return a + b
*** End Patch
"""
DONE = "The sign is fixed."
SED = "sed -i s/-/+/ m.py"


SCRIPT = f"text((await tools.exec_command({{cmd: '{SED}'}})).output)"
THOUGHT = "<think>I look.</think>\n"
CALLS = {
    "functions": THOUGHT + call("exec_command", cmd=SED),
    "apply_patch": THOUGHT + call("apply_patch", input=PATCH),
    "exec": THOUGHT + call("exec", input=SCRIPT),
}
SHOWN = {
    "functions": ["exec_command", "agents__close"],
    "apply_patch": ["apply_patch", "tool_search"],
    "exec": ["exec", "clock__sleep"],
}


def turn(live: Live, recorded: Any, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that Codex takes from a stream: those of `response.output_item.done`, once it is complete.

    Its parser needs `response` in `response.created`, whole items, `id` and `usage` in `response.completed`.
    """
    body = recorded.body | {"input": [*recorded.body["input"], *items]}
    answer = live.post(recorded.path, body, headers=recorded.headers)
    assert answer.status_code == 200, answer.text
    events = data_of(answer.text)
    assert events[0]["type"] == "response.created"
    assert events[0]["response"]["id"]
    assert events[-1]["type"] == "response.completed"
    final = events[-1]["response"]
    Response.model_validate(final)
    assert final["id"] == events[0]["response"]["id"]
    usage = final["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert usage["output_tokens_details"]["reasoning_tokens"] >= 0
    for event in events:
        if event["type"].endswith("text.delta"):
            assert event["delta"]
            assert event["content_index"] == 0
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


@pytest.mark.parametrize("form", CALLS)
def test_codex_edits_a_file(scripted: Scripted, form: str) -> None:
    live = scripted(n_ctx=8192, answer=(CALLS[form][:30], CALLS[form][30:]))
    recorded = OPENAI[f"CODEX_{form.upper()}"]
    thought, called = turn(live, recorded, [])
    assert thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "I look."}]
    assert called["call_id"]
    if form == "functions":
        assert (called["type"], called["name"]) == ("function_call", "exec_command")
        assert json.loads(called["arguments"]) == {"cmd": SED}
    else:
        assert (called["type"], called["name"]) == ("custom_tool_call", form)
        assert called["input"] == (PATCH if form == "apply_patch" else SCRIPT)
    text = "exited with 0"
    parts = [{"type": "input_text", "text": "Script completed"}, {"type": "input_text", "text": text}]
    output = {"type": f"{called['type']}_output", "id": "out_1", "call_id": called["call_id"]}
    output |= {"output": parts if form == "exec" else text}
    assert called.get("namespace") == ("functions" if form == "exec" else None)
    live.service.answer = (DONE,)
    (said,) = turn(live, recorded, [thought, called, output])
    assert said["content"][0]["text"] == DONE
    prompt = prompt_of(live, 1)
    assert "exited with 0" in prompt
    for name in SHOWN[form]:
        assert f'"name": "{name}"' in prompt
    assert "web_search" not in prompt


# ---- opencode, whose requests to Anthropic's API are in test_anthropic_package ---------------------------------------


BASH = THOUGHT + call("bash", command=SED, description="fix the sign")


def test_opencode_edits_a_file(scripted: Scripted) -> None:
    """The AI SDK reads items as they are begun and done, and sends reasoning back as `encrypted_content` alone."""
    live = scripted(n_ctx=8192)
    headers = dict(OPENAI["OPENCODE_TITLE"].headers)
    title = live.post(OPENAI["OPENCODE_TITLE"].path, OPENAI["OPENCODE_TITLE"].body, headers=headers)
    assert '"delta":"Hello' in title.text
    live.service.answer = (BASH[:20], BASH[20:])
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
