"""Whole sessions of a recorded agent on the clocks of measured machines: prompts and decoding together.

    python -m benchmarks session_times [--data FOLDER] [--limit N] [--curve NAME]...

Each turn evaluates what its prompt adds to the turn before, and writes the recorded answer by `auto`, by the rule of
ngram-mod, or plainly. A token of a prompt costs what one in the largest batch of a curve costs. That is too much on a
GPU, so the speed-ups of sessions are lower bounds. Lookups of `auto` count with `replay.LOOKUP_MS` each.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.curves import load_curve
from benchmarks.peers import NgramMod
from benchmarks.published import SETS
from benchmarks.recorded import Recorded, open_workload
from benchmarks.replay import Tally, replay
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.calibration.tuning import shipped
from rest_local.llama.model import Model
from rest_local.llama.placeholders import common_prefix
from rest_local.planning.auto import Auto


def _by_peer(recorded: Sequence[Recorded], curve: CostCurve) -> Tally:
    peer = NgramMod()
    return replay(recorded, lambda: peer, peer, curve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("REST_LOCAL_SHARED"))
    parser.add_argument("--limit", type=int, metavar="N", help="turns")
    parser.add_argument("--curve", action="append", metavar="NAME", help="default: all that are shipped")
    args = parser.parse_args()
    file, vocabulary = SETS["agents"]
    with (
        Model.open(args.data / vocabulary, vocab_only=True) as model,
        open_workload(model.vocabulary, files=[args.data / file], limit=args.limit) as workload,
    ):
        new, text = 0, list[int]()
        for turn in workload.tested:
            new += len(turn.prompt) - common_prefix(turn.prompt, text)
            text = [*turn.prompt, *turn.answer]
        found: dict[str, dict[str, float]] = {}
        for name in args.curve or shipped():
            curve = load_curve(name)
            ours = replay(workload.tested, workload.sources, Auto(curve.copy()), curve)
            theirs = _by_peer(workload.tested, curve)
            prompts, plain = new * float(curve.expected(512)[LARGEST - 1]) / LARGEST, ours.plain_ms
            times = {"auto": ours.drafted_ms + ours.looked_ms, "ngram-mod": theirs.drafted_ms}
            row = {"prompts": prompts / (prompts + plain)}
            for side, ms in times.items():
                row |= {f"{side} decoding": plain / ms, f"{side} session": (prompts + plain) / (prompts + ms)}
            found[name] = {key: round(value, 3) for key, value in row.items()}
            print(name, found[name], flush=True)
    print(json.dumps({"turns": len(workload.tested), "new_tokens": new, "curves": found}))


if __name__ == "__main__":
    main()
