"""Measure rest-local on a machine with a GPU: build, cost curves, replay of the workloads, exactness; as one JSON.

    python scripts/gpu_check.py -o result.json                  # builds llama.cpp for CUDA into .venv, then measures
    python scripts/gpu_check.py --no-build --data FOLDER        # with what is installed, and with recorded answers
    python scripts/gpu_check.py --cpu --quick                   # the same path in a minute, on any machine

- It uses only the standard library. Every figure comes from a command of rest-local that can be run alone; the result
  holds the command next to its figure.
- A part that fails is reported with its error, and the other parts run. The exit code is then 1.
- The result is written after each part, so an interrupted run keeps its results so far.
- Synthetic models (random weights in the shape of real ones; the last is a mixture of experts) need 0.5, 1.2, 4.7 and
  18 GB of disk in the folder of --work, one at a time, and are deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = (("0.5B", "Q8_0"), ("1.5B", "Q4_K"), ("7B", "Q4_K"), ("30B-A3B", "Q4_K"))
CONTEXT = 8192  # `tune` measures at three context lengths that fit.
DEMO = ROOT / "models" / "demo.gguf"
QUICK_EXACT = ("--prompts", "4", "--tokens", "50")
# By workload: the file of recorded answers, their vocabulary, and further options of `benchmarks wall`.
RECORDED = {
    "MT-Bench": ("mt_bench_answers_vicuna-7b-v1.5.jsonl", "ggml-vocab-llama-spm.gguf", ()),
    "chat": ("alpaca_eval_outputs_llama-3-8b-instruct.jsonl", "ggml-vocab-llama-bpe.gguf", ("--history", "150:")),
    "HumanEval": ("HumanEval.jsonl.gz", "ggml-vocab-qwen2.gguf", ("-d", "gpu-check")),
}


@dataclass
class Check:
    """The results so far, written to `output` after each part."""

    output: Path
    python: str
    environment: dict[str, str]
    layers: Sequence[str]
    result: dict[str, Any] = field(default_factory=dict)

    def part(self, path: Sequence[str], run: Callable[..., dict[str, Any]], *arguments: Any) -> bool:
        """Run one part and store its result, or its error, under `path`. Returns whether it succeeded."""
        print(f"gpu_check: {' / '.join(path)}", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        try:
            found, succeeded = run(*arguments), True
        except (CommandFailed, OSError, ValueError) as error:
            found, succeeded = {"error": str(error)}, False
            self.result["failed"] = [*self.result.get("failed", []), " / ".join(path)]
        place = self.result
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = {**found, "seconds": round(time.perf_counter() - begun, 1)}
        self.output.write_text(json.dumps(self.result, indent=1) + "\n", "utf-8")
        return succeeded

    def measure(self, path: Sequence[str], *module_and_arguments: str) -> bool:
        """Run a module of rest-local that prints JSON as a part."""
        return self.part(path, run_json, [self.python, "-m", *module_and_arguments, "--json"], self.environment)


class CommandFailed(Exception):
    """A command failed, and the message holds the end of its output."""


def run_json(command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a command and return the object that it prints as its last line. Raises CommandFailed."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    shown = shlex.join(["python", *command[1:]])
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise CommandFailed(f"{shown}: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except ValueError as error:
        raise CommandFailed(f"{shown}: its last line is not JSON: {lines[-1][:200]}") from error
    return {"command": shown, **found}


def machine() -> dict[str, Any]:
    """Return the CPU, system and GPUs, as far as the system reports them."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
        gpus = [line.split(" (UUID")[0] for line in found.stdout.splitlines()]
    except (OSError, subprocess.TimeoutExpired):
        gpus = []
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        cpu = next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "gpus": gpus, "system": platform.platform()}


