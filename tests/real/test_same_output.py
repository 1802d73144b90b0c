"""Drafting changes no character of a real model's answers: by default, and in exact mode however tokens are chosen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from rest_local import Engine, Result, Sampling, json_schema

CODE = """def total(values):
    result = 0
    for value in values:
        result += value
    return result


def mean(values):
    return total(values) / len(values)
"""
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "List five fruits and why they are good.",
    "Explain recursion in one paragraph.",
    "Write Python code that sorts a list of numbers.",
    "Count from one to twenty in words.",
    f"Copy this code without changes:\n\n```python\n{CODE}```",
    f"Rename `values` to `numbers` in this code:\n\n```python\n{CODE}```",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    'Write the same JSON three times: {"name": "Ann", "age": 31}',
    "Translate to German: Good morning, my friend. How are you today?",
    "Write an HTML table with the numbers 1 to 9 and their squares.",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REPEATING = 'Write the same JSON three times: {"name": "Ann", "age": 31}'


def answer(engine: Engine, question: str, **options: Any) -> Result:
    stream = engine.chat([{"role": "user", "content": question}], **options)
    for _ in stream:
        pass
    return stream.result


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    """Return an engine in the default settings, with the slots of `serve`."""
    with Engine.load(smollm2, n_ctx=1024, slots=4) as engine:
        yield engine


def test_drafting_keeps_twelve_answers_by_default(engine: Engine) -> None:
    plain = [answer(engine, question, max_tokens=24, policy="off") for question in QUESTIONS]
    drafted = [answer(engine, question, max_tokens=24) for question in QUESTIONS]
    assert [result.text for result in drafted] == [result.text for result in plain]
    assert sum(result.draft.accepted for result in drafted) > 0
    assert sum(result.draft.accepted for result in plain) == 0


def test_a_greedy_request_gives_the_same_answer_after_other_requests_and_in_every_slot(engine: Engine) -> None:
    """Nothing is drafted. If sums depended on the cells that a text lies in, this would give four answers."""
    others = ("Tell me about dogs.", "List three colours.", "x" * 50, "Write Python code that sorts a list.")
    texts, slots = set(), set()
    for turn in range(6):
        # Every other time its prompt is evaluated anew, in the slot that was used least recently.
        asked = "List five fruits and why they are good."
        result = answer(engine, asked, max_tokens=16, policy="off", keep_prefix=turn % 2 == 0)
        texts.add(result.text)
        slots.add(result.slot)
        answer(engine, others[turn % len(others)], max_tokens=8, policy="off")
    assert len(texts) == 1, texts
    assert len(slots) > 1, slots


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Iterator[Engine]:
    """Return an exact engine. In a context of this length, the self-test takes 256 rows."""
    with Engine.load(smollm2, n_ctx=768, exact=True) as engine:
        assert engine.decoder.context.exact
        yield engine


def test_drafting_keeps_answers_in_exact_mode_however_tokens_are_chosen(exact: Engine) -> None:
    vocabulary = exact.model.vocabulary
    (comma,) = vocabulary.tokenize(",")
    choices = {
        "a seed": exact.sampling(seed=7),
        "another seed": exact.sampling(seed=8),
        "penalties": Sampling(repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
        "a bias": Sampling(logit_bias=((int(comma), -5.0),)),
        "DRY": Sampling(dry_multiplier=0.5, dry_allowed_length=3),
        "min-p": Sampling(temperature=1.2, min_p=0.2, top_k=0, top_p=1.0, seed=9),
        "a schema": exact.sampling(seed=10, grammar=json_schema(SCHEMA)),
    }
    accepted = {}
    for name, sampling in choices.items():
        plain, drafted = (
            answer(exact, REPEATING, max_tokens=40, sampling=sampling, policy=policy) for policy in ("off", None)
        )
        assert drafted.tokens == plain.tokens, name
        accepted[name] = drafted.draft.accepted
        if name == "a schema":
            jsonschema_rs.validate(SCHEMA, json.loads(drafted.text))
    assert sum(accepted.values()) > 0
