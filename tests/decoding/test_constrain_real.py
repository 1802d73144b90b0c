"""The demo model in exact settings: answers that are drafted from their grammar alone are those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rest_local.calibration.curves import load_curve
from rest_local.decoding.engine import Engine
from rest_local.grammar import gbnf, json_schema, lark
from rest_local.llama.options import Sampling
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext, StepCost

DEMO = Path(__file__).parents[2] / "models" / "demo.gguf"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["self", "value", "name", "index"]}, "minItems": 6, "maxItems": 12},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
}
PROMPT = 'class Node:\n    """A node: {"name": "self", "tags": ["self", "self", "value", "value"], "size": 12}"""\n\n'

FORCED: dict[str, dict[str, object]] = {
    "schema": {"grammar": json_schema(SCHEMA)},
    "schema, draws and penalties": {
        "grammar": json_schema(SCHEMA), "temperature": 0.9, "seed": 5, "frequency_penalty": 0.3,
    },
    "grammar": {"grammar": gbnf('root ::= ("    self." [a-z_]{1,12} " = " [a-z_]{1,12} "\\n"){3,6}')},
    "forced call": {
        "grammar": lark('start: "<call>{\\"name\\": \\"set\\", \\"to\\": " number "}</call>"\nnumber: /[0-9]{1,3}/'),
        "temperature": 0.7,
        "seed": 2,
    },
}  # fmt: skip


class GrammarAlone(Auto):
    """Drafts forced text and nothing else, at the prices of a GPU."""

    def looks_up(self, at: StepContext, repeats: object) -> bool:
        return False

    def account(self, done: StepCost) -> None:
        ms = float(self.curve.at(done.n_ctx)[done.n_nodes])
        super().account(done._replace(decode_ms=ms, driver_ms=0.1, updates_curve=False))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(DEMO, n_ctx=512, exact=True, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("name", FORCED)
def test_an_answer_drafted_from_its_grammar_is_plain(engine: Engine, name: str) -> None:
    """Greedy and seeded, in chains, bit for bit; twice, since the second time more is known."""
    policy = GrammarAlone(load_curve("rtx3090-8b-q4_0"))
    sampling = Sampling(**FORCED[name])  # type: ignore[arg-type]
    plain = engine.generate(PROMPT, max_tokens=90, sampling=sampling, policy="off").wait()
    for _ in range(2):
        result = engine.generate(PROMPT, max_tokens=90, sampling=sampling, policy=policy.fork()).wait()
        assert result.tokens == plain.tokens
        assert result.text == plain.text
        assert result.finish_reason == plain.finish_reason
    assert set(result.draft.by_source) == {"grammar"}
    assert result.draft.by_source["grammar"].accepted > 5
