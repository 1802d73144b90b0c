"""Which model answers: by name, by default, in the query; and the lists of models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rest_local.router.run import ModelChoice
from rest_local.server.settings import Settings
from tests.router.conftest import Routed, choice

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]


def test_a_request_names_its_model(pair: Routed) -> None:
    answers = {name: pair.ask(name) for name in ("one", "coder", "two", None)}
    assert {name: answer.json()["model"] for name, answer in answers.items()} == {
        "one": "one", "coder": "coder", "two": "two", None: "coder"
    }  # fmt: skip
    assert len({answer.json()["content"] for answer in answers.values()}) == 1, "they are the same model"


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/tokenize"])
def test_an_unknown_model_is_404(pair: Routed, path: str) -> None:
    answer = pair.ask("three", path, messages=[{"role": "user", "content": "hi"}], content="x")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"


def test_any_name_will_do_where_the_alias_says_so(routed: Start, files: Files) -> None:
    one, two = files("one", "two")
    live = routed([choice(one), choice(two)], settings=Settings(aliases=("*",)))
    assert live.ask("gpt-9").json()["model"] == "gpt-9"
    assert live.ask("two").json()["model"] == "two"


def test_all_models_are_listed_whether_loaded_or_not(pair: Routed) -> None:
    pair.ask("two")
    rows = pair.get("/v1/models").json()["data"]
    assert [row["id"] for row in rows] == ["coder", "one", "two"]
    assert {row["status"]["value"] for row in rows} == {"loaded"}
    assert all(row["meta"]["n_ctx"] == 2048 for row in rows)
    assert pair.get("/v1/models/two").json() == rows[2]
    assert pair.get("/v1/models/three").status_code == 404


def test_calls_without_a_body_take_the_model_from_the_query(pair: Routed) -> None:
    assert pair.get("/props", params={"model": "two"}).json()["model_alias"] == "two"
    assert pair.get("/props").json()["model_alias"] == "coder"
    assert pair.get("/props", params={"model": "three"}).status_code == 404


def test_a_body_without_a_name_takes_that_of_the_query(pair: Routed) -> None:
    assert pair.ask(None, "/completion?model=two").json()["model"] == "two"
    assert pair.ask("one", "/completion?model=two").json()["model"] in ("one", "coder")


def test_looking_loads_no_model(routed: Start, files: Files) -> None:
    one, two = files("one", "two")
    live = routed([choice(one), choice(two)], settings=Settings(metrics=True))
    for path, text in (("/slots", "[]"), ("/metrics", "")):
        answer = live.get(path, params={"model": "two"})
        assert (answer.status_code, answer.text) == (200, text)
    assert live.statuses() == {"one": "loaded", "two": "unloaded"}
    assert len(live.get("/slots", params={"model": "one"}).json()) == 2
    assert "llamacpp:" in live.get("/metrics").text


def test_calls_of_the_server_need_no_model(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one", "two")], eager=False)
    assert live.get("/health").json() == {"status": "ok"}
    assert live.get("/").text.startswith("<!")
    described = live.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/models/load", "/health"} <= set(described)
    assert set(live.statuses().values()) == {"unloaded"}


@pytest.mark.parametrize(
    ("path", "status"),
    [("/nowhere", 404), ("/completion", 405), ("/models/load", 405), ("/v1/models", 200), ("/v1/batches", 501)],
)
def test_unknown_routes_and_methods_reach_no_model(pair: Routed, path: str, status: int) -> None:
    assert pair.get(path).status_code == status


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b"[]", 400), (b'{"model": 1}', 400), (b'{"prompt": NaN}', 400), (b"", 400), (b"x" * 9000, 413)],
)
def test_bad_bodies(routed: Start, files: Files, content: bytes, status: int) -> None:
    live = routed([choice(each) for each in files("one", "two")], settings=Settings(max_body=8192), eager=False)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{live.url}/completion", content=content, headers=headers, timeout=120)
    assert answer.status_code == status or (content == b"" and answer.status_code == 400)
    assert set(answer.json()) == {"error"}


def test_keys_are_checked_before_anything_else(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one")], settings=Settings(keys=(b"k",)), eager=False)
    assert live.ask("one").status_code == 401
    assert live.get("/v1/models").status_code == 401
    assert live.entry("one").status == "unloaded"
    with live.client(headers={"authorization": "Bearer k"}) as client:
        assert client.post("/completion", json={"prompt": "a", "n_predict": 1}).status_code == 200


def test_the_port_of_a_model_is_the_routers_own(pair: Routed) -> None:
    port = pair.process("one").port
    answer = httpx.post(f"http://127.0.0.1:{port}/completion", json={"prompt": "a", "n_predict": 1})
    assert answer.status_code == 403


def test_a_stream_arrives_as_it_is_written(pair: Routed) -> None:
    body = {"prompt": "def main", "n_predict": 30, "stream": True, "ignore_eos": True}
    with pair.client() as client, client.stream("POST", "/completion", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) > 1
    assert '"stop":true' in lines[-1]


def test_other_addresses_headers_and_queries_reach_the_model(pair: Routed, caplog: pytest.LogCaptureFixture) -> None:
    """A path with characters that are quoted stays as it was sent."""
    answer = pair.get("/v1/models/one%20two?x=%2F")
    assert answer.status_code == 404
    found = pair.get("/datastores?model=one").json()
    assert found["object"] == "list"


def test_more_models_can_be_loaded_and_unloaded_by_a_call(routed: Start, files: Files) -> None:
    one, two = files("one", "two")
    live = routed([choice(one), choice(two)])
    with live.client() as client:
        assert client.post("/models/load", json={"model": "two"}).json() == {"success": True}
        assert live.statuses() == {"one": "loaded", "two": "loaded"}
        assert client.post("/models/unload", json={"model": "one"}).json() == {"success": True}
        assert live.statuses() == {"one": "unloaded", "two": "loaded"}
        assert client.post("/models/unload", json={"model": "none"}).status_code == 404
        assert client.post("/models/unload", json={}).json()["error"]["param"] == "model"
    assert live.ask("one").status_code == 200


def test_each_model_has_its_own_options(routed: Start, files: Files) -> None:
    one, two = files("one", "two")
    models: list[ModelChoice] = [choice(one, n_ctx=512), choice(two, n_ctx=256, slots=1)]
    live = routed(models)
    assert live.get("/props?model=one").json()["default_generation_settings"]["n_ctx"] == 512
    assert live.get("/props?model=two").json()["default_generation_settings"]["n_ctx"] == 256
    assert len(live.get("/slots?model=two").json()) == 1


def test_the_list_of_models_is_that_of_both_apis(pair: Routed) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    theirs = anthropic.Anthropic(base_url=pair.url, api_key="any").models.list()
    assert [(each.id, each.display_name, each.type) for each in theirs] == [
        (name, name, "model") for name in ("coder", "one", "two")
    ]
    assert theirs.data[0].created_at.year >= 2026
    ours = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="any").models.list()
    assert [each.id for each in ours] == ["coder", "one", "two"]
