"""Writes a synthetic model (random weights, real shape) for timing: `python models/synthetic.py 0.5B Q4_0 OUT.gguf`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.synthetic import QUANTS, SHAPES, synthetic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("quant", choices=QUANTS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--vocab", type=Path, help="a GGUF whose vocabulary is copied; else bytes and padding")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    synthetic(given.shape, given.quant, given.path, vocab=given.vocab, seed=given.seed)
    print(f"{given.path}: {given.path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
