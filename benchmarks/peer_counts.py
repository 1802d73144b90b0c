"""What llama.cpp's n-gram types draft, counted by the program itself and by the rules of this project.

    python -m benchmarks peer_counts FILE --server LLAMA_SERVER --target GGUF

It completes prompts greedily, each with every type in a server of its own, and writes the prompts and answers as
tokens, with the counts of the server's `timings`. Then it goes through the same answers with the rules of
`benchmarks.peers` and `benchmarks.ngram_peers`. A test compares both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ngram_peers import NgramCache, NgramMapK, NgramMapK4v
from benchmarks.peers import NgramMod, NgramSimple, Peer, chain
from benchmarks.program import Binary, Server
from benchmarks.workloads import prompts
from rest_local.drafting.tree import Draft
from rest_local.llama.model import Model
from rest_local.planning.policy import StepCost

RULES: tuple[type[Peer], ...] = (NgramSimple, NgramMapK, NgramMapK4v, NgramMod, NgramCache)
PROMPTS = ("copy", "unseen", "edit")
PROMPTS_OF_EACH = 3
TOKENS = 200
N_CTX = 2048
SECONDS = 600.0  # A start or an answer may take so long.


@dataclass(frozen=True)
class Counts:
    """The counts of one answer: forward passes after the first token, drafted and accepted tokens."""

    steps: int
    drafted: int
    accepted: int


def counts_of(peer: Peer, prompt: Sequence[int], answer: Sequence[int], most: int) -> Counts:
    """Go through an answer with a rule. `most`: tokens that were asked for; a draft does not exceed them."""
    steps = drafted = accepted = 0
    peer.restart(prompt)
    peer.extend(answer[:1])
    at = 1
    while at < len(answer):
        limit = most - at - 1
        tree = peer.propose(limit) if limit > 0 else chain([])
        right = 0
        for token, next_token in zip(tree.token, answer[at:], strict=False):
            if token != next_token:
                break
            right += 1
        new = answer[at : at + right + 1]
        peer.learn(Draft(tree), new, StepCost(0, len(tree), right, 0.0, 0.0))
        peer.extend(new)
        at += len(new)
        steps, drafted, accepted = steps + 1, drafted + len(tree), accepted + right
    return Counts(steps, drafted, accepted)


def record(path: Path, target: Path) -> dict[str, Any]:
    """Complete prompts with each of RULES that the binary has. Takes minutes. Raises ServerFailed."""
    binary = Binary.of(path)
    kinds = [rule.name for rule in RULES if rule.name in binary.kinds]
    command = [binary.path, "-m", str(target), "-c", str(N_CTX), "-np", "1", "-t", "1", "--flash-attn", "off"]
    answers: list[dict[str, Any]] = []
    for name, prompt in _prompts(target):
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        by_kind: dict[str, Any] = {}
        for kind in kinds:
            with Server([*command, "--spec-type", kind]) as server:
                server.start(SECONDS)
                answer, _ = server.post("/completion", body, SECONDS)
            timings, tokens = answer["timings"], answer["tokens"]
            drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            by_kind[kind] = {"counts": [max(len(tokens) - 1 - accepted, 0), drafted, accepted], "answer": tokens}
        # Answers have no end token, but it was drafted.
        if all(len(one["answer"]) == TOKENS for one in by_kind.values()):
            answers.append({"name": name, "prompt": prompt, "by_kind": by_kind})
    return {"version": binary.version, "tokens": TOKENS, "answers": answers}


def _prompts(target: Path) -> Iterator[tuple[str, list[int]]]:
    by_kind = {kind: [prompt for prompt in prompts() if prompt.kind == kind][:PROMPTS_OF_EACH] for kind in PROMPTS}
    with Model.open(target, vocab_only=True) as model:
        for kind in PROMPTS:
            for prompt in by_kind[kind]:
                yield f"{kind} {prompt.title}", model.vocabulary.tokenize(prompt.text).tolist()


def compare(recorded: dict[str, Any]) -> dict[str, list[tuple[str, Counts, Counts]]]:
    """Return, by type, the name of each answer, the counts of the program and those of the rule."""
    result: dict[str, list[tuple[str, Counts, Counts]]] = {}
    for rule in RULES:
        for one in recorded["answers"]:
            if found := one["by_kind"].get(rule.name):
                ours = counts_of(rule(), one["prompt"], found["answer"], recorded["tokens"])
                theirs = Counts(*found["counts"])
                result.setdefault(rule.name, []).append((one["name"], theirs, ours))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--server", type=Path, required=True, help="llama-server")
    parser.add_argument("--target", type=Path, required=True)
    args = parser.parse_args()
    recorded = record(args.server, args.target)
    args.file.write_text(json.dumps(recorded) + "\n", "ascii")
    for kind, rows in compare(recorded).items():
        print(kind, f"{sum(theirs == ours for _, theirs, ours in rows)} of {len(rows)} answers have the same counts")
