"""opencode edits a file by OpenAI's Responses API: the program itself, with a model that says what a scripted edit
needs; and its requests, as recorded from that, always.

`npm install --prefix DIR opencode-ai; REST_LOCAL_OPENCODE=DIR/node_modules/.bin/opencode make test`. Skipped without
one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from live import Live
from recorded import OPENCODE_TASK, OPENCODE_TITLE
from turns import RIGHT, WRONG, Turns, call, environment, program

Scripted = Callable[..., Live]
SED = call("bash", command="sed -i s/-/+/ m.py", description="fix the sign")
DONE = "The sign is fixed."


class Asked(Turns):
    """Answers with a title where no tools were offered: opencode asks for one at the same time."""

    def __init__(self, live: Live, *answers: str) -> None:
        super().__init__(*answers)
        self._live = live

    def __iter__(self):  # type: ignore[no-untyped-def]
        vocabulary = self._live.service.engine.model.vocabulary
        request = self._live.service.streams[-1].request
        beginning = b"".join(vocabulary.piece(token) for token in request.prompt[:200]).decode()
        return iter(["Sign"]) if "title generator" in beginning else super().__iter__()


def test_opencode_edits_a_file(scripted: Scripted, tmp_path: Path) -> None:
    found = program("opencode", "REST_LOCAL_OPENCODE")
    live = scripted(n_ctx=65536, aliases=("*",))
    live.service.answer = turns = Asked(live, SED, DONE)
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    (home / "config" / "opencode").mkdir(parents=True)
    (work / "m.py").write_text(WRONG)
    provider = {
        "npm": "@ai-sdk/openai",
        "options": {"baseURL": f"{live.url}/v1", "apiKey": "any"},
        "models": {"demo": {"reasoning": True, "tool_call": True, "limit": {"context": 65536, "output": 4096}}},
    }
    config = {"provider": {"local": provider}, "permission": "allow", "autoupdate": False, "share": "disabled"}
    (home / "config" / "opencode" / "opencode.json").write_text(json.dumps(config))
    done = subprocess.run(
        [found, "run", "-m", "local/demo", "fix the sign in m.py"], cwd=work,
        env=environment(home) | {"PWD": str(work)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "m.py").read_text() == RIGHT, done.stdout + done.stderr
    assert DONE in done.stdout
    assert turns.asked == 2


def test_its_recorded_requests_edit_a_file(scripted: Scripted) -> None:
    """The AI SDK reads items as they are begun and done, and sends reasoning back as `encrypted_content` alone."""
    live = scripted(n_ctx=8192)
    live.service.answer = Turns("Fix the sign", SED, DONE)
    headers = dict(OPENCODE_TITLE.headers)
    title = live.post(OPENCODE_TITLE.path, OPENCODE_TITLE.body, headers=headers)
    assert '"delta":"Fix the"' in title.text.replace('"Fix the sign"', '"Fix the"')
    first = live.post(OPENCODE_TASK.path, OPENCODE_TASK.body, headers=headers)
    events = [json.loads(line[6:]) for line in first.text.splitlines() if line.startswith("data: ")]
    added = {event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.added"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == list(added)
    thought, called = done
    assert added[called["id"]]["name"] == "bash"
    assert "".join(e["delta"] for e in events if e["type"].endswith("arguments.delta")) == called["arguments"]
    items = [
        *OPENCODE_TASK.body["input"],
        {"type": "reasoning", "encrypted_content": thought["encrypted_content"], "summary": []},
        {"type": "function_call", "call_id": called["call_id"], "name": "bash", "arguments": called["arguments"]},
        {"type": "function_call_output", "call_id": called["call_id"], "output": ""},
    ]
    second = live.post(OPENCODE_TASK.path, OPENCODE_TASK.body | {"input": items}, headers=headers)
    last = json.loads(second.text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"] == DONE
