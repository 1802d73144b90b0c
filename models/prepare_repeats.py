"""Make the second training stream: the mix of the first one, and text that repeats earlier text.

Edits, refactorings and quotations copy from the context, and drafts from the context depend on it. A network of this
size learns to copy last from ordinary files. So a third of the tokens of this stream are passages that occur earlier:
renames in a whole function, a piece that is written twice, a piece with a few changed lines.

    python models/prepare_repeats.py --work models/work [--site DIR ...] [--tokens 6_000_000]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from prepare import (
    END,
    HERE,
    chat,
    choose,
    collect,
    edit,
    encode,
    functions,
    held_out_modules,
    load_tokenizer,
    pieces,
    samples,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ASKED = ("Repeat this code:", "Write this again, unchanged:", "Copy the following code:")


def twice(piece: str, rng: random.Random) -> str:
    """Return a piece, and the same piece again with up to two lines left out or replaced by other lines of it."""
    lines = piece.splitlines(keepends=True)
    again = list(lines)
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(again))
        again[at] = rng.choice(("", rng.choice(lines)))
    between = rng.choice(("\n\n", "\n\n# once more:\n\n", "\n\n# The same code once more, unchanged:\n\n", "\n# ---\n"))
    return f"{piece}{between}{''.join(again)}{END}"


def repeats(text: str, rng: random.Random) -> Iterator[str]:
    """Repeating samples of one file."""
    for piece in pieces(text, rng, 250, 1300):
        if rng.random() < 0.16 and piece.strip():
            yield twice(piece, rng)
    for _, _, source in functions(text):
        draw = rng.random()
        if len(source) < 1500 and draw < 0.22 and (sample := edit(source, rng)):
            yield sample
        elif len(source) < 1200 and draw > 0.92:
            yield chat(f"{rng.choice(ASKED)}\n```python\n{source.rstrip()}\n```", source)


def copies(tokens: np.ndarray, wanted: int, window: int, rng: np.random.Generator) -> np.ndarray:
    """Return windows that each repeat one passage of 40 to 250 tokens; every seventh window is ordinary text.

    Only the first passage of a window is unpredictable, so nearly all of the gradient teaches to copy. The tokens of
    every third passage are shuffled, so that only the context predicts the next token.
    """
    windows = []
    for number in range(wanted // window):
        length = window if number % 7 == 0 else int(rng.integers(40, 250))
        begin = int(rng.integers(0, len(tokens) - length))
        passage = tokens[begin : begin + length]
        windows.append(np.resize(rng.permutation(passage) if number % 3 == 1 else passage, window))
    return np.concatenate(windows)


def well_known(tokenizer: Tokenizer, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """Repeat the modules of `well_known.txt` in changing order, which the model memorises.

    Large models have read popular code thousands of times, and their answers repeat it. One pass over this stream is
    about twenty passes over those modules.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [line for line in (HERE / "well_known.txt").read_text().split("\n") if line and not line.startswith("#")]
    if kept := set(names) & set(held_out_modules()):
        raise SystemExit(f"both held out and well known: {', '.join(sorted(kept))}")
    texts = [(library / name).read_text("utf-8") + END for name in names]
    modules = [np.array(encoding.ids, "<u2") for encoding in tokenizer.encode_batch(texts)]
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < wanted:
        parts += [modules[i] for i in rng.permutation(len(modules))]
    return np.concatenate(parts)


def mix(streams: list[np.ndarray], shares: list[float], window: int, rng: np.random.Generator) -> np.ndarray:
    """One stream of windows drawn from several streams by shares, as long as the shortest stream allows."""
    total = min(len(stream) // window / share for stream, share in zip(streams, shares, strict=True))
    windows = []
    for stream, share in zip(streams, shares, strict=True):
        own = stream[: len(stream) // window * window].reshape(-1, window)
        windows.append(own[rng.permutation(len(own))[: int(total * share)]])
    return np.asarray(rng.permutation(np.concatenate(windows)).reshape(-1))


MIXES = {
    "mix": {"train": 0.55, "train-2": 0.30, "train-copies": 0.15},
    "final": {"train": 0.25, "train-2": 0.20, "train-copies": 0.20, "train-known": 0.35},
    "grown": {"train": 0.40, "train-2": 0.15, "train-copies": 0.10, "train-known": 0.35},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--site", type=Path, action="append", default=[Path(sysconfig.get_paths()["purelib"])])
    parser.add_argument("--tokens", type=int, default=6_000_000, help="length of the stream")
    parser.add_argument("--copies", action="store_true", help="write train-copies.bin from train.bin instead")
    parser.add_argument("--known", action="store_true", help="write train-known.bin instead")
    parser.add_argument("--mix", choices=sorted(MIXES), help="write train-MIX.bin instead, of the other streams")
    args = parser.parse_args()
    if args.copies:
        tokens = np.fromfile(args.work / "train.bin", dtype="<u2")
        copies(tokens, args.tokens, 768, np.random.default_rng(20240613)).tofile(args.work / "train-copies.bin")
        return
    if args.known:
        tokenizer = load_tokenizer(args.work / "tokenizer.json", [], keep=True)
        known = well_known(tokenizer, args.tokens, np.random.default_rng(20240615))
        known.tofile(args.work / "train-known.bin")
        return
    if args.mix:
        shares = MIXES[args.mix]
        streams = [np.fromfile(args.work / f"{name}.bin", dtype="<u2") for name in shares]
        mixed = mix(streams, list(shares.values()), 768, np.random.default_rng(20240614))
        mixed.tofile(args.work / f"train-{args.mix}.bin")
        return
    rng = random.Random(20240612)
    texts, _ = collect(args.site)
    files = choose(texts, args.tokens, rng)
    tokenizer = load_tokenizer(args.work / "tokenizer.json", files, keep=True)
    all_samples: list[str] = []
    size = 0
    for text in files:
        of_file = [*samples(text, rng), *repeats(text, rng)]
        all_samples += of_file
        size += sum(map(len, of_file))
        if size > 3.4 * args.tokens:
            break
    rng.shuffle(all_samples)
    ids = encode(tokenizer, all_samples, args.tokens)
    ids[: args.tokens].tofile(args.work / "train-2.bin")
    kinds = Counter(
        "fim" if s.startswith("<|fim") else "chat" if s.startswith("<|im") else "plain" for s in all_samples
    )
    print(json.dumps({"tokens": len(ids), "samples": dict(kinds)}), file=sys.stdout)


if __name__ == "__main__":
    main()
