"""Whole programs, one after the other, that write the same recorded answers: a race by the clock.

    python -m benchmarks race --llama-server PATH --vocab GGUF --data FOLDER --json FILE [--work FOLDER]
        [--size 0.5B] [--rounds 5] [--minutes N] [--workloads NAME,...] [--sides NAME,...]

- The model is a player (`benchmarks.player`): every runtime writes the recorded text at the price of a real
  model.
- `benchmarks.race_texts` says what the workloads are.
- Sides: llama-server without drafts and with each of its n-gram types (`+`: drafts of 48 to 64 tokens, where that is
  not its default; `-fa off`: without flash attention, as rest-local computes on a CPU), llama-cpp-python's prompt
  lookup (10 tokens, and the 2 that it advises for CPUs), and `rest-local serve` with drafting off, with the request's
  text alone, and `stored`: with prediction, datastore and history.
- For each answer all sides start a new server, one after the other, in another order each time. It reads the prompt and
  then writes the answer, which is timed from the request to its last byte by this program's clock. No other one runs.
- What rest-local learns about the prices of batches is kept in `--work`, as a user's cache does. Before the race it
  writes one answer that does not count and is idle for two minutes, because it times large batches in idle time.
- A round has an answer of each workload. FILE keeps all runs, and a race with the same FILE goes on where it ended, so
  it can be run in parts. `--minutes` ends it between two answers. `--work` keeps the player for the next part.
- A run does not count if other programs or the host take more than 5% of the processors.

`python -m benchmarks race_report FILE` computes the results, and draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import player, race_report
from benchmarks.library import filters
from benchmarks.program import Binary, Server, ServerFailed
from benchmarks.race_texts import Task, Texts, named
from rest_local.bench.demo import standard_library
from rest_local.calibration import known
from rest_local.decoding.opening import open_history
from rest_local.llama.cores import default_threads
from rest_local.llama.model import Model
from rest_local.retrieval import build_datastore

START_SECONDS, ANSWER_SECONDS = 300.0, 600.0
IDLE_SECONDS = 120.0  # once for a race: an engine that has no request for a while times batches of up to 64 tokens
PLAIN, OFF, COLD, STORED = race_report.PLAIN, race_report.OFF, race_report.COLD, race_report.STORED
N_GRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
KEPT = ("tasks", "runs", "failed", "revisions", "rounds")  # of a file with earlier runs
LONG = {"n-min": 48, "n-max": 64, "size-m": 64}  # of --spec-TYPE-...; older versions: --draft-min and --draft-max


@dataclass(frozen=True)
class Side:
    """A program. `command` starts it; `stored`: with the texts that were written before."""

    name: str
    command: Sequence[str]
    stored: bool = False


def long_drafts(binary: Binary, kind: str) -> list[str]:
    """The options for drafts of 48 to 64 tokens by this version's help; none where they change nothing."""
    wanted = {f"--spec-{kind}-{name}": str(value) for name, value in LONG.items()}
    if not wanted.keys() & binary.options.keys():
        wanted = {"--draft-min": "48", "--draft-max": "64"}
    known = {name: value for name, value in wanted.items() if binary.options.get(name, value) != value}
    return [word for pair in known.items() for word in pair]


def sides(binary: Binary | None, model: Path, context: int, threads: int, arguments: Sequence[str]) -> Iterator[Side]:
    """Every side. `arguments`: of llama-server and rest-local."""
    common = ["-m", str(model), "-c", str(context), "-t", str(threads)]
    if binary is not None:
        command = [binary.path, *common, "-np", "1", *arguments]
        options: dict[str, list[str]] = {PLAIN: []}
        for kind in (kind for kind in N_GRAMS if kind in binary.kinds):
            options[kind] = ["--spec-type", kind]
            if longer := long_drafts(binary, kind):
                options[f"{kind}+"] = [*options[kind], *longer]
        for name, words in options.items():
            yield Side(name, [*command, *words])
            yield Side(f"{name} -fa off", [*command, *words, "-fa", "off"])
    lookup = [sys.executable, "-m", "benchmarks", "lookup_server", *common, "--tokens"]
    yield Side("prompt lookup", [*lookup, "10"])
    yield Side("prompt lookup 2", [*lookup, "2"])
    serve = [sys.executable, "-m", "rest_local", "serve", *common, "--slots", "1", "--no-code", "--sessions", "0"]
    serve += arguments
    yield Side(OFF, [*serve, "--no-history", "--policy", "off"])
    yield Side(COLD, [*serve, "--no-history"])
    yield Side(STORED, serve, stored=True)


