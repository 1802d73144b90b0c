"""Batches on a Ray cluster of two nodes: a node, or the driver, is killed at random moments. Not collected by `make
test`, whose tests kill one of each; `make soak` names this file.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.batches import COMMAND, OPTIONS, answers_of, write_requests
from support.ray_nodes import RayNodes, needs_ray

KILLS = 20
REQUESTS = 100
SECONDS = 600.0


@needs_ray
def test_nodes_and_drivers_killed_at_random(tmp_path: Path) -> None:
    """Complete and without duplicates, whatever was killed."""
    source, output = write_requests(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"
    moments, killed = random.Random(1), {"node": 0, "driver": 0}
    with RayNodes() as nodes:
        command = [*COMMAND, str(source), "-o", str(output), *OPTIONS, "--ray", nodes.address]
        while sum(killed.values()) < KILLS:
            process = subprocess.Popen(command, stderr=subprocess.PIPE, env=nodes.environment, text=True)
            _wait(process, output, moments)
            if process.poll() is None:
                kind = moments.choice(("node", "node", "driver"))
                killed[kind] += 1
                print(f"kills a {kind} at {_lines(output)} of {REQUESTS} answers", flush=True)
                if kind == "driver":
                    process.kill()
                    process.communicate()
                    continue
                nodes.kill_worker_now()
                _ends_complete(process, output)
                nodes.add_worker()
            else:
                _ends_complete(process, output)
        done = subprocess.Popen(command, stderr=subprocess.PIPE, env=nodes.environment, text=True)
        _ends_complete(done, output)
    print(f"killed {killed['node']} nodes and {killed['driver']} drivers")


def _wait(process: subprocess.Popen[str], output: Path, moments: random.Random) -> None:
    """Until some lines more are there, or the process has ended, and then a few milliseconds."""
    wanted = _lines(output) + moments.choice((0, 1, moments.randrange(REQUESTS // 2)))
    while process.poll() is None and _lines(output) < wanted:
        time.sleep(0.002)
    time.sleep(moments.uniform(0.0, 2.0 if wanted == 0 else 0.2))


def _ends_complete(process: subprocess.Popen[str], output: Path) -> None:
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    found = answers_of(output)
    assert sorted(found) == sorted(f"r{number}" for number in range(REQUESTS))
    assert all(line["response"]["status_code"] == 200 for line in found.values())
    output.unlink()


def _lines(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0
