"""The peers' rules match hand-computed cases and their published figures on recorded answers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ngram_peers import NgramMapK
from benchmarks.peer_counts import RULES, compare
from benchmarks.peers import NgramMod, NgramSimple, Peer, PromptLookup
from benchmarks.recorded import Recorded, load
from benchmarks.replay import FREE, replay
from rest_local.llama.model import Model


def proposed(peer: Peer, tokens: Sequence[int], limit: int = 63) -> list[int]:
    peer.restart(tokens)
    return peer.propose(limit).token


def replayed(peer: Peer, recorded: Sequence[Recorded]) -> tuple[float, float]:
    """Return MAT and nodes per step."""
    result = replay(recorded, lambda: peer, peer, FREE).to_dict()
    assert result["tokens_changed"] == 0
    return result["mat"], result["nodes_per_step"]


@pytest.mark.parametrize("seed", range(5))
def test_prompt_lookup_is_the_rule_of_llama_cpp_python(seed: int) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    original = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=10)
    random = np.random.default_rng(seed)
    for _ in range(200):
        text = random.integers(0, 12, random.integers(1, 60)).astype(np.intc)
        assert proposed(PromptLookup(), text.tolist()) == original(text).tolist()


def test_ngram_mod_keeps_other_requests_and_is_cleared_after_five_failures() -> None:
    text = list(range(1000, 1200))
    peer = NgramMod()
    assert proposed(peer, text) == []
    assert proposed(peer, [1, *text[:50]]) == text[50:113]  # The text comes from the previous request.
    assert proposed(peer, [1, *text[:155]]) == []  # fewer than 48 of the next tokens are known
    peer = NgramMod([text])
    for failure in range(NgramMod.FAILURES):
        assert proposed(peer, text[60:120]) == text[120:183]
        other = [text[50], *range(3000 + 200 * failure, 3200 + 200 * failure)]  # never the earlier continuation
        replayed(peer, [Recorded("wrong", text[:50], other)])  # one wrong draft; plain steps are no failures
    assert proposed(peer, text[60:120]) == []


def test_published_figures_of_the_peers_are_met(shared_data: Callable[[str], Path]) -> None:
    """MT-Bench, context only: 1.622 at 6.05 nodes a step, 1.130 at 0.48 and 1.075 at 0.20, for prompts whose template
    differs a little."""
    with Model.open(shared_data("ggml-vocab-llama-spm.gguf"), vocab_only=True) as model:
        recorded = load(shared_data("mt_bench_answers_vicuna-7b-v1.5.jsonl"), model.vocabulary)
    figures = {peer: replayed(peer(), recorded) for peer in (PromptLookup, NgramSimple, NgramMod)}
    mats = {kind: mat for kind, (mat, _) in figures.items()}
    assert mats == pytest.approx({PromptLookup: 1.622, NgramSimple: 1.130, NgramMod: 1.075}, rel=0.01)
    nodes = {kind: nodes for kind, (_, nodes) in figures.items()}
    assert nodes == pytest.approx({PromptLookup: 6.05, NgramSimple: 0.48, NgramMod: 0.20}, rel=0.1)


# ---- Rules of llama.cpp that look up n-grams -----------------------------------------------------------------------


RECORDED = Path(__file__).parents[1] / "data" / "peer-counts.json"


def test_ngram_map_k_drafts_what_followed_twelve_tokens() -> None:
    gram, filler = list(range(1, 13)), list(range(500, 600))
    assert proposed(NgramMapK(), [0, *gram, *filler, *gram]) == filler[:48]
    assert proposed(NgramMapK(), [*gram, *filler, *gram]) == []  # position 0 means no match
    assert proposed(NgramMapK(), [0, *gram, *filler[:50], *gram]) == filler[:48]
    assert proposed(NgramMapK(), [0, *gram, *filler[:40], *gram]) == []  # too near


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_counts_what_the_program_counted(rule: type[Peer]) -> None:
    rows = compare(json.loads(RECORDED.read_text("ascii")))[rule.name]
    assert [name for name, theirs, ours in rows if theirs != ours] == []
    assert sum(theirs.accepted for _, theirs, _ in rows) > 0