def written(side: Side, task: Task, store: Path, idle: float = 0.0) -> float:
    """The seconds in which a new server writes the answer after it has read the prompt. Raises ServerFailed.

    `idle`: seconds without a request after that.
    """
    more, words = dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REST_LOCAL_DATA"] = folder
        if side.stored:
            if task.prediction:
                more = {"prediction": {"type": "content", "content": task.prediction}}
            if (store / "data").is_dir():
                shutil.copytree(store / "data", folder, dirs_exist_ok=True)
            if (store / "datastore").is_dir():
                words = ["-d", str(store / "datastore")]
        with Server([*side.command, *words]) as server:

            def complete(prompt: Sequence[int], count: int) -> tuple[dict[str, Any], float]:
                body = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True}
                return server.post("/completion", {**body, "cache_prompt": True, **more}, ANSWER_SECONDS)

            server.start(START_SECONDS)
            if task.before:
                complete(task.before[0], len(task.before[1]))
            complete(task.prompt, 1)
            found, seconds = complete(task.prompt, len(task.answer))
            time.sleep(idle)
    tokens = [int(token) for token in found.get("tokens", ())]
    if tokens[: len(task.answer)] != task.answer:
        same = next((i for i, (a, b) in enumerate(zip(tokens, task.answer, strict=False)) if a != b), len(tokens))
        raise ServerFailed(f"writes another text than the answer from token {same} of {task.name}")
    return seconds


@contextlib.contextmanager
def watched() -> Iterator[dict[str, float]]:
    """While the body runs its programs, the shares of all processors that others and the host took. Nothing where the
    system does not say.
    """
    found: dict[str, float] = {}
    (busy, stolen, total), own = _processors(), _own_seconds()
    yield found
    (busy_now, stolen_now, total_now), own_now = _processors(), _own_seconds()
    if all_time := total_now - total:
        found["others"] = round(max(0.0, busy_now - busy - (own_now - own)) / all_time, 4)
        found["host"] = round((stolen_now - stolen) / all_time, 4)


def _processors() -> tuple[float, float, float]:
    """Seconds of all processors: busy, taken by the host, all; zeros where the system does not say."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0, 0.0, 0.0
    seconds = [int(text) / os.sysconf("SC_CLK_TCK") for text in path.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(seconds) - seconds[3] - seconds[4] - seconds[7], seconds[7], sum(seconds)


def _own_seconds() -> float:
    """Processor time of this process and of those that it waited for."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def race(
    found: dict[str, Any], model: Path, tasks: Sequence[Task], racers: Sequence[Side], stores: Mapping[str, Path],
    limit: float, tell: Callable[[str], None], save: Callable[[], None],
) -> None:  # fmt: skip
    """Add runs to `found["runs"]` until every side has all rounds or `limit` seconds are over. A side that fails or
    writes another text is left out from then on; the reason is in `found["failed"]`.
    """
    runs, begun, longest = found["runs"], time.monotonic(), 0.0
    done = {(run["task"], run["round"], run["side"]) for run in runs}
    by_workload: dict[str, list[Task]] = {}
    for task in tasks:
        by_workload.setdefault(task.workload, []).append(task)
    for turn in range(found["rounds"]):
        for of_workload in by_workload.values():
            task, start = of_workload[turn % len(of_workload)], time.monotonic()
            able = [side for side in racers if side.name not in found["failed"]]
            missing = [side for side in able if (task.id, turn, side.name) not in done]
            if not missing:
                continue
            if start - begun + longest > limit:
                tell(f"ends after {(start - begun) / 60:.1f} minutes; the same command goes on")
                return
            player.play(model, *([task.before] if task.before else []), (task.prompt, task.answer))
            for side in random.Random(f"{task.id} {turn}").sample(missing, len(missing)):
                try:
                    with watched() as load:
                        seconds = round(written(side, task, stores[task.workload]), 5)
                except ServerFailed as error:
                    found["failed"][side.name] = str(error)
                    tell(f"{side.name} is left out: {error}")
                    continue
                runs.append({"task": task.id, "round": turn, "side": side.name, "seconds": seconds, **load})
                why = f" does not count: {race_report.why_not(runs[-1])}" if race_report.why_not(runs[-1]) else ""
                tell(f"{turn + 1} {task.id}: {side.name} {1000 * seconds / len(task.answer):.2f} ms a token{why}")
            save()
            longest = max(longest, time.monotonic() - start)


def prepared(work: Path, workload: str, texts: Texts, count: int, model: Path) -> tuple[list[Task], Path]:
    """The tasks of a workload, and the folder with its earlier texts. Both are kept in `work`."""
    folder = work / f"{workload} {texts.prompt} {texts.answer}"
    listed = folder / "tasks.json"
    if not listed.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tasks = texts.tasks(workload, count)
        if history := texts.history(workload):
            os.environ["REST_LOCAL_DATA"] = str(folder / "data")
            with Model.open(model) as opened:
                if kept := open_history(opened):
                    for answer in history:
                        kept.add(answer)
                    kept.close()
        if workload == "code":
            include, exclude = filters()
            store, library = folder / "datastore", [standard_library()]
            build_datastore(store, library, vocabulary=texts.vocabulary, include=include, exclude=exclude)
        listed.write_text(json.dumps([asdict(task) for task in tasks]))
    return [Task(**each) for each in json.loads(listed.read_text())][:count], folder


