"""opencode reads and edits a file over Anthropic's Messages API: the program itself, with a scripted model.

`npm install --prefix DIR opencode-ai`, then
`REST_LOCAL_OPENCODE=DIR/node_modules/opencode-linux-x64/bin/opencode make test`. Skipped without one. Its requests, as
recorded from these runs, are tested always, in `test_messages_agents`.
"""

from __future__ import annotations

import json
from pathlib import Path

from agents import BUGGY, FIXED, answering, program, run
from live import Live, Scripted, call

LOCAL = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


def opencode(live: Live, folder: Path, *arguments: str) -> str:
    """What the program prints."""
    provider = {
        "npm": "@ai-sdk/anthropic",
        "name": "rest-local",
        "options": {"baseURL": f"{live.url}/v1", "apiKey": "any"},
        "models": {"demo": {"name": "demo", "limit": {"context": 100_000, "output": 8000}, "tool_call": True}},
    }
    config = {"provider": {"local": provider}, "model": "local/demo", "small_model": "local/demo"}
    (folder / "opencode.json").write_text(json.dumps(config | {"autoupdate": False, "share": "disabled"}))
    return run([program("REST_LOCAL_OPENCODE"), "run", *arguments], folder, LOCAL)


def test_it_reads_and_edits_a_file(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=100_000)
    file = tmp_path / "m.py"
    file.write_text(BUGGY)

    def reply(prompt: str) -> str:
        path = str(file)
        if "# Tools" not in prompt and "<tools>" not in prompt:
            return "Fix a sign"  # the request for a title
        if "Edit applied" in prompt:
            return "The sign is right now."
        if "return a - b" not in prompt:
            return call("read", filePath=path)
        return "The sign is wrong.\n" + call("edit", filePath=path, oldString="a - b", newString="a + b")

    with answering(live, reply) as replies:
        said = opencode(live, tmp_path, "Fix the sign in m.py")
    assert file.read_text() == FIXED, said
    assert "The sign is right now." in said
    assert len(replies.prompts) >= 3
