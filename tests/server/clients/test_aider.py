"""aider edits a file: the program itself, with a model that says what a scripted edit needs; and its requests, as
recorded from that, always.

The program needs a hundred packages, some in versions that do not go with ours, so it has an environment of its own:
`python -m venv DIR; DIR/bin/pip install aider-chat; REST_LOCAL_AIDER=DIR/bin/aider make test`. Skipped without one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from live import Live, Scripted, data_of, pieces
from recorded import OPENAI

EDIT = """The sign is wrong.

m.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""
WHOLE = """m.py
```
def add(a, b):
    return a + b
```
"""


@pytest.fixture
def aider(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    program = os.environ.get("REST_LOCAL_AIDER") or shutil.which("aider")
    if program is None:
        pytest.skip("aider is not installed; see the module's text")

    def run(live: Live, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "m.py").write_text("def add(a, b):\n    return a - b\n")
        options = "--yes-always --no-git --no-check-update --no-show-release-notes --no-show-model-warnings"
        options += " --analytics-disable --map-tokens 0 --model openai/demo --openai-api-key any"
        command = [program, *options.split(), "--openai-api-base", f"{live.url}/v1", *arguments, "m.py"]
        local = {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | local, capture_output=True, text=True, timeout=240, check=False
        )

    return run


@pytest.mark.parametrize(("form", "said"), [("diff", EDIT), ("whole", WHOLE)], ids=["diff", "whole"])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_aider_edits_a_file(
    scripted: Scripted,
    aider: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    form: str,
    said: str,
    stream: str,
) -> None:
    live = scripted(n_ctx=8192, answer=pieces(said, 7))
    done = aider(live, "--edit-format", form, stream, "--message", "fix the sign")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "m.py").read_text() == "def add(a, b):\n    return a + b\n", done.stdout
    request = live.service.stream().request
    assert request.sampling.temperature == 0.0
    assert len(request.prompt) > 500, "its own prompt, the rules of the format and the file"


def edited(text: str, said: str) -> str:
    """What aider makes of an answer: a file whole, or one text of it replaced."""
    if found := re.search(r"<<<<<<< SEARCH\n(.*?)=======\n(.*?)>>>>>>> REPLACE", said, re.DOTALL):
        assert found[1] in text
        return text.replace(found[1], found[2])
    found = re.fullmatch(r"m\.py\n```\n(.*)```\n", said, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("form", ["diff", "whole"])
@pytest.mark.parametrize("stream", [True, False])
def test_its_recorded_requests_edit_a_file(scripted: Scripted, form: str, stream: bool) -> None:
    """What litellm reads of the answer is what the model said, to the character."""
    live = scripted(n_ctx=8192)
    said = EDIT if form == "diff" else WHOLE
    live.service.answer = pieces(said, 7)
    recorded = OPENAI[f"AIDER_{form.upper()}"]
    body = recorded.body | ({"stream": True} if stream else {})
    answer = live.post(recorded.path, body, headers=recorded.headers)
    assert answer.status_code == 200
    if stream:
        chunks = data_of(answer.text)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        choices = answer.json()["choices"]
        content = choices[0]["message"]["content"]
        assert answer.json()["usage"]["completion_tokens"] > 0
    assert choices[-1]["finish_reason"] == "stop"
    assert content == said
    assert edited("def add(a, b):\n    return a - b\n", content) == "def add(a, b):\n    return a + b\n"
    request = live.service.stream().request
    assert request.sampling.temperature == 0.0
    assert request.max_tokens == 8192 - len(request.prompt)
