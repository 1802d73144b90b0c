"""A race of whole programs with a real model: llama-server and `rest-local serve` answer the same requests over HTTP.

    python -m benchmarks race --model GGUF --llama-server PATH [--data FOLDER] [--prompts 10] [--json FILE]
        [--workloads NAME,...] [--sides NAME,...] [-- ARGUMENT...]

- `benchmarks.race_prompts` says what the workloads are. All requests are greedy and streamed.
- Sides are named by their options: llama-server as it comes, `-fa off`, and each n-gram type; `rest-local serve` as it
  comes, with drafting off, exact (with and without drafts), and with the standard library as datastore (`-d`).
- For each workload all sides are started once, as a user does who has just installed them: each has an empty home. They
  answer every prompt in turn, in another order each time. Those that wait are stopped (SIGSTOP), because rest-local
  measures batches in idle time and would take processors from the one that runs. So it learns only while it answers.
- Where this is permitted, servers and this program run in real time (`chrt -r`), ahead of all other programs, so that
  two rounds differ by a few per cent. `--neighbour` runs one busy process, and leaves priorities as they are.
- Times are this program's: the first text, and the end of the answer. How much processor time other programs and the
  host took is reported for each workload.

`python -m benchmarks race_report FILE...` makes the tables of several races, and writes them into the documents.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from benchmarks import race_report
from benchmarks.program import Binary, Server, ServerFailed
from benchmarks.race_prompts import NEED_TEMPLATE, WORKLOADS, Prompt, prompts
from rest_local.llama.gguf import read_gguf

START_SECONDS, ANSWER_SECONDS = 300.0, 600.0
# After an answer a server puts it into its caches and history. A user who reads leaves it the time.
SETTLE_SECONDS = 0.1
REAL_TIME = 5  # The priority of the servers. This program is above them, because it takes the times.


@dataclass(frozen=True)
class Run:
    """One answer. Seconds count from the request.

    `evaluated` tokens of the prompt were not cached, by the server's own account. `answer` is the hash of the text, and
    `repeats` its likeness to what the prompt expects.
    """

    workload: str
    prompt: str
    side: str
    prompt_tokens: int
    tokens: int
    first: float
    seconds: float
    answer: str
    repeats: float | None = None
    evaluated: int = 0


def commands(model: Path, binary: Binary | None, store: Path, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the command of every side by its name. `arguments` are added to all."""
    common = ["-m", str(model), *arguments]
    found: dict[str, list[str]] = {}
    if binary is not None:
        kinds = [["--spec-type", kind] for kind in binary.kinds if kind.startswith("ngram")]
        for words in ([], ["-fa", "off"], *kinds):
            found[" ".join(["llama-server", *words]).replace("llama-server --spec-type ", "")] = [
                binary.path, *common, *words
            ]  # fmt: skip
    off = ["--policy", "off"]
    for words in ([], off, ["--exact"], ["--exact", *off], ["-d", str(store)]):
        name = " ".join(["rest-local", *("-d" if word == "-d" else word for word in words if word != str(store))])
        found[name] = [sys.executable, "-m", "rest_local", "serve", *common, *words]
    return found


def answered(server: Server, workload: str, side: str, prompt: Prompt) -> tuple[Run, str]:
    """Ask and read the whole answer, and return its text too. Raises ServerFailed."""
    options = {"stream_options": {"include_usage": True}}
    if prompt.before:
        for _ in server.stream(prompt.path, prompt.before | options, ANSWER_SECONDS):
            pass
    texts: list[str] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    first = last = 0.0
    for last, event in server.stream(prompt.path, prompt.body | options, ANSWER_SECONDS):
        if "error" in event:
            raise ServerFailed(f"answers {event['error']}")
        for choice in event.get("choices", ()):
            if text := choice.get("text") or choice.get("delta", {}).get("content"):
                first = first or last
                texts.append(text)
        usage, timings = event.get("usage") or usage, event.get("timings") or timings
    if not texts:
        raise ServerFailed(f"answers nothing to {prompt.name}")
    text = "".join(texts)
    expected = prompt.expected[: len(text)]
    repeats = round(SequenceMatcher(None, expected, text, autojunk=False).ratio(), 3) if expected else None
    counts, times = (usage["prompt_tokens"], usage["completion_tokens"]), (round(first, 5), round(last, 5))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Run(workload, prompt.name, side, *counts, *times, digest, repeats, timings.get("prompt_n", 0)), text


