"""The cost of HTTP: a real server process over loopback, compared with the engine's own time.

    python -m benchmarks server [--model GGUF] [--part first|overhead|protocols]...

- `first`: time to the first token on a prompt that is in the KV cache, less the forward passes.
- `overhead`: a stream of 300 tokens by HTTP, compared with the same request in an engine without a server and with one
  answer in one piece. The three are interleaved. The result has the medians over the rounds of the ratios within a
  round, the ratio of the fastest runs, which counts on a busy machine, and the processor time in milliseconds of the
  event loops of both processes: that which clients reach, and that of the model.
- `protocols`: the same stream by each protocol, compared with the time of its own forward passes, interleaved.

Drafting is off, so that every round does the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.library import begin_of, held_out_modules, standard_library
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.llama.options import Sampling

SLOTS = 8
N_CTX = 2048
STREAMED = 300
WAIT_SECONDS = 600
SAME: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "rest_local": {"policy": "off"}}


@dataclass
class Process:
    """A running server. `pid` is the process that clients reach. The first thread of a process is its event loop."""

    port: int
    pid: int = 0

    @property
    def pids(self) -> list[int]:
        """Return the ids of that process and of those of its models."""
        children = (each.read_text("ascii").split() for each in Path(f"/proc/{self.pid}/task").glob("*/children"))
        return [self.pid, *(int(child) for some in children for child in some)]

    def loop_ms(self) -> float:
        """Return the processor time of the event loops in milliseconds, or 0 if the system does not say."""
        times = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in self.pids]
        return sum(int(each.read_text("ascii").split()[0]) for each in times if each.exists()) / 1e6

    def forward_seconds(self) -> float:
        """Return the seconds that all requests so far spent on prompts and tokens, as `/metrics` counts them."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return sum(map(float, re.findall(r"(?m)^\S*:(?:prompt|tokens_predicted)_seconds_total\S* (\S+)$", text)))

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)

    def get(self, path: str) -> Any:
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            return json.load(connection.getresponse())


