"""Processes of models are killed while they answer: their clients get an error, the next request is answered, another
model does not notice, and nothing stays.

Not collected by `make test`; `make soak` runs it. REST_LOCAL_SOAK_KILLS is the number of kills.
"""

import os
import platform
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.toy import demo_model

from tests.router.conftest import Routed, choice, router_of
from tests.support.memory import resident_mb

KILLS = int(os.environ.get("REST_LOCAL_SOAK_KILLS", "100"))
WARM_UP = 10  # kills, after which memory and descriptors are compared
LIMIT_SECONDS = 1.0  # The clients see the error so soon after the kill.
GROWTH_MB = 16
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500},
    "/completion": {"prompt": "def main"},
}
LONG = {"n_predict": 1500, "ignore_eos": True, "stream": True, "rest_local": {"policy": "off"}}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Routed]:
    paths = [tmp_path / f"{name}.gguf" for name in ("killed", "other")]
    for path in paths:
        shutil.copyfile(demo_model(), path)
    with router_of([choice(path) for path in paths]) as live:
        yield live


def busy(live: Routed, model: str) -> int:
    return sum(slot["is_processing"] for slot in live.get(f"/slots?model={model}").json())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is read from /proc and trimmed by glibc")
def test_killed_processes_cost_their_own_requests_only(live: Routed) -> None:
    rng = random.Random(1)
    assert live.ask("other").status_code == 200
    other = live.process("other")
    failed: list[str] = []
    stop = threading.Event()

    def use_the_other() -> None:
        while not stop.is_set():
            answer = live.ask("other", n_predict=8)
            if answer.status_code != 200:
                failed.append(answer.text)

    user = threading.Thread(target=use_the_other)
    user.start()
    slowest, cut, before = 0.0, 0, (0.0, 0)
    try:
        for number in range(KILLS):
            path = rng.choice(sorted(PATHS))
            assert live.ask("killed").status_code == 200
            body = {"model": "killed", **LONG, **PATHS[path]}
            with live.client() as client, client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                for _ in range(rng.randrange(1, 6)):
                    next(lines)
                begun = time.monotonic()
                os.kill(live.process("killed").pid, signal.SIGKILL)
                rest = [line for line in lines if line]
                slowest = max(slowest, time.monotonic() - begun)
            # Anthropic's API has no way to go on after the end token, so such an answer may have been complete.
            complete = path == "/v1/messages" and "message_stop" in rest[-1]
            assert complete or "model_crashed" in rest[-1], (path, rest[-3:])
            cut += not complete
            if number == WARM_UP:
                before = (resident_mb(), len(os.listdir("/proc/self/fd")))
    finally:
        stop.set()
        user.join()
    assert not failed, failed[:3]
    assert live.process("other") is other
    assert live.ask("killed").status_code == 200
    assert busy(live, "killed") == busy(live, "other") == 0
    assert live.entry("killed").users == live.entry("other").users == 0
    after = (resident_mb(), len(os.listdir("/proc/self/fd")))
    left = [path.name for path in live.routing.folder.iterdir()]
    print(
        f"\n{KILLS} kills, {cut} in mid-answer: slowest error {1e3 * slowest:.0f} ms, memory {before[0]:.0f} to "
        f"{after[0]:.0f} MB, descriptors {before[1]} to {after[1]}, files {len(left)}"
    )
    assert slowest < LIMIT_SECONDS
    assert after[0] - before[0] < GROWTH_MB
    assert after[1] - before[1] < 8