def race(
    found: dict[str, Any], workload: str, asked: Sequence[Prompt], sides: dict[str, list[str]], folder: Path
) -> None:
    """Start all sides, let them answer every prompt, and add the runs to `found`. A side that fails is left out from
    then on, and `found["failed"]` says why.
    """

    def fail(side: str, error: ServerFailed) -> None:
        found["failed"][f"{workload}: {side}"] = str(error)
        racers.pop(side).close()
        tell(f"{workload}: {side} is left out: {error}")

    racers: dict[str, Server] = {}
    with watched() as load, contextlib.ExitStack() as stack:
        for number, (side, command) in enumerate(sides.items()):
            home = folder / f"{workload} {number}"
            home.mkdir()
            racers[side] = stack.enter_context(Server(command, home))
            try:
                racers[side].start(START_SECONDS)
                racers[side].pause()
            except ServerFailed as error:
                fail(side, error)
        for prompt in asked:
            for side in random.Random(prompt.name).sample(list(racers), len(racers)):
                racers[side].resume()
                try:
                    run, text = answered(racers[side], workload, side, prompt)
                except ServerFailed as error:
                    fail(side, error)
                    continue
                time.sleep(SETTLE_SECONDS)
                racers[side].pause()
                found["runs"].append(asdict(run))
                found["answers"][run.answer] = text
            tell(f"{workload} {prompt.name}: {speeds(found['runs'][-len(racers) :])}")
    found["loads"][workload] = load


def speeds(runs: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{run['side']} {run['tokens'] / run['seconds']:.1f}" for run in runs) + " tokens/s"


def real_time() -> list[str]:
    """Put this process ahead of all others, and return the words that put a program right behind it. None where this is
    not permitted.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME + 1))
    except (AttributeError, PermissionError):  # This is not Linux, or not root.
        return []
    return ["chrt", "-r", f"{REAL_TIME}"]


@contextlib.contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Measure which shares of all processors other programs and the host took while the body ran programs and ended
    them. Nothing where the system does not say.
    """
    found: dict[str, float] = {}
    (busy, stolen, total), own = _processors(), _own_seconds()
    yield found
    (busy_now, stolen_now, total_now), own_now = _processors(), _own_seconds()
    if all_time := total_now - total:
        found["others"] = round(max(0.0, busy_now - busy - (own_now - own)) / all_time, 4)
        found["host"] = round((stolen_now - stolen) / all_time, 4)


def _processors() -> tuple[float, float, float]:
    """Return the seconds of all processors: busy, taken by the host, and all. Unknown ones are zero."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0, 0.0, 0.0
    seconds = [int(text) / os.sysconf("SC_CLK_TCK") for text in path.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(seconds) - seconds[3] - seconds[4] - seconds[7], seconds[7], sum(seconds)


def _own_seconds() -> float:
    """Return the processor time of this process and of those that it waited for."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores, {name}"


def _chosen(given: str, known: Sequence[str], what: str) -> list[str]:
    """Return the names in an option's value, or all. Raises ValueError."""
    names = [name.strip() for name in given.split(",") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF")
    parser.add_argument("--llama-server", metavar="PATH", help="without it only rest-local runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("REST_LOCAL_SHARED"), help="recorded questions")
    parser.add_argument("--prompts", type=int, default=10, help="of each workload (default: 10)")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer at most (default: 200)")
    parser.add_argument("--workloads", default="", help="names, separated by commas; default: all it can do")
    parser.add_argument("--sides", default="", help="names, separated by commas; default: all")
    parser.add_argument("--datastore", type=Path, help="the standard library; built where it is missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the runs and answers")
    parser.add_argument("--neighbour", action="store_true", help="run a busy process as well")
    parser.add_argument("arguments", nargs="*", help="for all servers, after --, such as -c 4096")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = args.datastore or folder / "datastore"
        try:
            binary = Binary.of(args.llama_server) if args.llama_server else None
            has_template = _has_template(args.model) or "--chat-template-file" in args.arguments
            able = [name for name in WORKLOADS if name not in NEED_TEMPLATE or has_template]
            workloads = _chosen(args.workloads, able, "workload")
            every = commands(args.model, binary, store, args.arguments)
            sides = _chosen(args.sides, list(every), "side")
            asked = {name: prompts(name, args.prompts, args.tokens, args.data) for name in workloads}
        except (ServerFailed, ValueError, OSError) as error:
            parser.error(str(error))
        if "rest-local -d" in sides and not store.exists():
            build = [sys.executable, "-m", "rest_local", "index", "build", "-m", str(args.model), "-o", str(store)]
            left_out = ("test/", "tests/", "testing/", "idle_test/", "site-packages/", "dist-packages/")
            filters = ["--include", "*.py", *(part for name in left_out for part in ("--exclude", name))]
            library = sysconfig.get_paths()["stdlib"]
            subprocess.run([*build, *filters, library], check=True, stdout=sys.stderr)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `with` then ends the servers.
        ahead = [] if args.neighbour else real_time()
        if args.neighbour:
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        found: dict[str, Any] = {
            "model": args.model.stem, "llama_server": binary and binary.version, "machine": _processor(),
            "revision": _revision(), "real_time": bool(ahead), "neighbour": args.neighbour,
            "arguments": args.arguments, "loads": {}, "failed": {}, "runs": [], "answers": {},
        }  # fmt: skip
        for workload in workloads:
            race(found, workload, asked[workload], {side: [*ahead, *every[side]] for side in sides}, folder)
            if args.json:
                args.json.write_text(json.dumps(found, indent=0) + "\n")
    print("\n".join(race_report.lines(found)))


def _has_template(model: Path) -> bool:
    return "tokenizer.chat_template" in read_gguf(model).values


if __name__ == "__main__":
    main()
