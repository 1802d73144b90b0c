"""Write a player: a GGUF file of real size that writes recorded answers (`rest_local.bench.player`).

python -m benchmarks player VOCABULARY.gguf OUT.gguf [--size 0.5B] [--quant Q4_0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rest_local.bench.player import QUANTS, SIZES, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--quant", choices=QUANTS, default="Q4_0")
    args = parser.parse_args()
    width, layers = SIZES[args.size]
    write(args.vocabulary, args.path, width=width, layers=layers, quant=args.quant)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.0f} MB")
