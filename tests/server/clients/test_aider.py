"""aider edits a file: its requests, as recorded from the program with a model that says what a scripted edit needs."""

import re

import pytest
from live import Scripted, data_of, pieces
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


def edited(text: str, said: str) -> str:
    """Return what aider makes of an answer: a whole file, or one text of it replaced."""
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
