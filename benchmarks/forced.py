"""How many forward passes forced text saves: answers that a grammar constrains, drafted from the grammar alone.

    python -m benchmarks.forced [--model GGUF] [--vocab GGUF] [--curves NAME...] [--values N]

Two parts. The first runs a model (the demo model by default), greedy: forward passes of plain constrained decoding
against those with drafts of the source `grammar`, nothing else looked up, in exact settings (chains; `differing` is 0)
and in fast ones (trees, where a larger batch can change the last bits of the logits). What a step costs is what a
shipped curve says, so that the plan is that of a real machine. `cold` is an engine that has learned nothing yet, `warm`
one that has answered each case once. The second part replays values as `json.dumps` writes them, on one line and
indented, split as a vocabulary splits them (`--vocab`), and reports the speed-up that each curve implies.

Forward passes are counted, not timed. Every answer has ten fields; the prompt shows two examples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rest_local.bench.recorded import Recorded
from rest_local.bench.replay import replay
from rest_local.calibration.curves import load_curve
from rest_local.chat.tools.format import Tool
from rest_local.chat.tools.hermes import HERMES
from rest_local.decoding.engine import Engine
from rest_local.decoding.stream import Result
from rest_local.drafting.candidates import NO_BIGRAM, ForcedRows
from rest_local.drafting.growth import Draft
from rest_local.drafting.sources import Lookup, Sources
from rest_local.grammar import Grammar, json_schema
from rest_local.grammar.constraint import Constraint
from rest_local.grammar.grammar import Lark
from rest_local.llama.model import Model
from rest_local.llama.sampling import Sampling
from rest_local.llama.vocabulary import Vocabulary
from rest_local.paths import demo_model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext, StepCost

CURVES = ("rtx3090-8b-q4_0", "xeon-amx-1.5b-q4_k")  # a GPU, and a CPU whose batch of two costs 1.7 plain steps
DRIVER_MS = (0.05, 0.15)  # what a plain step and one with a draft are said to take in addition
MAX_TOKENS = 600
PROMPTS = (1, 3, 5, 7)  # of each case; the demo model writes other white space and other values after each
WORDS = (
    "data",
    "test",
    "value",
    "report",
    "index",
    "main server",
    "client",
    "cache",
    "error",
    "state",
    "order",
    "note",
)

Schema = Mapping[str, Any]
STRING, INTEGER, BOOLEAN = {"type": "string", "maxLength": 24}, {"type": "integer"}, {"type": "boolean"}


def one_of(*values: str) -> Schema:
    """A choice of texts."""
    return {"enum": list(values)}


def record(**fields: Schema) -> Schema:
    """An object of exactly these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


@dataclass(frozen=True)
class Case:
    """Answers of one schema; `function`: those are the arguments of a forced call of it."""

    name: str
    schema: Schema
    function: str = ""

    @property
    def grammar(self) -> Grammar:
        """What an answer has to be."""
        if not self.function:
            return json_schema(self.schema)
        lark = Lark()
        return lark.grammar(HERMES.force(lark, [Tool(self.function, self.schema, False, {})], False))

    def answer(self, seed: int, indent: int | None = None) -> str:
        """A random answer. What the grammar of a call writes around the arguments is not indented."""
        value = json.dumps(_value(self.schema, Random(seed)), indent=indent)
        if not self.function:
            return value
        return f'<tool_call>\n{{"name": "{self.function}", "arguments": {value}}}\n</tool_call>'


def _value(schema: Schema, random: Random) -> Any:
    if "enum" in schema:
        return random.choice(schema["enum"])
    if schema["type"] == "object":
        return {name: _value(field, random) for name, field in schema["properties"].items()}
    if schema["type"] == "array":
        return [_value(schema["items"], random) for _ in range(schema["minItems"])]
    if schema["type"] == "string":
        return " ".join(random.sample(WORDS, random.randint(1, 3)))[:24]
    return random.random() < 0.5 if schema["type"] == "boolean" else random.randint(0, 9999)


