"""How long a command takes to begin: `--help`, the import of the library, and `chat` to its prompt.

    python -m benchmarks startup [--rounds 11]

Wall time in milliseconds, as medians over the rounds. `chat` runs in a pseudo terminal, with the demo model and a chat
template given; its first start, which measures the model, is apart. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rest_local.paths import demo_model

COMMAND = [sys.executable, "-m", "rest_local"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PASTE = b"\x1b[?2004h"  # what prompt_toolkit writes before its prompt
LONGEST_S = 60.0


def wall_ms(command: Sequence[str]) -> float:
    """The time of a command that has to succeed."""
    begun = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - begun)


def prompt_ms(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """The time until a conversation shows its prompt; then it is killed. Raises TimeoutError."""
    master, slave = pty.openpty()
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=dict(environment), start_new_session=True
    )
    os.close(slave)
    try:
        shown = b""
        while b">" not in shown.partition(PASTE)[2]:
            if time.perf_counter() - begun > LONGEST_S:
                raise TimeoutError(f"no prompt after {LONGEST_S} s: {shown!r}")
            if select.select([master], [], [], 0.01)[0]:
                new = os.read(master, 1 << 16)
                shown += new
                if b"\x1b[6n" in new:  # asks where the cursor is
                    os.write(master, b"\x1b[1;1R")
        return 1e3 * (time.perf_counter() - begun)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def median(rounds: int, measure: Callable[[], float]) -> float:
    return round(statistics.median(measure() for _ in range(rounds)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds: int = parser.parse_args().rounds
    python = median(rounds, lambda: wall_ms([sys.executable, "-c", "pass"]))
    figures = {
        "help_ms": median(rounds, lambda: wall_ms([*COMMAND, "--help"])),
        "import_ms": round(median(rounds, lambda: wall_ms([sys.executable, "-c", "import rest_local"])) - python, 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, "utf-8")
        command = [*COMMAND, "chat", "-m", str(demo_model()), "--chat-template-file", str(template)]
        environment = {**os.environ, "REST_LOCAL_CACHE": f"{folder}/cache", "REST_LOCAL_DATA": f"{folder}/data"}
        figures["first_prompt_ms"] = round(prompt_ms(command, environment), 1)
        figures["prompt_ms"] = median(rounds, lambda: prompt_ms(command, environment))
    print(json.dumps(figures))
