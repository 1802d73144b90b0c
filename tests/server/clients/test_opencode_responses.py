"""opencode edits a file by OpenAI's Responses API: the program itself, with a scripted model; and its requests, as
recorded from that, always.

`npm install --prefix DIR opencode-ai; REST_LOCAL_OPENCODE=DIR/node_modules/.bin/opencode make test`. Skipped without
one.
"""

from __future__ import annotations

import json
from pathlib import Path

from agents import BUGGY, FIXED, answering, program, run
from live import Scripted, call, data_of
from recorded import OPENAI
from test_codex import DONE, SED, THOUGHT, was_called

LOCAL = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
CALL = THOUGHT + call("bash", command=SED, description="fix the sign")


def test_opencode_edits_a_file(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=100_000)
    (tmp_path / "m.py").write_text(BUGGY)
    provider = {
        "npm": "@ai-sdk/openai",
        "options": {"baseURL": f"{live.url}/v1", "apiKey": "any"},
        "models": {"demo": {"reasoning": True, "tool_call": True, "limit": {"context": 100_000, "output": 8000}}},
    }
    config = {"provider": {"local": provider}, "model": "local/demo", "small_model": "local/demo"}
    (tmp_path / "opencode.json").write_text(json.dumps(config | {"permission": "allow", "share": "disabled"}))

    def reply(prompt: str) -> str:
        if "<tools>" not in prompt:
            return "Fix a sign"  # the request for a title
        return DONE if was_called(prompt) else CALL

    with answering(live, reply) as replies:
        said = run([program("REST_LOCAL_OPENCODE"), "run", "fix the sign in m.py"], tmp_path, LOCAL)
    assert (tmp_path / "m.py").read_text() == FIXED, said
    assert DONE in said
    assert len(replies.prompts) >= 3


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
