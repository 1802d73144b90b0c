"""Many requests at once: throughput, the effect of a long prompt on running streams, a second turn, and leaks.

    python -m benchmarks many [--model GGUF] [--part throughput|stall|turn|soak]... [--requests N] [--json]

- `throughput`: eight prompts at once compared with one after another, plain and drafted, interleaved, median of three.
- `stall`: the longest wait for a token of running streams during the prefill of 4 000 tokens, compared with the time of
  one part of that prompt.
- `turn`: tokens evaluated for the second turn of a chat of 4 000 tokens.
- `soak`: short requests, sequential and concurrent, with the used cells and the resident memory after each tenth.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.library import begin_of, held_out_modules, standard_library
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service

AT_ONCE = 8
TOKENS = 200
CHARACTERS = 300  # About 100 tokens.
LONG = 4000


def throughput(model: str | None, rounds: int = 3) -> dict[str, Any]:
    """Return the total tokens per second of eight requests at once, relative to the same requests one after another."""
    result: dict[str, Any] = {"at_once": AT_ONCE, "tokens": TOKENS}
    with (
        Engine.load(model, slots=1, n_ctx=4096) as single,
        Engine.load(model, slots=AT_ONCE, n_ctx=4096) as many,
        Service(single) as one_by_one,
        Service(many) as together,
    ):
        prompts = [single.tokenize(text[-CHARACTERS:]) for text in _texts(AT_ONCE)]
        for policy in ("off", "auto"):
            speeds: dict[str, list[float]] = {"one_by_one": [], "together": []}
            for _ in range(rounds):
                for name, service in (("one_by_one", one_by_one), ("together", together)):
                    service.run(lambda engine: engine.decoder.forget())
                    speeds[name].append(_tokens_per_second(service, prompts, policy))
            medians = {name: round(median(values), 2) for name, values in speeds.items()}
            result[policy] = {**medians, "ratio": round(medians["together"] / medians["one_by_one"], 3)}
    return result


def stall(model: str | None, n_running: int = 3) -> dict[str, Any]:
    """Time between tokens of running streams, before and during the prefill of a long prompt."""
    with Engine.load(model, slots=n_running + 1, n_ctx=2 * LONG) as engine, Service(engine) as service:
        texts = _texts(n_running)
        times: list[list[float]] = [[] for _ in texts]
        streams = []
        for text, mine in zip(texts, times, strict=True):
            request = Request(engine.tokenize(text), max_tokens=900, ignore_end=True, policy="off")
            streams.append(service.submit(request, lambda ended, mine=mine: mine.append(time.perf_counter())))  # type: ignore[misc]
        while min(len(mine) for mine in times) < 50:
            time.sleep(0.01)
        begun = time.perf_counter()
        long = service.submit(Request(_long_prompt(engine), max_tokens=1, policy="off", progress=True))
        elapsed = [piece.progress.elapsed_ms for piece in long if piece.progress]
        ended = time.perf_counter()
        for stream in streams:
            stream.cancel()
    gaps = [np.diff([t for t in mine if begun <= t <= ended]) for mine in times]
    before = [np.diff([t for t in mine if t < begun]) for mine in times]
    worst = max(float(gap.max()) for gap in gaps)
    part = 1e-3 * float(np.median(np.diff(elapsed)[-len(elapsed) // 2 :]))
    return {
        "prompt_tokens": LONG,
        "step_ms_before": round(1e3 * float(np.median(np.concatenate(before))), 2),
        "step_ms_beside": round(1e3 * float(np.median(np.concatenate(gaps))), 2),
        "worst_ms": round(1e3 * worst, 2),
        "part_ms": round(1e3 * part, 2),
        "worst_in_parts": round(worst / part, 3),
        "prompt_s": round(ended - begun, 2),
    }


def second_turn(model: str | None) -> dict[str, Any]:
    """Return the tokens evaluated in the first and in the second turn of a long chat."""
    with Engine.load(model, slots=2, n_ctx=2 * LONG) as engine, Service(engine) as service:
        first = _long_prompt(engine)
        answer = service.submit(Request(first, max_tokens=40)).wait()
        new = engine.tokenize("\n\ndef another(") + first[:20]
        second = service.submit(Request([*first, *answer.tokens, *new], max_tokens=1)).wait()
    return {
        "first_prompt": len(first),
        "first_evaluated": answer.timings.prompt_tokens,
        "new_tokens": len(new),
        "second_evaluated": second.timings.prompt_tokens,
        "second_cached": second.timings.cached_tokens,
    }


def soak(model: str | None, requests: int = 10_000) -> dict[str, Any]:
    """Return the used cells and resident memory after each tenth of the requests, some of them cancelled or refused."""
    rows = []
    with Engine.load(model, slots=4, n_ctx=2048) as engine, Service(engine, queue=64) as service:
        prompts = [engine.tokenize(text)[:60] for text in _texts(20)]
        for number in range(requests):
            request = Request(prompts[number % 20], max_tokens=4)
            streams = [service.submit(request)] if number % 4 else [service.submit(request) for _ in range(4)]
            if number % 10 == 0:
                streams[0].cancel()
            for stream in streams:
                stream.wait(60)
            if (number + 1) % max(requests // 10, 1) == 0:
                gc.collect()
                service.run(lambda engine: engine.decoder.forget())
                cells = sum(slot.n_past for slot in engine.decoder.slots)
                rows.append({"requests": number + 1, "cells": cells, "rss_mb": round(_resident_mb(), 2)})
    return {"rows": rows, "growth": round(rows[-1]["rss_mb"] / rows[0]["rss_mb"], 4)}


def _tokens_per_second(service: Service, prompts: Sequence[list[int]], policy: str) -> float:
    begun = time.perf_counter()
    streams = [service.submit(Request(prompt, max_tokens=TOKENS, ignore_end=True, policy=policy)) for prompt in prompts]
    tokens = sum(len(stream.wait().tokens) for stream in streams)
    return tokens / (time.perf_counter() - begun)


def _texts(n: int) -> list[str]:
    """Return beginnings of modules that the demo model was not trained on."""
    library = standard_library()
    texts = [(library / name).read_text("utf-8") for name in held_out_modules() if (library / name).is_file()]
    return [begin_of(texts[i % len(texts)], 300 + 40 * (i // len(texts)))[-800:] for i in range(n)]


def _long_prompt(engine: Engine) -> list[int]:
    """Return LONG tokens of real text."""
    text = "\n".join(_texts(30) * 20)
    return engine.tokenize(text)[:LONG]


def _resident_mb() -> float:
    """Return the resident memory of this process, or 0 if the system does not report it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


PARTS = {"throughput": throughput, "stall": stall, "turn": second_turn, "soak": soak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF; default: the demo model")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests of the soak")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for name in args.part or PARTS:
        result[name] = soak(args.model, args.requests) if name == "soak" else PARTS[name](args.model)
        if not args.json:
            print(f"{name}: {json.dumps(result[name])}", flush=True)
    print(json.dumps(result))
