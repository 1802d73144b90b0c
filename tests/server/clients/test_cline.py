"""Cline's command line reads and edits a file over Anthropic's Messages API: the program itself, with a scripted model.

`npm install --prefix DIR cline`, then
`REST_LOCAL_CLINE=DIR/node_modules/@cline/cli-linux-x64/bin/cline make test`. Skipped without one. Its requests, as
recorded from these runs, are tested always, in `test_messages_agents`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agents import BUGGY, FIXED, answering, program, run
from live import Live, Scripted, call


def cline(live: Live, folder: Path, prompt: str) -> list[dict[str, Any]]:
    """Its events. The command line takes an address for other providers only, so it is written into the settings."""
    settings = {"provider": "anthropic", "apiKey": "any", "model": "demo", "baseUrl": f"{live.url}/v1"}
    providers = {"anthropic": {"settings": settings, "updatedAt": "2026-11-22T00:00:00.000Z", "tokenSource": "manual"}}
    file = folder / "home/.cline/data/settings/providers.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"version": 1, "lastUsedProvider": "anthropic", "modes": {}, "providers": providers}))
    command = [program("REST_LOCAL_CLINE"), "--json", "-P", "anthropic", "-m", "demo", "-t", "120", prompt]
    said = run(command, folder, {"CLINE_NO_AUTO_UPDATE": "1", "CLINE_TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1"})
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_it_reads_and_edits_a_file(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=100_000)
    file = tmp_path / "m.py"
    file.write_text(BUGGY)

    def reply(prompt: str) -> str:
        path = str(file)
        if "Edited" in prompt:
            return "The sign is right now."
        if "return a - b" not in prompt:
            return call("read_files", files=[{"path": path}])
        return "The sign is wrong.\n" + call("editor", path=path, old_text="a - b", new_text="a + b")

    with answering(live, reply) as replies:
        events = cline(live, tmp_path, "Fix the sign in m.py")
    assert file.read_text() == FIXED, replies.prompts[-1][-600:]
    assert events[-1]["type"] == "run_result"
    assert events[-1]["finishReason"] == "completed"
    assert events[-1]["text"] == "The sign is right now."
    assert events[-1]["usage"]["inputTokens"] > 0
    assert '"web_search"' not in replies.prompts[0], "a tool that Anthropic's servers run"
