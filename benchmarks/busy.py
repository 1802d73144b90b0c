"""Plain decoding on a quiet and on a busy machine: the cost of waiting threads, and the remaining speed.

    python -m benchmarks busy [--model GGUF]... [--rounds N] [--seconds S] [--spin N]... [--json]

Three engines in separate processes decode in turns: rest-local, rest-local in exact settings, and llama.cpp's default
(all cores, and waiting threads spin as long as the OpenMP runtime decides). First nothing else runs, then one endless
process per processor, which this benchmark starts and ends. For each model: `quiet` is the speed over that of
llama.cpp's default, the median over the pairs of a round; `busy` is the speed under load over the own one on the quiet
machine. Rounds in which other programs took processor time are left out, if the system reports it. `--spin` also
measures a fixed number of threads with this GOMP_SPINCOUNT.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rest_local.llama.cores import default_threads

OURS, EXACT, SPINNING = "rest-local", "exact", "llama.cpp"
DEFAULT_SPIN = 300_000  # GOMP_SPINCOUNT if nothing is set
FOREIGN = 0.1  # share of all processors that other programs may take in a round that counts
PROMPT = "def main():"


@dataclass
class Sample:
    """One turn. `speed`: tokens per second. `threads`: at its end. `foreign`: share of processor time of others."""

    speed: float
    threads: int
    foreign: float

    @property
    def counts(self) -> bool:
        return self.foreign < FOREIGN


@dataclass
class Variant:
    """A process that decodes on request."""

    name: str
    process: subprocess.Popen[str]
    quiet: list[Sample] = field(default_factory=list)
    busy: list[Sample] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, model: str | None, threads: int, environment: dict[str, str]) -> Variant:
        command = [sys.executable, "-m", "benchmarks", "busy", "--child", str(threads)]
        command += ["--exact"] if name == EXACT else []
        process = subprocess.Popen(
            [*command, *(["--model", model] if model else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip
        variant = cls(name, process)
        variant._read()
        return variant

    def turn(self, seconds: float, load: Sequence[subprocess.Popen[str]] = ()) -> Sample:
        """Decode for `seconds`."""
        ours = [self.process.pid, *(process.pid for process in load)]
        busy, total, own = *_machine_time(), _time_of(ours)
        assert self.process.stdin
        print(seconds, file=self.process.stdin, flush=True)
        done = json.loads(self._read())
        busy_now, total_now, own_now = *_machine_time(), _time_of(ours)
        foreign = ((busy_now - busy) - (own_now - own)) / max(total_now - total, 1)
        return Sample(done["speed"], done["threads"], foreign)

    def _read(self) -> str:
        assert self.process.stdout
        if line := self.process.stdout.readline():
            return line
        raise SystemExit(f"{self.name}: the process ended; its messages are above")


def measure(model: str | None, rounds: int, seconds: float, spins: Sequence[int]) -> dict[str, Any]:
    """Speeds of every variant for one model."""
    fixed = {SPINNING: DEFAULT_SPIN, **{f"spin {spin}": spin for spin in spins}}
    variants: list[Variant] = []
    try:
        for name in (OURS, EXACT):
            variants.append(Variant.start(name, model, 0, {}))
        for name, spin in fixed.items():
            variants.append(Variant.start(name, model, default_threads(), {"GOMP_SPINCOUNT": str(spin)}))
        for number in range(rounds):
            for variant in _rotated(variants, number):
                variant.quiet.append(variant.turn(seconds))
        with load(os.cpu_count() or 1) as processes:
            for number in range(max(rounds // 3, 3)):
                for variant in _rotated(variants, number):
                    variant.busy.append(variant.turn(4 * seconds, processes))
    finally:
        for variant in variants:
            variant.process.kill()
            variant.process.wait()
    return _result(variants)


def _rotated(variants: list[Variant], number: int) -> list[Variant]:
    """The variants with another one first in each round."""
    begin = number % len(variants)
    return variants[begin:] + variants[:begin]


def _result(variants: Sequence[Variant]) -> dict[str, Any]:
    by_name = {variant.name: variant for variant in variants}
    base = by_name[SPINNING].quiet
    rows = {}
    for name, variant in by_name.items():
        pairs = [(mine, other) for mine, other in zip(variant.quiet, base, strict=True) if mine.counts and other.counts]
        ratios = [mine.speed / other.speed for mine, other in pairs]
        rows[name] = {
            "quiet_tokens_s": round(_median_speed(variant.quiet), 1),
            "busy_tokens_s": round(_median_speed(variant.busy), 1),
            "quiet": round(median(ratios), 3) if ratios else None,
            "busy": round(_median_speed(variant.busy) / _median_speed(variant.quiet), 3),
            "busy_threads": [sample.threads for sample in variant.busy],
            "pairs": len(pairs),
        }
    return {"processors": os.cpu_count(), "variants": rows}


def _median_speed(samples: Sequence[Sample]) -> float:
    return median(sample.speed for sample in [s for s in samples if s.counts] or samples)


@contextmanager
def load(n: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `n` endless processes, which end with this process at the latest."""
    program = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
    processes = [subprocess.Popen([sys.executable, "-c", program], text=True) for _ in range(n)]
    try:
        time.sleep(0.5)  # for them to start
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _machine_time() -> tuple[int, int]:
    """Busy ticks of all processors, and all ticks; 0 if the system does not report them."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0, 0
    ticks = [int(text) for text in path.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _time_of(processes: Sequence[int]) -> int:
    """Ticks of processor time of these processes."""
    total = 0
    for number in processes:
        path = Path(f"/proc/{number}/stat")
        if path.exists():
            fields = path.read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
    return total


def _child(model: str | None, threads: int, exact: bool) -> None:
    """Decode for the seconds on each line of standard input, and print a line of JSON after each."""
    from rest_local.decoding.engine import Engine

    with Engine.load(model, threads=threads or None, n_ctx=1024, exact=exact) as engine:
        if exact:
            engine.compare(math.inf)  # the rest of the self-test, which decides about the number of threads
        prompt = engine.tokenize(PROMPT)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            seconds, n_tokens = float(line), 0
            begun = time.perf_counter()
            while time.perf_counter() - begun < seconds:
                for _ in engine.generate(prompt, max_tokens=400, policy="off"):
                    n_tokens += 1
                    if time.perf_counter() - begun >= seconds:
                        break
            speed = n_tokens / (time.perf_counter() - begun)
            print(json.dumps({"speed": speed, "threads": engine.threads_in_use}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="a GGUF, repeatable; default: the demo model")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="of a turn on the quiet machine; four times as long on the busy one"
    )
    parser.add_argument("--spin", type=int, action="append", default=[], help="repeatable")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _child(args.model[0] if args.model else None, args.child, args.exact)
        return
    for model in args.model or [None]:
        result = {"model": model and Path(model).name, **measure(model, args.rounds, args.seconds, args.spin)}
        if not args.json:
            for name, row in result["variants"].items():
                print(f"{name:>14}: {json.dumps(row)}")
        print(json.dumps(result), flush=True)
