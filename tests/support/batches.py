"""Batches of the demo model in processes of their own, killed and started again."""

import json
import os
import random as randomness
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "rest_local", "batch")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
OPTIONS = ("-c", "256", "-t", "1")


def write_requests(path: Path, count: int) -> Path:
    """Write a file of completions `r0`, `r1` ... with different prompts, some sampled with several choices."""
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"import os\ndef a{number}(", "max_tokens": 8 + number % 5, "n": 1 + number % 2},
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def with_errors(path: Path, count: int) -> Path:
    """Write the same, the last two with an error."""
    write_requests(path, count - 2)
    with path.open("a") as file:
        file.write('no json\n{"prompt": "a", "temperature": "hot"}\n')
    return path


def answers_of(path: Path) -> dict[str, Any]:
    """Return the lines of an output by custom_id. Every line is whole, and none is there twice."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    lines = [json.loads(line) for line in data.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "an answer is there twice"
    return found


def kill_and_go_on(
    folder: Path,
    *,
    kills: int,
    requests: int,
    random: randomness.Random,
    options: Sequence[str] = OPTIONS,
) -> int:
    """Kill a batch so many times at random moments, then let it end. The number of kills after which it went on.

    The moment is after a random number of bytes of this run plus a few milliseconds, which is anywhere: while Python
    starts, while the model loads, between two answers, in the middle of a line.
    """
    source, output = write_requests(folder / "in.jsonl", requests), folder / "out.jsonl"
    command = [*COMMAND, str(source), "-o", str(output), *options]
    advanced, killed = 0, 0
    while killed < kills:
        before = _size(output)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=ENVIRONMENT)
        wanted = before + random.choice((0, 1, 1 << random.randrange(8, 13)))
        while process.poll() is None and _size(output) < wanted:
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, 0.1))
        process.kill()
        _, errors = process.communicate()
        if process.returncode == 0:  # it had ended before
            answers_of(output)
            output.unlink()
            continue
        assert process.returncode == -9, errors.decode()
        killed += 1
        advanced += _size(output) > before
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = answers_of(output)
    assert sorted(found) == sorted(f"r{number}" for number in range(requests))
    assert all(line["response"]["status_code"] == 200 for line in found.values())
    return advanced


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
