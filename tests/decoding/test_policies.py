"""Every policy over the fake backend says what plain decoding says; relaxed verification says what it changed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.fake_backend import END, N_VOCAB, Draws, FakeBackend, Greedy, logits_of, plain
from support.fake_sequences import TREE, Alone
from support.fake_sources import always_draft
from support.prices import FixedCurve

from rest_local import Engine, Sampling
from rest_local.decoding.logprobs import entropy_of
from rest_local.decoding.stream import TARGET
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.drafting.sources import NO_BIGRAM, SOURCE_NUMBER, Lookup, Sources
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.errors import OptionError
from rest_local.grammar import gbnf
from rest_local.kv_cache.slot import Slot
from rest_local.planning.plan import Budget
from rest_local.planning.policies import POLICIES, ReSpec, make_policy
from rest_local.planning.policy import Policy, StepContext, StepCost
from rest_local.retrieval.growing import GrowingText

FLAT = FixedCurve.from_points([0], [1, 64], [[10.0, 10.0]])
CONTEXT, MODEL = SOURCE_NUMBER["context"], SOURCE_NUMBER["model"]
SEQUENTIAL = Draws | Greedy


def task(policy: Policy, sources: Lookup, chooser: SEQUENTIAL, relaxed: Relaxed | None = None) -> Alone:
    backend = FakeBackend()
    return Alone(backend, Slot(backend), policy, sources, chooser, TREE, lambda token: token == END, relaxed)


def run(generation: Alone, prompt: Sequence[int], n: int) -> list[tuple[int, str]]:
    generation.evaluate(prompt)
    out: list[tuple[int, str]] = []
    while len(out) < n and (not out or out[-1][0] != END):
        step = generation.step(n - len(out))
        out += zip(step.tokens, step.sources, strict=True)
    return out


def prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, END, 8).tolist() * int(rng.integers(1, 4)) for _ in range(n)]


def earlier() -> GrowingText:
    """Return what the model answers to some of the prompts."""
    text = GrowingText()
    for prompt in prompts(20)[::2]:
        text.extend([*prompt, *plain(prompt, Greedy(), 40), -1])
    return text


@pytest.mark.parametrize("name", POLICIES)
def test_streams_are_those_of_plain_decoding(name: str) -> None:
    policy, sources = make_policy(name, FLAT), Sources([], N_VOCAB, earlier())
    accepted = 0
    for seed, prompt in enumerate(prompts(10)):
        greedy = task(policy, sources, Greedy())
        assert [token for token, _ in run(greedy, prompt, 40)] == plain(prompt, Greedy(), 40)
        drawn, alone = Draws(seed, 0.5), Draws(seed, 0.5)
        assert [token for token, _ in run(task(policy, sources, drawn), prompt, 40)] == plain(prompt, alone, 40)
        assert drawn.accepted == alone.accepted
        accepted += greedy.statistics.accepted
    assert accepted == 0 if name == "off" else accepted > 10


class Told(Sources):
    """Sources that say what the sequence is."""

    @property
    def text(self) -> list[int]:
        return self._from(0)


class Scripted(Policy):
    """Drafts the likeliest continuation of the text so far, or the second likeliest; keeps the situations and what it
    was taught.
    """

    name = "scripted"
    watches_entropy = True

    def __init__(self, second: bool = False, source: int = CONTEXT) -> None:
        self._second, self._source = second, source
        self.seen: list[tuple[float, ...]] = []
        self.taught: list[list[int]] = []

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        self.seen.append(tuple(at.entropies))
        assert isinstance(sources, Told)
        tree, node, history = DraftTree(at.leaves), ROOT, sources.text
        assert at.newest == tuple([*NO_BIGRAM, *history][-2:])
        for _ in range(min(at.limit, 4)):
            ranked = np.argsort(-logits_of(history))
            history.append(int(ranked[1 if self._second else 0]))
            node = tree.add(history[-1], node, 1.0, self._source)
        return Draft(tree)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        self.taught.append(list(tokens))


def test_entropies_are_those_of_the_newest_three_tokens() -> None:
    prompt = [1, 2, 3]
    policy = Scripted()
    generation = task(policy, Told([], N_VOCAB), Greedy())
    generation.evaluate(prompt)
    said: list[int] = []
    for _ in range(4):
        every = [entropy_of(logits_of([*prompt, *said[:n]])) for n in range(len(said))]
        said += generation.step(20).tokens
        assert policy.seen[-1] == pytest.approx(every[-3:])
    assert len(said) > 8


def relaxed_by_hand(prompt: Sequence[int], rule: Relaxed, n: int) -> list[tuple[int, str]]:
    """Draft the second likeliest token, 4 in a row. It passes if the rule lets it, else the model's own ends the
    step.
    """
    history: list[int] = list(prompt)
    out: list[tuple[int, str]] = []
    while len(out) < n:
        for _ in range(min(4, n - len(out) - 1)):
            row = logits_of(history)
            first, second = (int(t) for t in np.argsort(-row)[:2])
            if END in (first, second) or rule.k < 2 or row[second] < row[first] + np.log(rule.ratio):
                break
            out.append((second, "context~"))
            history.append(second)
        first = int(logits_of(history).argmax())
        out.append((first, TARGET))
        history.append(first)
        if first == END:
            break
    return out


@pytest.mark.parametrize("rule", [Relaxed(), Relaxed(2, 0.5), Relaxed(5, 0.01), Relaxed(1, 0.01), Relaxed(3, 1.0)])
def test_relaxed_tokens_are_counted_and_marked_one_by_one(rule: Relaxed) -> None:
    passed = 0
    for prompt in prompts(10):
        policy = Scripted(second=True)
        generation = task(policy, Told([], N_VOCAB), Greedy(), rule)
        out = run(generation, prompt, 40)
        assert out == relaxed_by_hand(prompt, rule, 40)
        marked = sum(source == "context~" for _, source in out)
        assert generation.statistics.relaxed == generation.statistics.summary().relaxed == marked
        passed += marked
        strict = iter(policy.taught)  # what passed only by being relaxed is no evidence of what the model says
        step: list[tuple[int, str]] = []
        for token, source in out:
            step.append((token, source))
            if source == TARGET:
                loose = next((i for i, (_, by) in enumerate(step) if by == "context~"), len(step))
                assert next(strict) == [t for t, _ in step[:loose]]
                step = []
    assert (passed > 0) == (rule.k > 1 and rule.ratio < 1)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_relaxed_token_is_among_the_k_likeliest(k: int) -> None:
    """The one after them is as likely as the rule wants, but not one of them; of equal ones both are."""
    logits = np.array([5.0, 4.9, 4.8, 4.8, 4.6, -3.0], np.float32)
    for drafted in range(1, 6):
        tree = DraftTree(1)
        tree.add(drafted, ROOT, 0.5, CONTEXT)
        chosen = Relaxed(k, 0.1).relax(0, tree, ROOT, logits, lambda token: False)
        rank = {1: 2, 2: 3, 3: 3, 4: 5, 5: 6}[drafted]
        assert chosen == (drafted if rank <= k else 0)


@pytest.mark.parametrize(("token", "drafted"), [(0, 1), (1, 0)])
def test_relaxed_verification_neither_adds_nor_removes_an_end(token: int, drafted: int) -> None:
    """Token 1 is an end."""
    tree = DraftTree(1)
    tree.add(drafted, ROOT, 0.5, CONTEXT)
    row = np.array([1.0, 1.0, -3.0], np.float32)
    assert Relaxed(3, 0.1).relax(token, tree, ROOT, row, lambda each: each == 1) == token
    assert Relaxed(3, 0.1).relax(token, tree, ROOT, row, lambda each: False) == drafted


def test_what_a_model_drafted_stays_strict() -> None:
    for prompt in prompts(5):
        policy = Scripted(second=True, source=MODEL)
        generation = task(policy, Told([], N_VOCAB), Greedy(), Relaxed(10, 0.001))
        assert [token for token, _ in run(generation, prompt, 30)] == plain(prompt, Greedy(), 30)
        assert generation.statistics.relaxed == 0


@pytest.mark.parametrize(
    "text", ["", "loose", "strict:", "relaxed:", "relaxed:3", "relaxed:a,b", "relaxed:0,0.3", "relaxed:3,0",
             "relaxed:3,1.1", "relaxed:3,nan", "strict:3,0.3"],
)  # fmt: skip
def test_a_wrong_verify_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="verify "):
        Relaxed.parse(text)


# ---- Of real engines -----------------------------------------------------------------------------------------------


TinyModel = Callable[..., Path]
PROMPT = "for number in range(10): print(number)\n" * 3
PAPERS = ("rest", "sam", "respec")


def answer(engine: Engine, n: int = 80, **options: object) -> list[int]:
    result = engine.generate(PROMPT, max_tokens=n, **options).wait()  # type: ignore[arg-type]
    return result.tokens


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_exact_answers_do_not_depend_on_the_policy(name: str, tiny_model: TinyModel) -> None:
    with Engine.load(tiny_model(name, quant="Q8_0"), n_ctx=256, threads=1, exact=True) as engine:
        for sampling in (Sampling(), Sampling(temperature=0.4, seed=3)):
            alone = answer(engine, policy="off", sampling=sampling)
            for policy in PAPERS:
                assert answer(engine, policy=policy, sampling=sampling) == alone
            assert answer(engine, policy=ReSpec(trigger=False), sampling=sampling) == alone


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_draft_model_changes_no_bit_of_an_exact_answer(
    name: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model is nearly always right, and another one of the same vocabulary nearly never."""
    model, other = tiny_model(name, quant="Q8_0"), tiny_model("llama", quant="Q8_0", seed=5)
    for drafter in (tiny_model("llama", quant="Q8_0"), other)[: 2 if name == "llama" else 1]:
        with Engine.load(model, n_ctx=256, threads=1, exact=True, draft_model=drafter) as engine:
            assert engine.settings["draft_model"] == str(drafter)
            assert isinstance(engine.decoder.context.drafter, DraftModel)
            accepted = 0
            for sampling in (Sampling(), Sampling(temperature=0.4, seed=3)):
                alone = answer(engine, 40, policy="off", sampling=sampling)
                with monkeypatch.context() as patch:
                    always_draft(patch, most=6)
                    patch.setattr(Budget, "settle", lambda self, saved: None)  # What drafts lose ends no queries.
                    result = engine.generate(PROMPT, max_tokens=40, sampling=sampling).wait()
                assert result.tokens == alone
                assert result.draft.by_source["model"].drafted > 0
                assert result.draft.draft_model_ms_per_step > 0
                accepted += result.sources.count("model")
            if drafter is not other and name == "llama":
                assert accepted > 20
                assert (
                    engine.decoder.context.auto.shared.model_stats.promise(0) > 0.5
                )  # random weights are not confident


def test_relaxed_is_asked_for_by_request_and_refused_where_it_cannot_be(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", quant="Q8_0")
    with Engine.load(model, n_ctx=256, threads=1, policy="sam", verify=Relaxed(40, 0.01)) as engine:
        assert engine.settings["verify"] == "relaxed:40,0.01"
        result = engine.generate(PROMPT, max_tokens=120, sampling=Sampling(temperature=1.5, top_k=0, seed=1)).wait()
        marked = sum(source.endswith("~") for source in result.sources)
        assert result.draft.relaxed >= marked > 0
        for refused in (
            Sampling(grammar=gbnf('root ::= "a"')),
            Sampling(repeat_penalty=1.1),
            Sampling(logit_bias=((3, 1.0),)),
        ):
            with pytest.raises(OptionError, match="relaxed"):
                answer(engine, sampling=refused)
            assert len(answer(engine, 5, sampling=refused, verify="strict")) <= 5
        with pytest.raises(OptionError, match="verify loose"):
            answer(engine, verify="loose")
        with pytest.raises(OptionError, match="policy best"):
            answer(engine, policy="best")
    with pytest.raises(OptionError, match="exact"):
        Engine.load(model, exact=True, verify=Relaxed())
