"""The sampler chain: the right distribution, the same draws for a seed, penalties, bias, grammar."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rest_local.errors import OptionError
from rest_local.grammar import gbnf
from rest_local.llama.options import Sampling
from rest_local.llama.sampler import Sampler
from rest_local.llama.vocabulary import Vocabulary

Logits = NDArray[np.float32]
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
DIGITS = gbnf('root ::= [0-9]+ "."')


def _rows(count: int, size: int, seed: int = 0, spread: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal((count, size)) * spread).astype(np.float32)


def _generate(sampler: Sampler, rows: Logits) -> list[int]:
    tokens = []
    for row in rows:
        tokens.append(sampler.sample(row))
        sampler.accept(tokens[-1])
    return tokens


def _peaked(size: int, *likely: int) -> Logits:
    """Return a row with a few likely tokens, in descending order. All others are very unlikely."""
    row = np.full(size, -50.0, np.float32)
    row[list(likely)] = 10.0 - np.arange(len(likely))
    return row


def test_greedy_is_the_arg_max_of_the_bare_logits(vocabulary: Vocabulary) -> None:
    rows = _rows(50, vocabulary.size)
    with Sampler(vocabulary, Sampling()) as sampler:
        assert _generate(sampler, rows) == rows.argmax(axis=1).tolist()


def test_logits_are_not_changed_and_need_not_be_contiguous(vocabulary: Vocabulary) -> None:
    wide = _rows(1, 2 * vocabulary.size)[0]
    row, before = wide[::2], wide.copy()
    wide.flags.writeable = False
    with Sampler(vocabulary, Sampling(temperature=1, seed=1)) as strided:
        token = strided.sample(row)
    with Sampler(vocabulary, Sampling(temperature=1, seed=1)) as contiguous:
        assert contiguous.sample(row.copy()) == token
    assert (wide == before).all()


def test_a_seed_gives_the_same_draws_and_another_seed_others(vocabulary: Vocabulary) -> None:
    rows = _rows(60, vocabulary.size, spread=1.0)

    def run(seed: int | None) -> list[int]:
        with Sampler(vocabulary, Sampling(temperature=1.0, seed=seed)) as sampler:
            return _generate(sampler, rows)

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(0) != run(1)


def test_a_seed_that_is_not_given_is_random_and_reported(vocabulary: Vocabulary) -> None:
    rows = _rows(60, vocabulary.size, spread=1.0)
    with (
        Sampler(vocabulary, Sampling(temperature=1.0)) as first,
        Sampler(vocabulary, Sampling(temperature=1.0)) as other,
    ):
        assert first.seed != other.seed
        with Sampler(vocabulary, Sampling(temperature=1.0, seed=first.seed)) as again:
            assert _generate(first, rows) == _generate(again, rows)


@pytest.mark.parametrize("alone", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.0}])
def test_every_position_takes_one_draw_even_with_one_candidate(vocabulary: Vocabulary, alone: dict[str, float]) -> None:
    """So a near-tie, which decides the number of candidates, cannot shift the later draws."""
    options = NEUTRAL | {"min_p": 0.05}
    certain, open_row = _peaked(vocabulary.size, 3), _rows(1, vocabulary.size, spread=0.5)[0]
    with Sampler(vocabulary, Sampling(temperature=1.0, seed=9, **options)) as sampler:  # type: ignore[arg-type]
        plain = [sampler.sample(open_row) for _ in range(6)]
    with Sampler(vocabulary, Sampling(temperature=1.0, seed=9, **options)) as sampler:  # type: ignore[arg-type]
        mixed = [sampler.sample(certain if i in (1, 2, 4) else open_row) for i in range(6)]
    assert [mixed[i] for i in (1, 2, 4)] == [3, 3, 3]
    assert [mixed[i] for i in (0, 3, 5)] == [plain[i] for i in (0, 3, 5)]
    with Sampler(vocabulary, Sampling(temperature=1.0, seed=9, **(NEUTRAL | alone))) as single:  # type: ignore[arg-type]
        assert {single.sample(open_row) for _ in range(5)} == {int(open_row.argmax())}


def test_draws_follow_the_distribution(vocabulary: Vocabulary) -> None:
    """Chi-square over 20 000 draws of a fixed seed, 15 degrees of freedom: 37.7 is the 0.1% point."""
    likely = np.arange(16)
    row = np.full(vocabulary.size, -np.inf, np.float32)
    row[likely] = np.random.default_rng(2).standard_normal(16)
    temperature, draws = 0.7, 20_000
    with Sampler(vocabulary, Sampling(temperature=temperature, seed=11, **NEUTRAL)) as sampler:  # type: ignore[arg-type]
        counts = np.bincount([sampler.sample(row) for _ in range(draws)], minlength=vocabulary.size)
    weights = np.exp(row[likely].astype(float) / temperature)
    expected = weights / weights.sum() * draws
    assert counts.sum() == counts[likely].sum() == draws
    assert ((counts[likely] - expected) ** 2 / expected).sum() < 37.7


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8}])
def test_filters_keep_what_a_naive_filter_keeps(vocabulary: Vocabulary, options: dict[str, float]) -> None:
    row = _rows(1, vocabulary.size, seed=4, spread=2.0)[0]
    order = np.argsort(-row, kind="stable")[: int(options.get("top_k", vocabulary.size))]
    p = np.exp(row[order].astype(float) - row.max())
    p /= p.sum()
    kept = int(np.searchsorted(np.cumsum(p), options.get("top_p", 1.0))) + 1
    allowed = {int(token) for token, share in zip(order[:kept], p[:kept], strict=False)
               if share >= options.get("min_p", 0.0) * p[0]}  # fmt: skip
    with Sampler(vocabulary, Sampling(temperature=3.0, seed=1, **(NEUTRAL | options))) as sampler:  # type: ignore[arg-type]
        seen = {sampler.sample(row) for _ in range(3000)}
    assert seen == allowed if len(allowed) < 30 else seen <= allowed


def test_logit_bias_forbids_and_prefers(vocabulary: Vocabulary) -> None:
    row = _peaked(vocabulary.size, 7, 8, 9)
    with Sampler(vocabulary, Sampling(logit_bias=((7, -math.inf),))) as sampler:
        assert sampler.sample(row) == 8
    with Sampler(vocabulary, Sampling(logit_bias=((9, 5.0),))) as sampler:
        assert sampler.sample(row) == 9
    with pytest.raises(OptionError, match="outside the vocabulary"):
        Sampler(vocabulary, Sampling(logit_bias=((vocabulary.size, 1.0),)))


def test_penalties_count_accepted_tokens_and_the_prompt(vocabulary: Vocabulary) -> None:
    row = _peaked(vocabulary.size, 7, 8, 9)  # logits 10, 9, 8
    with Sampler(vocabulary, Sampling(presence_penalty=1.5)) as sampler:
        assert [sampler.sample(row), sampler.sample(row)] == [7, 7]  # `sample` does not accept
        assert _generate(sampler, np.stack([row] * 4)) == [7, 8, 7, 7]  # logits 8.5, 7.5, 8 after both occurred
    with Sampler(vocabulary, Sampling(presence_penalty=1.5)) as sampler:
        sampler.observe([7, 7, 8])
        assert sampler.sample(row) == 7  # 8.5, 7.5, 8
    with Sampler(vocabulary, Sampling(frequency_penalty=0.8)) as sampler:
        sampler.observe(np.array([7, 7, 8], np.int32))
        assert sampler.sample(row) == 7  # 8.4, 8.2, 8
        sampler.accept(7)
        assert sampler.sample(row) == 8  # 7.6, 8.2, 8
    with Sampler(vocabulary, Sampling(repeat_penalty=2.0, repeat_last_n=1)) as sampler:
        assert _generate(sampler, np.stack([row] * 3)) == [7, 8, 7]  # only the last token counts


def test_grammar_bounds_greedy_output_to_its_best_allowed_token(vocabulary: Vocabulary) -> None:
    """Naive oracle: this grammar allows digits, and after the first one also the full stop."""
    rows = _rows(20, vocabulary.size, seed=8)
    digits = [i for i in range(vocabulary.size) if vocabulary.piece(i).isdigit()]
    (stop,) = vocabulary.tokenize(".").tolist()
    with Sampler(vocabulary, Sampling(grammar=DIGITS)) as sampler:
        for i, row in enumerate(rows):
            allowed = digits if i == 0 else [*digits, stop]
            token = sampler.sample(row)
            assert token == max(allowed, key=lambda token: row[token])
            sampler.accept(token)
            if token == stop:
                break
        assert vocabulary.is_end(sampler.sample(rows[0]))


def test_accepting_an_invalid_token_raises_and_the_next_call_works(vocabulary: Vocabulary) -> None:
    (seven,), (letter,) = vocabulary.tokenize("7").tolist(), vocabulary.tokenize("x").tolist()
    with Sampler(vocabulary, Sampling(grammar=DIGITS)) as sampler:
        for token in (letter, vocabulary.ids.eos or 0):
            with pytest.raises(ValueError, match="not allowed by the grammar"):
                sampler.accept(token)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            sampler.accept(vocabulary.size)
        sampler.accept(seven)


def _drawn(vocabulary: Vocabulary, row: Logits, n: int = 400, **options: Any) -> Counter[int]:
    """Count the tokens of n draws from a row."""
    with Sampler(vocabulary, Sampling(**{"temperature": 1.0, "seed": 1, **NEUTRAL, **options})) as sampler:
        return Counter(_generate(sampler, np.stack([row] * n)))


def _probabilities(row: Logits, temperature: float = 1.0) -> NDArray[np.float64]:
    weights = np.exp((row.astype(float) - row.max()) / temperature)
    return weights / weights.sum()


def test_top_n_sigma_keeps_what_is_near_the_greatest_logit(vocabulary: Vocabulary) -> None:
    row = _rows(1, vocabulary.size, seed=4)[0]
    near = np.flatnonzero(row >= row.max() - 1.5 * row.astype(float).std())
    drawn = set(_drawn(vocabulary, row, temperature=100.0, top_n_sigma=1.5, samplers=("top_n_sigma", "temperature")))
    assert drawn == set(near.tolist())


def test_typical_keeps_what_is_as_surprising_as_expected(vocabulary: Vocabulary) -> None:
    row = _rows(1, vocabulary.size, seed=4, spread=2.0)[0]
    p = _probabilities(row)
    surprise = -np.log(p)
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.5, side="right")) + 1]
    drawn = set(_drawn(vocabulary, row, 3000, temperature=100.0, typical_p=0.5, samplers=("typ_p", "temperature")))
    assert drawn == set(kept.tolist())
    assert int(row.argmax()) not in kept
    with Sampler(vocabulary, Sampling(typical_p=0.5, **NEUTRAL)) as greedy:  # type: ignore[arg-type]
        assert greedy.sample(row) == max(kept.tolist(), key=lambda token: row[token])


def test_xtc_leaves_the_last_of_the_tokens_above_its_threshold(vocabulary: Vocabulary) -> None:
    row = _peaked(vocabulary.size, 7, 8, 9)  # probabilities 0.67, 0.24, 0.09
    assert sorted(_drawn(vocabulary, row, xtc_probability=1.0, xtc_threshold=0.05)) == [9]
    assert sorted(_drawn(vocabulary, row, xtc_probability=1.0, xtc_threshold=0.1)) == [8, 9]
    assert sorted(_drawn(vocabulary, row, xtc_probability=1.0, xtc_threshold=0.6)) == [7, 8, 9]
    with Sampler(vocabulary, Sampling(xtc_probability=1.0, xtc_threshold=0.1)) as greedy:
        assert greedy.sample(row) == 8
    with Sampler(vocabulary, Sampling(xtc_probability=0.5, seed=3)) as sometimes:
        first = _generate(sometimes, np.stack([row] * 40))
    with Sampler(vocabulary, Sampling(xtc_probability=0.5, seed=3)) as again:
        assert _generate(again, np.stack([row] * 40)) == first
    assert set(first) == {7, 8}


def test_dynamic_temperature_follows_the_entropy(vocabulary: Vocabulary) -> None:
    row = _peaked(vocabulary.size, 7, 8, 9)
    p = _probabilities(row)
    entropy = -(p[p > 0] * np.log(p[p > 0])).sum() / math.log(vocabulary.size)
    expected = _probabilities(row, 0.5 + 1.0 * entropy**2)
    drawn = _drawn(vocabulary, row, 4000, dynatemp_range=0.5, dynatemp_exponent=2.0)
    assert drawn[7] / 4000 == pytest.approx(expected[7], abs=0.01)
    assert drawn[9] / 4000 == pytest.approx(expected[9], abs=0.01)


def test_dry_penalizes_what_goes_on_with_a_repetition(vocabulary: Vocabulary) -> None:
    """After `7 8 9 ... 7 8` nine would be the third token of a repetition; a breaker in between forgives it."""
    (breaker,) = vocabulary.tokenize(":").tolist()
    row = _peaked(vocabulary.size, 9, 5)

    def chosen(text: list[int], **options: Any) -> int:
        with Sampler(vocabulary, Sampling(dry_multiplier=2.0, **options)) as sampler:
            sampler.observe(text[:3])
            for token in text[3:]:
                sampler.accept(token)
            return sampler.sample(row)

    assert chosen([7, 8, 9, 3, 7, 8]) == 5
    assert chosen([7, 8, 9, 3, 7, 8], dry_penalty_last_n=4) == 9
    assert chosen([7, 8, 9, 3, 7, 8], dry_penalty_last_n=-1) == 5
    assert chosen([7, 8, 9, 3, 7, 8], dry_allowed_length=3) == 9
    assert chosen([7, breaker, 9, 3, 7, breaker]) == 9
    assert chosen([7, breaker, 9, 3, 7, breaker], dry_sequence_breakers=("no such text",)) == 5


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_aims_at_a_surprise_and_switches_the_others_off(vocabulary: Vocabulary, version: int) -> None:
    rows = _rows(300, vocabulary.size, spread=2.0)

    def surprise(tau: float, **options: Any) -> tuple[list[int], float]:
        sampling = Sampling(temperature=1.0, seed=5, mirostat=version, mirostat_tau=tau, **options)
        with Sampler(vocabulary, sampling) as sampler:
            tokens = _generate(sampler, rows)
        bits = [-math.log2(_probabilities(row)[token]) for row, token in zip(rows, tokens, strict=True)]
        return tokens, sum(bits[100:]) / 200

    calm, lively = surprise(2.0)[1], surprise(5.0)[1]
    assert calm < lively
    assert surprise(5.0, top_k=1, presence_penalty=9.0, dry_multiplier=9.0) == surprise(5.0)
    assert surprise(5.0, top_k=1)[0] != rows.argmax(axis=1).tolist()


def test_adaptive_p_draws_near_its_target(vocabulary: Vocabulary) -> None:
    row = _peaked(vocabulary.size, 7, 8, 9)  # probabilities 0.67, 0.24, 0.09
    with Sampler(vocabulary, Sampling(temperature=1.0, seed=2, adaptive_target=0.25)) as sampler:
        drawn = _generate(sampler, np.stack([row] * 200))
    assert drawn.count(8) > drawn.count(7)


def test_samplers_run_in_the_order_that_is_given_and_the_others_are_off(vocabulary: Vocabulary) -> None:
    row = _peaked(vocabulary.size, 7, 8, 9)
    options = {"temperature": 4.0, "min_p": 0.5}
    assert sorted(_drawn(vocabulary, row, **options)) == [7]
    assert sorted(_drawn(vocabulary, row, **options, samplers=("temperature", "min_p"))) == [7, 8, 9]
    off = Sampling(presence_penalty=2.0, dry_multiplier=1.0, xtc_probability=0.5, top_k=3, samplers=("top_p",))
    assert (off.temperature, off.presence_penalty, off.dry_multiplier, off.xtc_probability) == (1.0, 0.0, 0.0, 0.0)
    assert (off.top_k, off.top_p, off.penalizes) == (0, 0.95, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": True},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": 2**31},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**32 - 1},
        {"seed": 1.0},
        {"repeat_penalty": 0},
        {"repeat_last_n": -2},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, math.inf),)},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": [(1, 1.0)]},
        {"logit_bias": ((1,),)},
        {"grammar": 'root ::= "a"'},
        {"mirostat": 3},
        {"typical_p": 1.5},
        {"xtc_probability": -0.5},
        {"dry_base": 0.5},
        {"dry_penalty_last_n": 2**20 + 1},
        {"dry_sequence_breakers": ("",)},
        {"dry_sequence_breakers": ("a",) * 33},
        {"adaptive_decay": 1.0},
        {"samplers": ("top_k", "quadratic")},
        {"samplers": ["top_k"]},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(OptionError, match=name):
        Sampling(**wrong)
