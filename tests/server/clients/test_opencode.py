"""opencode edits a file: the program itself, by OpenAI's Responses API and by Anthropic's Messages API, with a scripted
model; and its requests, as recorded from that, always (those by Messages in `test_messages_agents`).

`npm install --prefix DIR opencode-ai`, then
`REST_LOCAL_OPENCODE=DIR/node_modules/opencode-linux-x64/bin/opencode make test`. Skipped without one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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
MODEL = {"tool_call": True, "limit": {"context": 100_000, "output": 8000}}


@pytest.mark.parametrize("package", ["@ai-sdk/openai", "@ai-sdk/anthropic"])
def test_opencode_edits_a_file(scripted: Scripted, tmp_path: Path, package: str) -> None:
    """By a command with the one protocol, by its tools for files with the other."""
    live, by_command = scripted(n_ctx=100_000), package == "@ai-sdk/openai"
    file = tmp_path / "m.py"
    file.write_text(BUGGY)
    model = MODEL | ({"reasoning": True} if by_command else {})
    options = {"baseURL": f"{live.url}/v1", "apiKey": "any"}
    provider = {"npm": package, "name": "rest-local", "options": options, "models": {"demo": model}}
    config = {"provider": {"local": provider}, "model": "local/demo", "small_model": "local/demo"}
    config |= {"permission": "allow", "autoupdate": False, "share": "disabled"}
    (tmp_path / "opencode.json").write_text(json.dumps(config))

    def reply(prompt: str) -> str:
        path = str(file)
        if "# Tools" not in prompt and "<tools>" not in prompt:
            return "Fix a sign"  # the request for a title
        if was_called(prompt) if by_command else "Edit applied" in prompt:
            return DONE
        if by_command:
            return CALL
        if "return a - b" not in prompt:
            return call("read", filePath=path)
        return "The sign is wrong.\n" + call("edit", filePath=path, oldString="a - b", newString="a + b")

    with answering(live, reply) as replies:
        said = run([program("REST_LOCAL_OPENCODE"), "run", "fix the sign in m.py"], tmp_path, LOCAL)
    assert file.read_text() == FIXED, said
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