@contextlib.contextmanager
def serving(model: str | None, slots: int = SLOTS) -> Iterator[Process]:
    """Run the server in a separate process, as a user does, and stop it at the end."""
    command = [
        sys.executable,
        "-m",
        "rest_local",
        "serve",
        "--port",
        "0",
        "--slots",
        str(slots),
        "--ctx",
        str(N_CTX),
        "--metrics",
    ]
    command += ["--model", model] if model else []
    with tempfile.TemporaryFile() as log:
        unset = {"REST_LOCAL_CONFIG": os.devnull}  # The user's defaults would change the figures.
        process = subprocess.Popen(command, stderr=log, env=os.environ | unset)
        try:
            yield _ready(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _ready(process: subprocess.Popen[bytes], log: Any) -> Process:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        output = os.pread(log.fileno(), 1 << 16, 0).decode("utf-8", "replace")
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", output):
            server = Process(int(found[1]), process.pid)
            if server.get("/health") == {"status": "ok"}:
                return server
        time.sleep(0.1)
    raise SystemExit(f"the server did not start: {os.pread(log.fileno(), 1 << 16, 0).decode('utf-8', 'replace')}")


def post(connection: HTTPConnection, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    """Return (last JSON value, seconds to the first text, seconds to the end) of a request, streamed or not."""
    begun = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {answer.read(300)!r}")
    if not body.get("stream"):
        value = json.loads(answer.read())
        ended = time.perf_counter() - begun
        return value, ended, ended
    first, last = 0.0, b""
    while line := answer.readline():
        if line.startswith(b"data: {"):
            first, last = first or time.perf_counter() - begun, line
    return json.loads(last[len(b"data: ") :]), first, time.perf_counter() - begun


def first_token(server: Process, rounds: int) -> dict[str, Any]:
    """Measure the first token after a long prompt that is in the KV cache, in each round."""
    body = {"prompt": _texts(1, 4000)[0], "n_predict": 1, "stream": True, **SAME}
    over, waited = [], []
    with contextlib.closing(server.connect()) as connection:
        post(connection, "/completion", body)
        for _ in range(rounds):
            final, first, _ = post(connection, "/completion", body)
            waited.append(1e3 * first)
            over.append(1e3 * first - final["timings"]["prompt_ms"] - final["timings"]["predicted_ms"])
    return {
        "prompt_tokens": final["tokens_evaluated"],
        "evaluated": final["timings"]["prompt_n"],
        "first_ms": round(median(waited), 2),
        "over_forward_ms": round(median(over), 2),
        "over_forward_p90_ms": round(quantiles(over, n=10)[-1], 2),
        "target_ms": 10,
    }


def overhead(server: Process, model: str | None, rounds: int) -> dict[str, Any]:
    """Compare the same 300 tokens streamed, in one answer, and without HTTP."""
    text = _texts(1, 800)[0]
    body = {"prompt": text, "n_predict": STREAMED, **SAME}
    took: dict[str, list[float]] = {"engine": [], "whole": [], "stream": []}
    loop: dict[str, list[float]] = {"whole": [], "stream": []}
    within = []
    with (
        Engine.load(model, slots=SLOTS, n_ctx=N_CTX) as engine,
        Service(engine) as service,
        contextlib.closing(server.connect()) as connection,
    ):
        prompt = engine.tokenize(text)
        for number in range(rounds + 1):
            plain = _without_http(service, prompt)
            begun = server.loop_ms()
            _, _, whole = post(connection, "/completion", body)
            between = server.loop_ms()
            final, _, stream = post(connection, "/completion", body | {"stream": True})
            ended = server.loop_ms()
            if number == 0:
                continue  # The prompt was not in the KV cache.
            own = final["timings"]["prompt_ms"] + final["timings"]["predicted_ms"]
            within.append(1e3 * stream / own)
            for name, seconds in zip(took, (plain, whole, stream), strict=True):
                took[name].append(seconds)
            loop["whole"].append(between - begun)
            loop["stream"].append(ended - between)
    return {
        "tokens": STREAMED,
        **{f"{a}_to_{b}": _ratio(took[a], took[b]) for a, b in _COMPARED},
        "quickest": {f"{a}_to_{b}": round(min(took[a]) / min(took[b]), 4) for a, b in _COMPARED},
        "stream_to_its_own_forward": round(median(within), 4),
        "loop_ms": {name: round(median(values), 2) for name, values in loop.items()},
        "loop_ms_least": {name: round(min(values), 2) for name, values in loop.items()},
        "target": 1.02,
    }


_QUESTION = "Write the Python function `merge` that merges two sorted lists, with a docstring and tests."
_PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": _QUESTION}], "stream_options": {"include_usage": True}},
    ),
    "responses": ("/v1/responses", {"input": _QUESTION, "store": False}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": _QUESTION}]}),
}


def protocols(server: Process, rounds: int) -> dict[str, Any]:
    """Ask the same question by each protocol, greedily, and compare each stream with its own forward passes."""
    ratios: dict[str, list[float]] = {name: [] for name in _PROTOCOLS}
    loop: dict[str, list[float]] = {name: [] for name in _PROTOCOLS}
    tokens: dict[str, int] = {}
    with contextlib.closing(server.connect()) as connection:
        for number in range(rounds + 1):
            for name, (path, body) in _PROTOCOLS.items():
                limit = "max_output_tokens" if name == "responses" else "max_tokens"
                begun, own = server.loop_ms(), server.forward_seconds()
                wanted = {**SAME, **body, limit: STREAMED, "stream": True}
                tokens[name], seconds = _streamed(connection, path, wanted)
                spent, own = server.loop_ms() - begun, server.forward_seconds() - own
                if number:  # Before, the prompt was not in the KV cache.
                    ratios[name].append(seconds / own)
                    loop[name].append(spent)
    return {
        "tokens": tokens,
        "to_its_own_forward": {name: round(median(values), 4) for name, values in ratios.items()},
        "least": {name: round(min(values), 4) for name, values in ratios.items()},
        "loop_ms": {name: round(median(values), 2) for name, values in loop.items()},
        "target": 1.02,
    }


_COMPARED = (("stream", "engine"), ("stream", "whole"), ("whole", "engine"))


def _ratio(ones: list[float], others: list[float]) -> float:
    """Return the median over the rounds of the ratio within a round."""
    return round(median(one / other for one, other in zip(ones, others, strict=True)), 4)


def _streamed(connection: HTTPConnection, path: str, body: dict[str, Any]) -> tuple[int, float]:
    """Return the tokens of a streamed answer, as its usage tells, and the seconds to its end."""
    begun = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    data = connection.getresponse().read()
    took = time.perf_counter() - begun
    return int(re.findall(rb'"(?:completion|output)_tokens": ?(\d+)', data)[-1]), took


def _without_http(service: Service, prompt: list[int], tokens: int = STREAMED) -> float:
    begun = time.perf_counter()
    request = Request(prompt, max_tokens=tokens, ignore_end=True, policy="off", sampling=Sampling(temperature=0.0))
    for _ in service.submit(request):
        pass
    return time.perf_counter() - begun


def _texts(n: int, characters: int) -> list[str]:
    """Return beginnings of modules that the demo model was not trained on."""
    library = standard_library()
    texts = [Path(library / name).read_text("utf-8") for name in held_out_modules() if (library / name).is_file()]
    return [begin_of(texts[i % len(texts)][40 * (i // len(texts)) :], characters) for i in range(n)]


PARTS = ("first", "overhead", "protocols")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF; default: the demo model")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of overhead; first takes four times as many")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with serving(args.model) as server:
        measure = {
            "first": lambda: first_token(server, 4 * args.rounds),
            "overhead": lambda: overhead(server, args.model, args.rounds),
            "protocols": lambda: protocols(server, args.rounds),
        }
        for name in args.part or PARTS:
            result[name] = measure[name]()
            if not args.json:
                print(f"{name}: {json.dumps(result[name])}", flush=True)
    print(json.dumps(result))
