"""Ollama's API in front of several models: their lists, their names, and lines that arrive as they were sent."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import ollama
import pytest
from support.encoders import MEAN_POOLING, encoder

from rest_local.decoding.config import EngineConfig
from rest_local.router.memory import Need, need_of
from tests.router.conftest import Routed, choice

Start = Callable[..., Routed]
Files = Callable[..., list[Path]]
HELLO = [{"role": "user", "content": "Hello"}]


def test_all_models_are_listed_and_those_in_memory(routed: Start, files: Files) -> None:
    one, two = files("one", "two")
    live = routed([choice(one, aliases=("coder",)), choice(two)], idle=600.0)
    with ollama.Client(host=live.url) as client:
        listed = client.list().models
        assert [model.model for model in listed] == ["coder:latest", "one:latest", "two:latest"]
        assert listed[2].size == two.stat().st_size
        assert len({model.digest for model in listed}) == 2, "one for each file"
        loaded = client.ps().models
        assert [model.model for model in loaded] == ["coder:latest", "one:latest"]
        left = loaded[0].expires_at.timestamp() - time.time()
        assert 0 < left <= 600
        client.generate("two", "x", options={"num_predict": 1})
        assert [model.model for model in client.ps().models][-1] == "two:latest"
        assert client.list().models[2].details.quantization_level == "Q8_0"


def test_without_a_limit_models_stay(pair: Routed) -> None:
    rows = pair.get("/api/ps").json()["models"]
    assert all(datetime.fromisoformat(row["expires_at"].replace("Z", "+00:00")).year > 2100 for row in rows)


def test_a_name_with_its_tag_reaches_the_model(pair: Routed) -> None:
    with ollama.Client(host=pair.url) as client:
        answer = client.chat("two:latest", HELLO, options={"num_predict": 2})
        assert answer.model == "two:latest"
        assert client.show("two").modelinfo["general.architecture"] == "llama"
        with pytest.raises(ollama.ResponseError, match="no such model"):
            client.chat("three", HELLO)
    with pair.client() as client_:
        shown = client_.post("/api/show", json={"name": "two:latest"}).json()
        assert shown["modelfile"].splitlines()[1] == "FROM two:latest"
        assert client_.post("/api/show", json={"name": "three"}).status_code == 404
        assert client_.get("/api/version").json()["version"]


def test_programs_need_no_content_type_and_pages_cannot_call(pair: Routed) -> None:
    content = json.dumps({"model": "two", "messages": HELLO, "options": {"num_predict": 1}}).encode()
    with pair.client() as client:
        assert client.post("/api/chat", content=content).status_code == 200
        page = {"sec-fetch-site": "cross-site"}
        assert client.post("/api/chat", content=content, headers=page).status_code == 415
        assert client.post("/api/chat", content=content, headers={"origin": "https://x.example"}).status_code == 403


def test_each_line_is_a_part_of_its_own(pair: Routed) -> None:
    content = json.dumps({"model": "two", "messages": HELLO, "options": {"num_predict": 12, "seed": 1}}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pair.port), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    body, parts = received.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16):
            parts.append(json.loads(body[: int(size, 16)]))
        body = body[int(size, 16) + 2 :]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_model_of_embeddings_and_one_that_chats(routed: Start, files: Files, tmp_path: Path) -> None:
    bert = encoder(tmp_path / "bert.gguf", MEAN_POOLING).path
    assert need_of(EngineConfig(model=bert, slots=4)) == Need(bert.stat().st_size, 0)
    live = routed([choice(*files("one")), choice(bert)])
    with ollama.Client(host=live.url) as client:
        assert len(client.embed("bert", ["the cat", "a dog"]).embeddings) == 2
        assert client.show("bert").capabilities == ["embedding"]
        assert client.chat("one", HELLO, options={"num_predict": 1}).done
        with pytest.raises(ollama.ResponseError, match="generates no text"):
            client.chat("bert", HELLO)


def test_a_stream_whose_process_ends_has_an_error_as_its_last_line(routed: Start, files: Files) -> None:
    live = routed([choice(each) for each in files("one")])
    endless = {"prompt": "def main", "raw": True, "shift": True, "options": {"num_predict": 10**6, "temperature": 1}}
    with live.client() as client, client.stream("POST", "/api/generate", json=endless) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["response"]
        os.kill(live.process("one").pid, signal.SIGKILL)
        last = json.loads([line for line in lines if line][-1])
    assert last.keys() == {"error"}
    assert "ended" in last["error"]
    with ollama.Client(host=live.url) as again:
        assert again.generate("one", "x", options={"num_predict": 1}).done