def build() -> dict[str, Any]:
    """Build llama.cpp for CUDA in .venv with `make install`. Raises CommandFailed."""
    arguments = f"{os.environ.get('CMAKE_ARGS', '')} -DGGML_CUDA=on".strip()
    done = subprocess.run(
        ["make", "-B", "install"], cwd=ROOT, env={**os.environ, "CMAKE_ARGS": arguments},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CommandFailed(f"make install: {(done.stderr or done.stdout).strip()[-2000:]}")
    return {"command": f"CMAKE_ARGS={shlex.quote(arguments)} make install"}


def workloads(check: Check, data: Path | None, limit: int) -> dict[str, list[str]]:
    """Return the arguments of `benchmarks wall` by workload, and note those whose files are missing."""
    found, left_out = {}, check.result.setdefault("left_out", {})
    for name, (file, vocabulary, more) in RECORDED.items():
        if data is None or not (data / file).is_file() or not (data / vocabulary).is_file():
            left_out[name] = f"{file} and {vocabulary} are needed in --data"
            continue
        if "-d" in more:
            library = str(Path(os.__file__).parent)
            built = ("rest_local", "index", "build", library, "-o", "gpu-check", "-m", str(data / vocabulary))
            if not check.measure(["datastore"], *built):
                continue
        found[name] = [str(data / file), "--vocab", str(data / vocabulary), *more, "--limit", str(limit)]
    if (ROOT / ".git").exists():
        found["edits"] = ["--git", str(ROOT), "--edits", str(limit), "--predict", "--vocab", str(DEMO)]
    else:
        left_out["edits"] = "the checkout has no git history"
    return found


def measure_model(check: Check, name: str, path: Path, replays: dict[str, list[str]]) -> None:
    """Measure the cost curve of a model at three context lengths, and the workloads with its real forward passes."""
    length = ("-c", str(CONTEXT)) if path != DEMO else ()
    check.measure(["models", name, "tune"], "rest_local", "tune", "-m", str(path), *length, *check.layers)
    for workload, arguments in replays.items():
        check.measure(["models", name, workload], "benchmarks", "wall", *arguments, "-m", str(path))


def synthetic(check: Check, shape: str, quant: str, path: Path, data: Path | None) -> dict[str, Any]:
    """Write a synthetic model. Raises CommandFailed."""
    vocabulary = ("--vocab", str(data / "ggml-vocab-qwen2.gguf")) if data else ()
    command = [check.python, "-m", "benchmarks", "synthetic", shape, quant, str(path), *vocabulary]
    done = subprocess.run(command, cwd=ROOT, env=check.environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailed(f"{shlex.join(command)}: {done.stderr.strip()[-2000:]}")
    return {"bytes": path.stat().st_size}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if every part succeeded, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--cpu", action="store_true", help="no CUDA build, nothing on a GPU")
    parser.add_argument("--quick", action="store_true", help="only the demo model and two answers of each workload")
    parser.add_argument("--no-build", action="store_true", help="measure with the running interpreter's packages")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="recorded answers and vocabularies")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for models and caches; default: a temporary one")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="answers of each workload")
    args = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder = Path(work)
        places = {"CACHE": str(folder / "cache"), "DATA": str(folder / "data"), "CONFIG": os.devnull}
        environment = {**os.environ, **{f"REST_LOCAL_{name}": place for name, place in places.items()}}
        if args.cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        python = sys.executable if args.cpu or args.no_build else str(ROOT / ".venv" / "bin" / "python")
        check = Check(args.output.absolute(), python, environment, ("-ngl", "0") if args.cpu else ())
        check.part(["machine"], machine)
        if not args.cpu and not args.no_build:
            check.part(["build"], build)
        replays = workloads(check, args.data, 2 if args.quick else args.limit)
        if args.quick:  # Edits do not fit the demo model's context.
            text = "def add(a, b):\n    return a + b\n\n\n" * 8
            copied = folder / "copied.jsonl"
            copied.write_text(json.dumps({"instruction": text, "output": text}) + "\n", "utf-8")
            replays = {"copy": [str(copied), "--vocab", str(DEMO)]}
            measure_model(check, "demo", DEMO, replays)
        for shape, quant in () if args.quick else MODELS:
            path = folder / "synthetic.gguf"
            name = f"{shape} {quant}"
            if check.part(["models", name, "file"], synthetic, check, shape, quant, path, args.data):
                measure_model(check, name, path, replays)
                path.unlink()
        check.measure(["exactness"], "benchmarks", "exact", *(QUICK_EXACT if args.quick else ()))
        check.measure(["doctor"], "rest_local", "doctor", *check.layers)
    print(json.dumps(check.result))
    return 1 if check.result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
