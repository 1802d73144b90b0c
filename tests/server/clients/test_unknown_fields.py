"""Fields that no API has are refused below `rest_local`, and ignored elsewhere; names of models."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from live import Live
from pydantic import BaseModel
from recorded import OPENAI

from rest_local.api.bodies import ChatBody, CompletionBody, check
from rest_local.api.errors import ApiError
from rest_local.api.messages import MessagesBody
from rest_local.api.ollama import OllamaChatBody
from rest_local.api.responses import ResponseBody

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, CHAT),
        (CompletionBody, {"prompt": "x"}),
        (ResponseBody, {"input": "x"}),
        (MessagesBody, {**CHAT, "max_tokens": 5}),
        (OllamaChatBody, CHAT),
    ],
)
def test_a_misspelt_field_below_rest_local_is_refused_by_name(kind: type[BaseModel], fields: dict[str, Any]) -> None:
    check(body({**fields, "rest_local": {"policy": "off", "other": None}}), kind)
    with pytest.raises(ApiError) as refused:
        check(body({**fields, "rest_local": {"polcy": "off"}}), kind)
    assert (refused.value.status, refused.value.param) == (400, "rest_local")
    assert str(refused.value).startswith("rest_local: unknown field 'polcy'; there are origins, policy, ")


def test_errors_name_the_option_of_serve(scripted: Callable[..., Live]) -> None:
    answer = scripted(n_ctx=64).post("/v1/completions", {"prompt": "x " * 500})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("shorten it, or start the server with a larger --ctx")


# ---- Names of models, and fields of other servers ------------------------------------------------------------------


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