def _revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores, {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="PATH", help="without it only the other sides run")
    parser.add_argument("--vocab", type=Path, required=True, help="a GGUF with the vocabulary")
    parser.add_argument("--data", type=Path, default=os.environ.get("REST_LOCAL_SHARED"), help="recorded answers")
    parser.add_argument("--git", type=Path, default=Path(__file__).parents[1], help="repository whose edits are used")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results; goes on with what is there")
    parser.add_argument("--work", type=Path, help="folder for the player and the texts; default: a temporary one")
    parser.add_argument("--size", choices=player.SIZES, default="0.5B", help="of the player")
    parser.add_argument("--quant", choices=player.QUANTS, default="Q4_0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", type=int, default=5, help="of each workload, one in each round")
    parser.add_argument("--prompt", type=int, default=600, help="tokens at most")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--minutes", type=float, default=1e9, help="at most")
    parser.add_argument("--workloads", default="", help="beginnings of names, separated by commas; default: all")
    parser.add_argument("--sides", default="", help="names, separated by commas; default: all but `-fa off`")
    parser.add_argument("arguments", nargs="*", help="for llama-server and rest-local, after --, such as -ngl 99")
    args = parser.parse_args()

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def save() -> None:
        args.json.write_text(json.dumps(found) + "\n")

    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        width, layers = player.SIZES[args.size]
        model = work / f"player-{args.size}-{args.quant}.gguf"
        try:
            binary = Binary.of(args.llama_server) if args.llama_server else None
            chosen = named(list(filter(None, args.workloads.split(","))))
            racers = list(sides(binary, model, width, args.threads, args.arguments))
            usual = [side.name for side in racers if not side.name.endswith("-fa off")]
            only = list(filter(None, args.sides.split(","))) or usual
            if unknown := set(only) - {side.name for side in racers}:
                raise ValueError(f"no such side: {', '.join(unknown)}; there are {', '.join(s.name for s in racers)}")
        except (ServerFailed, ValueError) as error:
            parser.error(str(error))
        for name, place in {"CACHE": "cache", "CONFIG": "none.toml"}.items():
            os.environ[f"REST_LOCAL_{name}"] = str(work / place)
        work.mkdir(parents=True, exist_ok=True)
        if not model.exists():
            part = model.with_suffix(".part")
            player.write(args.vocab, part, width=width, layers=layers, quant=args.quant).rename(model)
        found: dict[str, Any] = {
            "player": f"{args.size} {args.quant}", "llama_server": binary.version if binary else None,
            "machine": _processor(), "threads": args.threads, "arguments": args.arguments, "rounds": args.rounds,
        }  # fmt: skip
        tasks: list[Task] = []
        stores: dict[str, Path] = {}
        with Model.open(args.vocab, vocab_only=True) as opened:
            texts = Texts(opened.vocabulary, args.git, args.data, args.prompt, args.tokens)
            for workload in chosen:
                try:
                    of_it, stores[workload] = prepared(work, workload, texts, args.answers, model)
                    tasks += of_it
                except (FileNotFoundError, ValueError) as error:
                    tell(f"{workload}: left out, {error}")
        found |= {"tasks": {}, "runs": [], "failed": {}, "revisions": []}
        if args.json.exists():
            earlier = json.loads(args.json.read_text())
            if differing := [key for key in found if key not in KEPT and earlier[key] != found[key]]:
                parser.error(f"{args.json} is of another race ({', '.join(differing)}); name another file")
            found |= {key: earlier[key] for key in ("tasks", "runs", "revisions")}
        for task in tasks:
            found["tasks"][task.id] = {
                "workload": task.workload, "prompt": len(task.prompt), "tokens": len(task.answer)
            }  # fmt: skip
        if (revision := _revision()) not in found["revisions"]:
            found["revisions"].append(revision)
        if not (work / "cache" / known.FOLDER).exists() and tasks:
            tell(f"an answer that does not count, and {IDLE_SECONDS:.0f} s in which rest-local times batches")
            player.play(model, *([tasks[0].before] if tasks[0].before else []), (tasks[0].prompt, tasks[0].answer))
            with contextlib.suppress(ServerFailed):  # the race says it again
                written(next(side for side in racers if side.name == COLD), tasks[0], work, IDLE_SECONDS)
        limit = 60 * args.minutes - (time.monotonic() - begun)
        race(found, model, tasks, [side for side in racers if side.name in only], stores, limit, tell, save)
        save()
    print("\n".join(race_report.lines(found)))
