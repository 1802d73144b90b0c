"""Recycled logits in the step loop: which rows are read, that output stays that of plain decoding, and who does not
read any."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.fake_backend import END, N_VOCAB, Draws, FakeBackend, Greedy, logits_of, plain
from support.fake_sequences import TREE, Alone, Silent, check_said, prompts_of, run, scheduler_of, sequence_of
from support.fake_sources import Keen, always_draft, fortune
from support.prices import FLAT

from rest_local import Engine, Sampling
from rest_local.drafting.recycled import LogitsRow, SuccessorTable
from rest_local.kv_cache.slot import Slot
from rest_local.planning import auto as planning_auto
from rest_local.planning.policy import StepCost

PROMPTS = 5


class Recycling(Keen):
    """Drafts at every step, and reads every row."""

    def __init__(self, table: SuccessorTable | None = None) -> None:
        super().__init__(FLAT)
        self.successors = table or SuccessorTable(N_VOCAB)
        self.seen: list[list[tuple[tuple[int, int], bytes]]] = []

    @property
    def logits_ms(self) -> float:
        return 1.0

    def learn_logits(self, rows: object) -> None:
        assert self.successors is not None
        self.seen.append([])
        for pair, row in rows:  # type: ignore[attr-defined]
            self.seen[-1].append((pair, row.tobytes()))
            self.successors.read(pair, row)

    def account(self, done: StepCost) -> None:
        self.budget.credit = 5.0


def generation(policy: Recycling, sources: object = None, chooser: object = None) -> Alone:
    backend = FakeBackend()
    return Alone(backend, Slot(backend), policy, sources or Silent(), chooser or Greedy(), TREE)  # type: ignore[arg-type]


def generate(task: Alone, prompt: Sequence[int], n: int) -> list[int]:
    task.evaluate(prompt)
    out: list[int] = []
    while len(out) < n and (not out or out[-1] != END) and task.room:
        out += [token for token, _ in task.step(n - len(out))]
    return out


@pytest.mark.parametrize("shape", [None, "bush", "deep", "wrong"])
def test_output_is_plain_decoding(shape: str | None) -> None:
    """Alone and with other sources; greedy, and with the draws of plain decoding."""
    accepted = 0
    table = SuccessorTable(N_VOCAB)
    for seed, prompt in enumerate(prompts_of(PROMPTS)):
        for chooser, alone in ((Greedy(), Greedy()), (Draws(seed, 0.7), Draws(seed, 0.7))):
            task = generation(Recycling(table), shape and fortune(shape), chooser)
            assert generate(task, prompt, 40) == plain(prompt, alone, 40)
            accepted += task.statistics.by_source.get("logits", {}).get("accepted", 0)
    if shape != "wrong":
        assert accepted


def test_the_rows_are_those_of_their_tokens_verified_ones_first() -> None:
    """Of each row: the text up to it ends with the two tokens that are given, and its logits are the model's."""
    policy = Recycling()
    task = generation(policy, fortune("tree"))
    task.evaluate([3, 1, 4])
    rejected = 0
    while task.room > 40:
        before = list(task.sequence.tokens)
        task.step(20)
        tree, read = task.sequence.tree, policy.seen[-1]
        texts = {(): before} | {tuple(tree.path(node)): [*before, *tree.path(node)] for node in range(len(tree))}
        assert len(read) == 1 + len(tree)
        wanted = sorted((tuple(text[-2:]), logits_of(text).tobytes()) for text in texts.values())
        assert sorted(read) == wanted
        taken = len(task.sequence.tokens) - len(before)
        newest = task.sequence.tokens[:-1]
        for back in range(taken):  # the verified rows, newest first
            text = newest[: len(newest) - back]
            assert read[back] == (tuple(text[-2:]), logits_of(text).tobytes())
        likely = [tree.probability[node] for node in range(len(tree))]
        rejected += len(read) - taken
        if len(read) - taken > 1:
            rows = {logits_of(texts[tuple(tree.path(node))]).tobytes(): likely[node] for node in range(len(tree))}
            order = [rows[row] for _, row in read[taken:]]
            assert order == sorted(order, reverse=True)
    assert rejected > 20


def test_requests_share_the_table() -> None:
    """The second request of the same text drafts at once what the first one has seen."""
    prompt = prompts_of(3)[2]
    table = SuccessorTable(N_VOCAB)
    steps = []
    for _ in range(2):
        task = generation(Recycling(table))
        generate(task, prompt, 60)
        steps.append(task.statistics.steps)
    assert steps[1] < 0.9 * steps[0]


def test_several_requests_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    backend = FakeBackend(n_ctx=1024, n_slots=4)
    scheduler = scheduler_of(backend)
    policy = Recycling()
    prompts = prompts_of(9)
    sequences = [sequence_of(backend, prompt, 40, policy=policy) for prompt in prompts]
    run(scheduler, sequences)
    check_said(prompts, sequences, 40)
    assert sum(s.statistics.by_source.get("logits", {}).get("accepted", 0) for s in sequences) > 20


def test_a_damaged_row_costs_no_answer() -> None:
    """NaN and infinity in rows that are only drafted: the newest row decides, and stays as it is."""

    class Damaged(Recycling):
        def learn_logits(self, rows: object) -> None:
            rng = np.random.default_rng(len(self.seen))
            damaged: list[LogitsRow] = []
            for pair, row in rows:  # type: ignore[attr-defined]
                copy = row.copy()
                copy[rng.integers(0, N_VOCAB, 3)] = rng.choice([np.nan, np.inf, -np.inf, 0.0], 3)
                damaged.append((pair, copy))
            super().learn_logits(damaged)

    table = SuccessorTable(N_VOCAB)
    for prompt in prompts_of(20):
        assert generate(generation(Damaged(table)), prompt, 40) == plain(prompt, Greedy(), 40)


def test_an_engine_drafts_from_recycled_logits(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact settings the answer of plain decoding, bit for bit; the table is filled by `auto` alone."""
    always_draft(monkeypatch, most=6)
    monkeypatch.setattr(planning_auto, "is_flat", lambda cost: True)
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=256, threads=1, exact=True, history=False) as engine:
        auto = engine.context.auto
        assert auto.successors is not None

        def answer(policy: str, sampling: Sampling) -> list[int]:
            return engine.generate("for number in", max_tokens=80, policy=policy, sampling=sampling).wait().tokens

        for policy in ("off", "sam"):
            answer(policy, Sampling())
        assert auto.successors.rows_read == 0
        for sampling in (Sampling(), Sampling(temperature=0.4, seed=3)):
            alone = answer("off", sampling)
            for _ in range(2):
                auto.row_budget.credit = 1e3
                assert answer("auto", sampling) == alone
        assert auto.successors.rows_read > 20
        drafted = engine.totals.by_source["logits"]
        assert drafted["drafted"] > 0
