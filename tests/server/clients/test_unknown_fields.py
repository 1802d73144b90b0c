"""Fields that no API has: refused below `rest_local`, named in the log elsewhere, and no client's field is one."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import recorded
from live import Live
from pydantic import BaseModel
from recorded import OPENAI

from rest_local.api import bodies
from rest_local.api.bodies import ChatBody, CompletionBody, EmbeddingBody, InfillBody, NativeBody, check
from rest_local.api.errors import ApiError
from rest_local.api.messages import CountBody, MessagesBody
from rest_local.api.ollama import EmbedBody, GenerateBody, OllamaChatBody
from rest_local.api.responses import ResponseBody

KINDS: dict[str, type[BaseModel]] = {
    "/infill": InfillBody, "/completion": NativeBody, "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody, "/v1/responses": ResponseBody, "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody, "/api/chat": OllamaChatBody, "/api/generate": GenerateBody,
    "/api/embed": EmbedBody,
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that gives what the log was told since its last call."""
    monkeypatch.setattr(bodies, "_warned", set())
    monkeypatch.setattr(bodies.log, "propagate", True)
    caplog.set_level(logging.WARNING, "rest_local.server")

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return lines


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


def test_other_unknown_fields_are_named_in_the_log_once(told: Callable[[], list[str]]) -> None:
    for _ in range(2):
        check(body({**CHAT, "policy": "off", "temprature": 0, "zzz": 1, "user": "me", "bad name\x1b": 1}), ChatBody)
    assert told() == [
        "field policy of a request is unknown and does nothing; did you mean rest_local.policy?",
        "field temprature of a request is unknown and does nothing; did you mean temperature?",
        "field zzz of a request is unknown and does nothing",
    ]
    check(body({"input": "x", "policy": "off", "zzzz": 1}), EmbeddingBody)
    assert told() == ["field zzzz of a request is unknown and does nothing"]


def test_a_client_cannot_fill_the_log(told: Callable[[], list[str]]) -> None:
    check(body({**CHAT, **{f"field_{n}": n for n in range(1000)}}), ChatBody)
    assert len(told()) == bodies.MAX_WARNINGS


def test_no_field_of_a_recorded_client_is_unknown(told: Callable[[], list[str]]) -> None:
    for each in recorded.ALL:
        check(body(each.body), KINDS[each.path.partition("?")[0]])
        assert told() == [], (each.client, each.path)


def test_a_field_of_one_call_is_unknown_to_none_of_the_others(told: Callable[[], list[str]]) -> None:
    every = {name: None for kind in KINDS.values() for name in kind.model_fields}
    check(body({**every, **CHAT}), ChatBody)
    assert [line for line in told() if "rest_local" not in line] == []


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
