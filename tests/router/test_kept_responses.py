"""Responses of /v1/responses where models have processes of their own: they outlive one, and models share them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rest_local.server.settings import Settings
from tests.router.conftest import Routed, choice, refuses, until

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]


def respond(live: Routed, text: str, *, model: str = "one", key: str = "", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with live.client(headers=headers) as client:
        asked = {"model": model, "input": text, "max_output_tokens": 4, "temperature": 0} | body
        return client.post("/v1/responses", json=asked)


def test_a_conversation_goes_on_after_its_process_was_killed(pair: Routed) -> None:
    first = respond(pair, "def first():").json()
    killed = pair.process("one")
    os.kill(killed.pid, signal.SIGKILL)
    read = pair.get(f"/v1/responses/{first['id']}")
    assert read.status_code == 200, "no model is needed to read it"
    assert read.json() == first
    until(partial(refuses, killed.port))  # a request that reached it while it ends would get an error
    second = respond(pair, "def second():", previous_response_id=first["id"])
    assert second.status_code == 200, second.text
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    listed = pair.get(f"/v1/responses/{second.json()['id']}/input_items", params={"order": "asc"}).json()
    assert [item["content"][0]["text"] for item in listed["data"]][::2] == ["def first():", "def second():"]


def test_another_model_goes_on(pair: Routed) -> None:
    first = respond(pair, "def first():", model="one").json()
    second = respond(pair, "def second():", model="two", previous_response_id=first["id"])
    assert second.status_code == 200, second.text
    assert second.json()["model"] == "two"
    with pair.client() as client:
        assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    assert pair.get(f"/v1/responses/{first['id']}").status_code == 404
    gone = respond(pair, "def third():", model="two", previous_response_id=first["id"])
    assert gone.json()["error"]["code"] == "previous_response_not_found"


def test_keys_keep_their_responses_apart_in_every_process(routed: Start, files: Files) -> None:
    """And a server that ends leaves none."""
    (one,) = files("one")
    live = routed([choice(one)], settings=Settings(keys=(b"mine", b"other")))
    made = respond(live, "def first():", key="mine").json()
    assert respond(live, "x", key="other", previous_response_id=made["id"]).status_code == 400
    assert respond(live, "x", key="mine", previous_response_id=made["id"]).status_code == 200
    path = f"/v1/responses/{made['id']}"
    for headers, status in (({"x-api-key": "other"}, 404), ({"x-api-key": "mine"}, 200), ({}, 401)):
        assert live.get(path, headers=headers).status_code == status
    folder = live.routing.folder
    assert list((folder / "responses").rglob("*.json"))
    live.stop()
    assert not folder.exists()
