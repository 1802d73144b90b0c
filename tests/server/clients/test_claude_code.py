"""Claude Code reads and edits a file: the program itself, with a model that says what a scripted edit needs.

`npm install --prefix DIR @anthropic-ai/claude-code`, then
`REST_LOCAL_CLAUDE=DIR/node_modules/@anthropic-ai/claude-code-linux-x64/claude make test`. Skipped without one. Its
requests, as recorded from these runs, are tested always, in `test_messages_agents`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agents import BUGGY, FIXED, answering, program, run
from live import Live, Scripted, call

QUIET = {
    "ANTHROPIC_API_KEY": "any",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}


def claude(live: Live, folder: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """The result of one prompt, as the program's JSON."""
    command = [program("REST_LOCAL_CLAUDE"), "-p", *arguments, "--output-format", "json", "--model", "demo"]
    local = {"ANTHROPIC_BASE_URL": live.url, "ANTHROPIC_SMALL_FAST_MODEL": "demo"}
    result: dict[str, Any] = json.loads(run(command, folder, QUIET | local | variables))
    return result


def test_it_reads_and_edits_a_file(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=200_000)
    file = tmp_path / "m.py"
    file.write_text(BUGGY)

    def reply(prompt: str) -> str:
        path = str(file)
        if "has been updated" in prompt:
            return "The sign is right now."
        if "return a - b" not in prompt:
            return call("Read", file_path=path)
        return "The sign is wrong.\n" + call("Edit", file_path=path, old_string="a - b", new_string="a + b")

    with answering(live, reply) as replies:
        result = claude(live, tmp_path, "Fix the sign in m.py", "--allowedTools", "Read,Edit")
    assert file.read_text() == FIXED
    assert (result["subtype"], result["result"]) == ("success", "The sign is right now.")
    assert result["num_turns"] == 3
    assert result["usage"]["output_tokens"] > 0
    assert all("x-anthropic-billing-header" not in prompt for prompt in replies.prompts)
    first, second = replies.prompts[:2]
    assert second.startswith(common(first)), "each request begins as the one before, so that its cells are used again"


def common(prompt: str) -> str:
    """A prompt without what its template writes at the end to begin the answer."""
    return prompt.rpartition("<|im_start|>assistant")[0]


def test_a_thought_is_taken_back(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=200_000)

    def reply(prompt: str) -> str:
        return "<think>\nThe user greets.\n</think>\n\nHello."

    with answering(live, reply):
        assert claude(live, tmp_path, "hi")["result"] == "Hello."


def test_a_failed_tool_is_reported_to_the_model(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=200_000)

    def reply(prompt: str) -> str:
        return "There is none." if "does not exist" in prompt else call("Read", file_path=str(tmp_path / "none.py"))

    with answering(live, reply) as replies:
        result = claude(live, tmp_path, "Read none.py", "--allowedTools", "Read")
    assert result["result"] == "There is none."
    assert "Error" in replies.prompts[-1] or "<tool_use_error>" in replies.prompts[-1]


def test_a_conversation_goes_on(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=200_000)

    def reply(prompt: str) -> str:
        return "You said so." if "Remember 7." in prompt and "Which number" in prompt else "Noted."

    with answering(live, reply):
        first = claude(live, tmp_path, "Remember 7.")
        second = claude(live, tmp_path, "Which number?", "--resume", first["session_id"])
    assert (first["result"], second["result"]) == ("Noted.", "You said so.")


def test_a_prompt_that_does_not_fit_is_told_as_such(scripted: Scripted, tmp_path: Path) -> None:
    live = scripted(n_ctx=4096)
    with (
        answering(live, lambda prompt: "never") as replies,
        pytest.raises(AssertionError, match=r"[Pp]rompt is too long"),
    ):
        claude(live, tmp_path, "hi")
    assert not replies.prompts


def test_a_search_that_no_server_runs_fails_as_a_tool(scripted: Scripted, tmp_path: Path) -> None:
    """Its search tool asks the model in a request of its own, with a tool that only Anthropic's servers run."""
    live = scripted(n_ctx=200_000)

    def reply(prompt: str) -> str:
        return "I cannot search." if "runs on Anthropic's servers" in prompt else call("WebSearch", query="a sign")

    with answering(live, reply) as replies:
        result = claude(live, tmp_path, "Search for a sign", "--allowedTools", "WebSearch")
    assert result["result"] == "I cannot search."
    assert len(replies.prompts) == 2, "the search itself did not reach the model"
