"""Conversations in turn over few slots and a small disk, restarts: nothing stays behind.

Not collected by `make test`; `make soak` runs it. REST_LOCAL_SOAK_SECONDS is the time of each test, and
REST_LOCAL_SOAK_SEED repeats one.
"""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.kv_cache import sessions
from rest_local.paths import cache_dir
from tests.support.memory import resident_mb

SECONDS = float(os.environ.get("REST_LOCAL_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("REST_LOCAL_SOAK_SEED", str(time.time_ns() % 10**6)))
CONVERSATIONS, SLOTS = 8, 3
N_CTX, TURN = 2048, 12
GROWTH_MB = 16.0  # The last two thirds may add so much; what waits to be written comes and goes.
FREE_DESCRIPTORS = 3

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_turns_evictions_and_restarts(
    tiny_model: Callable[..., Path], arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 128)
    monkeypatch.setattr(sessions, "IDLE_S", 0.02)
    print(f"REST_LOCAL_SOAK_SEED={SEED}")
    rng, model = random.Random(SEED), tiny_model(arch)
    texts = [[rng.randrange(40, 120) for _ in range(300)] for _ in range(CONVERSATIONS)]
    limit, over = 8 << 20, time.monotonic() + SECONDS
    memory: list[float] = []
    opened: list[int] = []
    counts = {"turns": 0, "cached": 0, "tokens": 0, "engines": 0}
    for share in (0.1, 0.2, 0.3, 1.0):  # each engine takes some megabytes for good, with sessions and without
        counts["engines"] += 1
        engine = Engine.load(model, n_ctx=N_CTX, slots=SLOTS, threads=1, policy="off", sessions=limit)
        with engine, Service(engine) as service:
            memory.clear()
            ends = time.monotonic() + share * (over - time.monotonic())
            while time.monotonic() < ends:
                _turns(service, texts, rng, counts, min(ends, time.monotonic() + 1.0))
                memory.append(resident_mb())
            _check_cells(service, engine.decoder.context.backend)
        opened.append(descriptors())
        home = cache_dir() / "sessions"
        assert sum(path.stat().st_size for path in home.rglob("*.cells")) <= limit
        assert not list(home.rglob(".*")), "an unfinished file"
    assert [thread.name for thread in threading.enumerate() if "sessions" in thread.name] == []
    print(json.dumps({"arch": arch, **counts, "memory_mb": [round(memory[0], 1), round(memory[-1], 1)]}))
    assert counts["cached"] > counts["tokens"] // 2
    assert max(opened) <= opened[0] + FREE_DESCRIPTORS
    assert memory[-1] - memory[len(memory) // 3] < GROWTH_MB


def _turns(service: Service, texts: list[list[int]], rng: random.Random, counts: dict[str, int], over: float) -> None:
    """Make turns of several conversations at a time."""
    while time.monotonic() < over:
        chosen = rng.sample(range(CONVERSATIONS), 2)
        streams = []
        for number in chosen:
            text = texts[number]
            if len(text) > N_CTX - 200:
                del text[rng.randrange(150, 400) :]
            text += [rng.randrange(40, 120) for _ in range(TURN)]
            streams.append(service.submit(Request(list(text), max_tokens=TURN, ignore_end=True)))
        if rng.random() < 0.1:
            streams[0].cancel()
        for number, stream in zip(chosen, streams, strict=True):
            list(stream)
            texts[number] += stream.result.tokens
            counts["turns"] += 1
            counts["cached"] += stream.result.timings.cached_tokens
            counts["tokens"] += len(stream.state.request.prompt) if stream.result.tokens else 0


def _check_cells(service: Service, context: Any) -> None:
    """Check that each sequence id holds what its slot says, and no other id anything."""

    def held(engine: Engine) -> None:
        slots = engine.decoder.slots
        for slot in slots:
            assert context.end(slot.branches.first_id) == slot.n_past
        engine.decoder.forget()
        assert all(context.end(seq) == 0 for seq in range(len(slots) * context.n_branches))

    service.run(held)