POINT = record(x=INTEGER, y=INTEGER)
MODES = one_of("read", "write", "append")
CASES = (
    Case(
        "strings",
        record(
            name=STRING, title=STRING, path=STRING, text=STRING, value=STRING, help=STRING, type=STRING, owner=STRING,
            group=STRING, note=STRING,
        ),
    ),
    Case(
        "integers",
        record(
            id=INTEGER, size=INTEGER, width=INTEGER, height=INTEGER, depth=INTEGER, start=INTEGER, stop=INTEGER,
            step=INTEGER, count=INTEGER, index=INTEGER,
        ),
    ),
    Case(
        "booleans",
        record(
            valid=BOOLEAN, binary=BOOLEAN, hidden=BOOLEAN, open=BOOLEAN, done=BOOLEAN, empty=BOOLEAN, new=BOOLEAN,
            local=BOOLEAN, strict=BOOLEAN, debug=BOOLEAN,
        ),
    ),
    Case(
        "mixed",
        record(
            id=INTEGER, name=STRING, path=STRING, size=INTEGER, valid=BOOLEAN, mode=MODES,
            encoding=one_of("utf-8", "ascii", "latin-1"), lines=INTEGER, binary=BOOLEAN, owner=STRING,
        ),
    ),
    Case(
        "nested",
        record(
            name=STRING, start=POINT, stop=POINT, style=record(color=one_of("red", "green", "blue"), width=INTEGER),
            visible=BOOLEAN, layer=INTEGER,
        ),
    ),
    Case("list", {"type": "array", "items": record(name=STRING, done=BOOLEAN), "minItems": 5, "maxItems": 5}),
    Case(
        "call",
        record(
            path=STRING, mode=MODES, encoding=one_of("utf-8", "ascii"), buffering=INTEGER, create=BOOLEAN,
            newline=BOOLEAN, start=INTEGER, stop=INTEGER, timeout=INTEGER, strict=BOOLEAN,
        ),
        "open_file",
    ),
)  # fmt: skip


class GrammarAlone(Auto):
    """`auto` that looks nothing up, and takes the price of every step from its curve."""

    def looks_up(self, at: StepContext, repeats: object) -> bool:
        """Never."""
        return False

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """As `auto` does, with the curve's times in place of this machine's."""
        ms = float(self.curve.at(done.n_ctx)[done.n_nodes])
        driver_ms = DRIVER_MS[done.n_nodes > 0]
        super().learn(drafted, tokens, done._replace(decode_ms=ms, driver_ms=driver_ms, updates_curve=False))


class Replayed(GrammarAlone):
    """The same for a recorded answer: follows the grammar itself, because a replay has no sampler that does."""

    _constraint: Constraint
    _said: list[int]

    def start(self, constraint: Constraint, first: int) -> Replayed:
        """One for the next answer, of which `first` is known."""
        other = self.fork()
        assert isinstance(other, Replayed)
        other._constraint, other._said = constraint, [*NO_BIGRAM]
        other._advance([first])
        return other

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        """With what the grammar forces."""
        return super().draft(sources, at._replace(forced=lambda path: self._forced(at.limit, path)))

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """The grammar moves on, too."""
        super().learn(drafted, tokens, done)
        self._advance(tokens)

    def _advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._constraint.advance(token)
            self._said.append(token)

    def _forced(self, most: int, path: Sequence[int]) -> list[ForcedRows]:
        text = self._constraint.forced(most, path)
        return [] if text is None else [ForcedRows(text, (self._said[-2], self._said[-1]))]


def passes(
    engine: Engine, curve: str, prompts: Sequence[int] = PROMPTS, *, known: dict[tuple[str, int], Result] | None = None
) -> list[dict[str, Any]]:
    """By case: tokens, plain and drafted forward passes, cold and warm, and answers that differ from the plain ones.

    `known`: plain answers of this engine by case and prompt, which no curve changes; new ones are added."""
    known = {} if known is None else known
    learned = GrammarAlone(load_curve(curve))
    for case in CASES:
        _generate(engine, case, prompts[-1], learned.fork())
    rows = []
    for case in CASES:
        row = dict.fromkeys(("tokens", "plain", "cold", "warm", "differing", "drafted", "accepted"), 0)
        for seed in prompts:
            if (case.name, seed) not in known:
                known[case.name, seed] = _generate(engine, case, seed, "off")
            plain = known[case.name, seed]
            cold = _generate(engine, case, seed, GrammarAlone(load_curve(curve)))
            warm = _generate(engine, case, seed, learned.fork())
            row["tokens"] += len(plain.tokens)
            for name, result in (("plain", plain), ("cold", cold), ("warm", warm)):
                row[name] += result.draft.steps
                row["differing"] += result.tokens != plain.tokens
            row["drafted"] += cold.draft.drafted
            row["accepted"] += cold.draft.accepted
        rows.append({"case": case.name, **row})
    return rows


