"""What many clients do: unknown fields and model names. docs/CLIENTS.md has the table."""

from __future__ import annotations

from typing import Any

import pytest
from live import Live
from recorded import OPENAI

VIM = OPENAI["VIM_INFILL"].body


@pytest.mark.parametrize("more", [{"id_slot": number} for number in (0, 7, 10**6)] + [{"n_cmpl": 3}, {"lora": []}])
def test_additional_fields_of_llama_vim_and_vscode_are_accepted(demo: Live, more: dict[str, Any]) -> None:
    assert "content" in demo.post("/infill", VIM | more).json()


def test_aliases_pass_through(scripted: Any) -> None:
    live = scripted(aliases=("qwen2.5-coder-1.5b", "gpt-4o-mini"))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for name in ("qwen2.5-coder-1.5b", "gpt-4o-mini", "demo"):
        assert live.post("/v1/chat/completions", body | {"model": name}).json()["model"] == name
    for name in ("", None):
        assert live.post("/v1/chat/completions", body | {"model": name}).json()["model"] == "qwen2.5-coder-1.5b"
    assert live.post("/v1/chat/completions", body | {"model": "GPT-4"}).status_code == 404
    anything = scripted(aliases=("*",))
    assert anything.post("/v1/chat/completions", body | {"model": "GPT-4"}).json()["model"] == "GPT-4"
    assert [model["id"] for model in anything.get("/v1/models").json()["data"]] == ["demo"]
