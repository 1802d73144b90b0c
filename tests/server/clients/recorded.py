"""What editors and agents send: tables of requests (`requests/*.json`), with field names and values as in their sources
and made-up text.

Each names the file and the version that it was read from, or the program that it was recorded from. To update one, read
the source again and change `source` as well. The tests in this folder check what the same source reads of the answer.
Time limits are longer than the clients' own: a test must not depend on the machine.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """One request. `headers`: those that could matter, with what a client without a key puts there."""

    client: str
    source: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def _table(name: str) -> dict[str, Recorded]:
    text = (Path(__file__).parent / "requests" / f"{name}.json").read_text(encoding="utf-8")
    return {name: Recorded(**fields) for name, fields in json.loads(text).items()}


OPENAI, MESSAGES, OLLAMA = _table("openai"), _table("messages"), _table("ollama")
NEXT_EDITS = _table("next_edit")
"""By name: requests to the calls of OpenAI and llama-server, to Anthropic's, to Ollama's; next edits of editors."""
ALL = [*OPENAI.values(), *MESSAGES.values(), *OLLAMA.values(), *NEXT_EDITS.values()]
TOOLS = OPENAI["VSCODE_AGENT"].body["tools"]
GAP = OPENAI["ZED_EDIT_PREDICTION"].body["prompt"]
ZED_STOPS = OPENAI["ZED_EDIT_PREDICTION"].body["stop"]
