"""Batches of one machine that are killed at random moments, and then go on to their end; builds of an index on a Ray
cluster of two nodes, of which a node, the driver or a process is killed.

Not collected by `make test`, whose tests kill a few times.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import ray_build
from support.batches import kill_and_go_on
from support.ray_nodes import RayNodes, needs_ray

BATCH_KILLS = 50
BUILD_KILLS = int(os.environ.get("REST_LOCAL_BUILD_KILLS", "60"))
SECONDS = 600.0


def test_batches_killed_at_random(tmp_path: Path) -> None:
    """Complete and without duplicates, however often it was killed."""
    advanced = kill_and_go_on(tmp_path, kills=BATCH_KILLS, requests=2000, random=random.Random(1))
    print(f"killed {BATCH_KILLS} times, {advanced} times with new answers in the output")
    assert advanced > 0


@needs_ray
def test_builds_killed_at_random(tmp_path: Path) -> None:
    """The bytes of a local build, whatever was killed, and the commit of before until then."""
    source, store, control = _source(tmp_path / "source"), tmp_path / "store", tmp_path / "control"
    control.mkdir()
    (control / "shards").write_text("6")
    moments, killed, resumed, warned = random.Random(2), Counter[str](), 0, 0
    with RayNodes() as nodes:

        def started(where: Path, *more: str) -> subprocess.Popen[str]:
            script = [sys.executable, ray_build.__file__, str(control), str(1 << 18)]
            given = ["-o", str(where), "--memory", "3600M", "--jobs", "6", "--json", "--replace", *more]
            pipe = subprocess.PIPE
            return subprocess.Popen([*script, *given], stdout=pipe, stderr=pipe, env=nodes.environment, text=True)

        began = time.monotonic()
        _built(started(tmp_path / "right", str(source), "--ray", nodes.address))
        seconds, right = time.monotonic() - began, _segments(tmp_path / "right")
        _built(started(tmp_path / "local", str(source)))
        assert _segments(tmp_path / "local") == right
        _built(started(store, str(source / "f00.py")))
        before = _segments(store)
        while killed.total() < BUILD_KILLS:
            resumed += any(store.glob("staging-*/shard-*.json"))
            process = started(store, str(source), "--ray", nodes.address)
            kind = moments.choice(("node", "driver", "driver", "process"))
            _sleep(process, store, moments, seconds)
            if process.poll() is not None:
                warned += _built(process)
            elif kind == "driver":
                process.kill()
                process.communicate()
                killed[kind] += 1
                assert _segments(store) in (before, right)
            elif kind == "node":
                nodes.kill_worker_now()
                killed[kind] += 1
                warned += _built(process)
                nodes.add_worker()
            else:
                (control / "die-1").touch()
                warned += _built(process)
                killed[kind] += not (control / "die-1").exists()
                (control / "die-1").unlink(missing_ok=True)
            print(f"killed {dict(killed)}", flush=True)
            if process.returncode == 0:
                assert _segments(store) == right
                assert not list(store.glob("staging-*"))
                _built(started(store, str(source / "f00.py")))
            before = _segments(store)
    print(f"killed {dict(killed)}; {resumed} builds went on with finished shards; {warned} shards were lost")


def _source(folder: Path) -> Path:
    folder.mkdir()
    numbers = random.Random(3)
    for number in range(40):
        lines = [f"value_{numbers.randrange(1000)} = {numbers.random()}\n" for _ in range(2500)]
        path = folder / f"f{number:02}.py"
        path.write_text("".join(lines))
        os.utime(path, (1e9, 1e9))
    return folder


def _sleep(process: subprocess.Popen[str], store: Path, moments: random.Random, seconds: float) -> None:
    """Sleep until some moment of a build that takes so many seconds, often soon after a segment began to arrive."""
    end = time.monotonic() + moments.uniform(0.0, 1.2 * seconds)
    arrives = moments.random() < 0.5
    while process.poll() is None and time.monotonic() < end:
        if arrives and any(store.glob("staging-*/*.new-*")):
            time.sleep(moments.uniform(0.0, 0.3))
            return
        time.sleep(0.002)


def _built(process: subprocess.Popen[str]) -> int:
    """Wait for a build that succeeds; how many shards it lost."""
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    json.loads(out)
    lines = errors.splitlines()
    assert all(line.startswith("rest-local: warning: a node or a process was lost") for line in lines), errors
    return len(lines)


def _segments(store: Path) -> dict[str, str]:
    """Return the files that the manifest names, each with its checksum."""
    named = json.loads((store / "manifest.json").read_bytes())["segments"]
    found = {}
    for segment in named:
        for kind, entry in segment["files"].items():
            path = store / f"{segment['name']}.{kind}.bin"
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            assert found[path.name] == entry["sha256"]
    return found