def _generate(engine: Engine, case: Case, seed: int, policy: Any) -> Result:
    """An answer to a prompt that shows two others, made from `seed`."""
    prompt = f"# examples\n{case.answer(seed)}\n{case.answer(seed + 1)}\n"
    sampling = Sampling(grammar=case.grammar)
    stream = engine.generate(prompt, max_tokens=MAX_TOKENS, sampling=sampling, policy=policy)
    for _ in stream:
        pass
    return stream.result


def replayed(vocabulary: Vocabulary, curve: str, indent: int | None, values: int) -> list[dict[str, Any]]:
    """By case: tokens, forward passes and the speed-up by the curve, over `values` random answers."""
    rows = []
    for case in CASES:
        costs = load_curve(curve)
        policy = Replayed(load_curve(curve))
        tokens = steps = 0
        plain_ms = drafted_ms = 0.0
        for seed in range(values):
            answer = _tokens(vocabulary, case.answer(seed, indent))
            prompt = _tokens(vocabulary, f"An answer: {case.answer(seed + 1, indent)}")
            own = policy.start(Constraint(vocabulary, case.grammar), answer[0])
            sources = Sources([], vocabulary.size)
            tally = replay([Recorded(case.name, prompt, answer)], lambda: sources, own, costs)  # noqa: B023
            assert not tally.changed
            tokens, steps = tokens + tally.tokens, steps + tally.steps
            plain_ms, drafted_ms = plain_ms + tally.plain_ms, drafted_ms + tally.drafted_ms
        rows.append({"case": case.name, "tokens": tokens, "passes": steps, "speedup": round(plain_ms / drafted_ms, 3)})
    return rows


def _tokens(vocabulary: Vocabulary, text: str) -> list[int]:
    """Of a text that begins a line; SentencePiece would put a space before it."""
    tokens: list[int] = vocabulary.tokenize(f"\n{text}").tolist()
    while len(b"".join(map(vocabulary.piece, tokens))) > len(text.encode()):
        del tokens[0]
    return tokens


def run(model: str | None, vocab: str | None, curves: Sequence[str], values: int) -> dict[str, Any]:
    """Both parts. Raises what loading and generating raise."""
    found: dict[str, Any] = {"passes": {}, "replay": {}}
    for mode in ("exact", "fast"):
        with Engine.load(model, n_ctx=2048, exact=mode == "exact", threads=1) as engine:
            plain: dict[tuple[str, int], Result] = {}
            for curve in curves:
                name = f"{curve}, {mode}"
                rows = passes(engine, curve, known=plain)
                _print(f"forward passes, {name}", rows)
                totals = {how: sum(row[how] for row in rows) for how in ("plain", "cold", "warm")}
                ratios = {how: round(totals[how] / totals["plain"], 3) for how in ("cold", "warm")}
                found["passes"][name] = {"cases": rows, "of plain": ratios}
                print(f"of plain: {ratios}")
    with Model.open(vocab or demo_model(), vocab_only=True) as opened:
        for curve in curves:
            for name, indent in (("one line", None), ("indented", 2)):
                rows = replayed(opened.vocabulary, curve, indent, values)
                found["replay"][f"{curve}, {name}"] = rows
                _print(f"replay, {curve}, {name}", rows)
    return found


def _print(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{title}\n" + "".join(f"{name:>11}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>11}" for value in row.values()))


def main() -> None:
    """A table for each part, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF; without it the demo model")
    parser.add_argument(
        "--vocab", help="GGUF whose vocabulary splits the replayed answers; without it the demo model's"
    )
    parser.add_argument("--curves", nargs="+", default=CURVES, metavar="NAME")
    parser.add_argument("--values", type=int, default=20, help="answers of each case that are replayed")
    args = parser.parse_args()
    print(json.dumps(run(args.model, args.vocab, args.curves, args.values)))


if __name__ == "__main__":
    main()
