"""The papers' policies and relaxed verification over real llama.cpp contexts of tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_sources import always_draft

from rest_local import Engine, Sampling
from rest_local.decoding.stream import Result
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.models.draft_model import DraftModel
from rest_local.errors import OptionError
from rest_local.grammar import gbnf
from rest_local.planning.plan import Budget
from rest_local.planning.policies import ReSpec
from rest_local.planning.policy import Policy

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
    """Of the same model it is nearly always right, of another one of the same vocabulary nearly never."""
    model, other = tiny_model(name, quant="Q8_0"), tiny_model("llama", quant="Q8_0", seed=5)
    for drafter in (tiny_model("llama", quant="Q8_0"), other)[: 2 if name == "llama" else 1]:
        policies: list[str | Policy] = ["auto"]
        policies += ["respec", "sam", ReSpec(trigger=False)] if drafter is not other else []
        with Engine.load(model, n_ctx=256, threads=1, exact=True, draft_model=drafter) as engine:
            assert engine.settings["draft_model"] == str(drafter)
            assert isinstance(engine.context.drafter, DraftModel)
            accepted = dict.fromkeys(map(str, policies), 0)
            for sampling in (Sampling(), Sampling(temperature=0.4, seed=3)):
                alone = answer(engine, 40, policy="off", sampling=sampling)
                for policy in policies:
                    with monkeypatch.context() as patch:
                        if policy == "auto":  # what its drafts lose ends no queries
                            always_draft(patch, most=6)
                            patch.setattr(Budget, "settle", lambda self, saved: None)
                        result = engine.generate(PROMPT, max_tokens=40, policy=policy, sampling=sampling).wait()
                    assert result.tokens == alone
                    assert result.draft.by_source["model"].drafted > 0
                    assert policy == "auto" or result.draft.draft_model_ms_per_step > 0
                    accepted[str(policy)] += result.sources.count("model")
            if drafter is not other and name == "llama":
                assert accepted["auto"] > 20
                assert sum(accepted.values()) > 100
                assert engine.context.auto.model_stats.promise(0) > 0.5  # random weights are not confident


def test_hybrids_of_several_requests_ask_for_each(tiny_model: TinyModel) -> None:
    """In one forward pass, some of the requests with `auto`."""
    model = tiny_model("llama", quant="Q8_0", n_layers=2)
    prompts = [[token, 5, 9, token + 1, 7] * 6 for token in range(20, 26)]
    with Engine.load(model, n_ctx=128, slots=6, threads=1) as engine:
        alone = [result.tokens for result in results(engine, prompts, ["off"])]
    with Engine.load(model, n_ctx=128, slots=6, threads=1, draft_model=model) as engine:
        together = results(engine, prompts, ["sam", "respec", "auto"])
        same = sum(result.tokens == tokens for result, tokens in zip(together, alone, strict=True))
        assert same >= 5  # near ties of a random model may fall otherwise in another batch
        for result in (together[0], together[1], together[3], together[4]):
            assert result.draft.draft_model_ms_per_step > 0
            assert "model" in result.sources


def results(engine: Engine, prompts: list[list[int]], policies: list[str]) -> list[Result]:
    requests = [
        engine.request(prompt, max_tokens=40, policy=policies[number % len(policies)])
        for number, prompt in enumerate(prompts)
    ]
    finished = sorted(engine.batch(requests), key=lambda each: each.number)
    return [each.result for each in finished]


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
