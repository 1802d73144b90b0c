"""Cost curves of candidate shapes with random weights, to choose the shape of the demo model.

    python models/cost.py [--threads N] [--rounds 30] [--context 256]

The time of a decode depends on shapes and quantization, not on the values of the weights. Each candidate is written to
a temporary folder (vocabulary 4 096, tied, heads of 64, two of them for keys and values, feed-forward twice the width,
like the demo model). Decodes of 1 to 32 tokens after `--context` others are timed in interleaved rounds; the median
counts. A candidate is good if a plain step is fast and 16 tokens cost few plain steps.

It prints a table, then one line of JSON. It takes about half a minute on 2 cores; nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.synthetic import Shape, synthetic
from rest_local.calibration.measuring import DecodeProbe
from rest_local.calibration.tuning import self_test_text
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

CANDIDATES = ((256, 8), (384, 6), (512, 3), (512, 4), (640, 3))  # width, layers
QUANTS = ("Q8_0", "Q4_0")
SIZES = (1, 2, 4, 8, 16, 32)
VOCABULARY = 4096


def shape_of(width: int, layers: int) -> Shape:
    """A candidate in the proportions of the demo model."""
    return Shape(layers, width, heads=width // 64, kv_heads=2, feed=2 * width, vocab=VOCABULARY, tied=True)


def measure(path: Path, *, threads: int, rounds: int, n_ctx: int) -> dict[str, Any]:
    """The medians over `rounds` decodes of each of SIZES tokens after `n_ctx` others, without flash attention."""
    settings = ContextSettings(n_ctx=n_ctx + 2 * max(SIZES), n_branches=1, threads=threads)
    with Model.open(path) as model, Context(model, settings) as context:
        probe = DecodeProbe(context, self_test_text(model, 512))
        samples: dict[int, list[float]] = {n: [] for n in SIZES}
        for i in range(rounds + 1):
            for n in SIZES:
                ms = probe(n, n_ctx).ms
                if i:  # the first round builds the graphs
                    samples[n].append(ms)
        median = {n: statistics.median(samples[n]) for n in SIZES}
        return {
            "parameters": model.n_params,
            "bytes": path.stat().st_size,
            "threads": context.threads,
            "t1_ms": round(median[1], 4),
            "ratio": {n: round(median[n] / median[1], 3) for n in SIZES[1:]},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="default: all cores")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=256, help="tokens in the KV cache before each decode")
    args = parser.parse_args()
    if args.rounds < 1 or args.context < 1:
        parser.error("--rounds and --context are at least 1")
    head = "".join(f"{f't({n})/t(1)':>12}" for n in SIZES[1:])
    print(f"{'width x layers':16}{'quant':6}{'M params':>9}{'MB':>7}{'t(1) ms':>9}{head}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REST_LOCAL_CACHE"] = folder  # these files are used once
        for width, layers in CANDIDATES:
            for quant in QUANTS:
                path = synthetic(shape_of(width, layers), quant, Path(folder) / f"{width}x{layers}-{quant}.gguf")
                row = measure(path, threads=args.threads, rounds=args.rounds, n_ctx=args.context)
                ratios = "".join(f"{ratio:12.2f}" for ratio in row["ratio"].values())
                size = f"{row['parameters'] / 1e6:9.1f}{row['bytes'] / 1e6:7.1f}{row['t1_ms']:9.3f}"
                print(f"{f'{width} x {layers}':16}{quant:6}{size}{ratios}", flush=True)
                rows.append({"width": width, "layers": layers, "quant": quant, **row})
    print(json.dumps({"context": args.context, "rounds": args.rounds, "candidates": rows}))


if __name__ == "__main__":
    main()
