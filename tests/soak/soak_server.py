"""A minute of what no client should do, against a server with the demo model: nothing of it is a fault, nothing stays.

Not collected by `make test`; `make soak` names this file. REST_LOCAL_SOAK_SECONDS is the time of each test, and
REST_LOCAL_SOAK_SEED repeats one.
"""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "clients"))

import recorded
from live import Live, served

from rest_local.decoding.engine import Engine
from rest_local.server.app import Serving
from rest_local.server.settings import Settings
from tests.support.memory import resident_mb

SECONDS = float(os.environ.get("REST_LOCAL_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("REST_LOCAL_SOAK_SEED", str(time.time_ns() % 10**6)))
AT_ONCE = 4
BODIES = list(recorded.OPENAI.values())
WRONG: list[Any] = [None, True, -1, 0, 1e308, 2**63, -(2**70), "", "x", "\x00", "né \U0001f642", "\udcff", [], {}, [[]]]
WRONG += [{"type": "function"}, [None], ["a"] * 50, {"a": {"b": []}}, "<|im_start|>" * 20, 0.5]
FAULTS = {"500", "502"}
PATIENCE = (0.3, 5.0)  # seconds: a request that is cut short is never answered, and most of the time would be waiting


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    serving = Serving(Settings(port=0, aliases=("*",), max_body=1 << 20), "demo", lambda: Engine.load(slots=AT_ONCE))
    with served(serving) as live:
        assert serving.loaded.wait(300)
        yield live


def damaged(value: Any, rng: random.Random) -> Any:
    """The value with one thing in it, anywhere, replaced, removed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {key: each for key, each in value.items() if key != name}
        return value | {name: damaged(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], damaged(value[at], rng), *value[at:] * rng.choice((0, 1))]
    return copy.deepcopy(rng.choice(WRONG))


def request(rng: random.Random) -> bytes:
    """A request as bytes, more or less what a client would send."""
    chosen = rng.choice(BODIES)
    body = chosen.body | {"n_predict": 4, "max_tokens": 4}
    for _ in range(rng.randrange(4)):
        body = damaged(body, rng)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randrange(4)) + data[at + rng.randrange(3) :]
    length = len(data) if rng.random() < 0.95 else rng.randrange(2 * len(data))
    head = (
        f"POST {chosen.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}"
    )
    sent = head.encode() + b"\r\nconnection: close\r\n\r\n" + data
    if rng.random() < 0.1:
        at = rng.randrange(len(sent))
        sent = sent[:at] + rng.randbytes(rng.randrange(8)) + sent[at:]
    return sent if rng.random() < 0.95 else sent[: rng.randrange(len(sent))]


def ask(live: Live, rng: random.Random) -> str:
    """The status of one request, or how it ended: clients leave before, while and after they are answered."""
    sent = request(rng)
    with socket.create_connection(("127.0.0.1", live.port), timeout=rng.choice(PATIENCE)) as connection:
        try:
            connection.sendall(sent)
            if rng.random() < 0.3:
                return "left"
            if rng.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
            said = connection.recv(4096)
            while rng.random() < 0.9 and connection.recv(1 << 16):
                pass
        except (TimeoutError, ConnectionError):
            return "no answer"
    return said[9:12].decode("ascii", "replace") if said.startswith(b"HTTP/1.1 ") else "closed"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell the resident memory")
def test_damaged_requests(live: Live) -> None:
    print(f"REST_LOCAL_SOAK_SEED={SEED}")
    counts: Counter[str] = Counter()
    deadline = float("inf")

    def work(number: int) -> None:
        rng = random.Random(SEED * AT_ONCE + number)
        while time.monotonic() < deadline:
            counts[ask(live, rng)] += 1

    first = random.Random(SEED - 1)
    for _ in range(100):  # what is allocated once
        ask(live, first)
    before, deadline = resident_mb(), time.monotonic() + SECONDS
    threads = [threading.Thread(target=work, args=(number,)) for number in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(counts), f"{before:.0f} MB before, {resident_mb():.0f} MB after")
    assert counts.keys().isdisjoint(FAULTS)
    assert {"200", "400"} <= counts.keys()
    assert resident_mb() < 1.2 * before + 32
    settled(live)


def settled(live: Live) -> None:
    """There is no request, so no slot is busy; and the next request works."""
    for _ in range(600):
        if not any(slot["is_processing"] for slot in live.get("/slots").json()):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a slot is busy a minute after the last request")
    assert live.get("/health").json() == {"status": "ok"}
    assert live.post("/completion", {"prompt": "def add(", "n_predict": 4}).json()["tokens_predicted"] == 4
