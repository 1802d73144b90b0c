"""How far JSON schemas are kept: the cases of the public JSON-Schema-Test-Suite, against what an answer may be.

    python -m benchmarks json_schema_suite FOLDER [--draft NAME]... [--optional] [--details] [--save FILE]
        [--compositions N]

FOLDER is `tests` of the suite; the source distribution of `jsonschema` has it as `json/tests`:

    pip download --no-deps --no-binary :all: jsonschema && tar xf jsonschema-*.tar.gz

Each schema is compiled as for a request. It is refused, with the reason, or its instances are written as JSON and
followed byte by byte. Counted by keyword:

- refused: schemas that a request may not use;
- accepted, rejected: valid instances that an answer may be, and invalid ones that it cannot be;
- restricted: valid instances that an answer cannot be, with the cause: `order` (the members come in another order),
  `closed` (further members, large numbers: limits of ours), `digits` (an integer is written as 1.0), `other`;
- broken: invalid instances that an answer may be. Every one is a fault or a limit that docs/howto/json.md names.

`--compositions` then composes so many pairs of schemas of draft 2020-12 at random, and compares with a validator which
of the instances of both an answer may be. Ends in one line of JSON. Takes ten seconds, 1 000 compositions another 14.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, permutations, product
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np
from numpy.typing import NDArray

from rest_local.errors import OptionError
from rest_local.grammar import Grammar, json_schema
from rest_local.grammar.compiler import Tokens
from rest_local.grammar.constraint import Constraint

DRAFTS = ("draft2020-12", "draft7")
OLD_DRAFTS = {f"draft{number}": f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)}
MOST_ORDERS = 200
END = 256


class Bytes:
    """A vocabulary of all bytes and an end token."""

    size = 257
    ends: NDArray[np.int32] = np.array([END], np.int32)

    def __init__(self) -> None:
        self._tokens = Tokens([bytes([byte]) for byte in range(256)] + [b"<end>"], [END], [END], self._encode)

    @staticmethod
    def _encode(text: str | bytes) -> Sequence[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def is_end(self, token: int) -> bool:
        """Return True if this is the end token."""
        return token == END

    def grammar_tokens(self) -> Tokens:
        """Return the tokens for `Constraint`."""
        return self._tokens

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Return True if an answer may be this text."""
        constraint = Constraint(self, grammar)
        return all(constraint.follow(byte) for byte in text.encode()) and constraint.allows(END)


@dataclass
class Count:
    """The results of the cases of one keyword."""

    schemas: int = 0
    refused: int = 0
    accepted: int = 0
    rejected: int = 0
    restricted: Counter[str] = field(default_factory=Counter)
    broken: int = 0


@dataclass
class Suite:
    """A run of the cases, which remembers what is worth reading."""

    vocabulary: Bytes = field(default_factory=Bytes)
    counts: dict[str, Count] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def run(self, keyword: str, cases: Sequence[Mapping[str, Any]]) -> None:
        """Count the cases of one keyword."""
        count = self.counts.setdefault(keyword, Count())
        for case in cases:
            count.schemas += 1
            try:
                grammar = json_schema(case["schema"])
            except OptionError as error:
                count.refused += 1
                self.reasons[str(error)] += 1
                self.details.append(f"refused     {keyword}: {case['description']}: {error}")
                continue
            for test in case["tests"]:
                self._instance(count, f"{keyword}: {case['description']}", grammar, case["schema"], test)

    def _instance(self, count: Count, name: str, grammar: Grammar, schema: Any, test: Mapping[str, Any]) -> None:
        value = test["data"]
        allowed = [self.vocabulary.accepts(grammar, text) for text in _forms(value)]
        said = f"{name}: {json.dumps(value)[:80]} with {json.dumps(schema)[:300]}"
        if not test["valid"]:
            count.broken += any(allowed)
            count.rejected += not any(allowed)
            if any(allowed):
                self.details.append(f"broken      {said}")
        elif all(allowed):
            count.accepted += 1
        else:
            cause = self._cause(grammar, schema, value)
            count.restricted[cause] += 1
            self.details.append(f"restricted  {cause}: {said}")

    def _cause(self, grammar: Grammar, schema: Any, value: Any) -> str:
        for other in islice(_orders(value), MOST_ORDERS):
            if self.vocabulary.accepts(grammar, json.dumps(other, ensure_ascii=False)):
                return "order"
        if self.vocabulary.accepts(grammar, json.dumps(_whole(value), ensure_ascii=False)):
            return "digits"
        plain = Grammar(f"start: %json {json.dumps(schema)}", "")
        try:
            return "closed" if self.vocabulary.accepts(plain, json.dumps(value, ensure_ascii=False)) else "other"
        except OptionError:
            return "other"


def _forms(value: Any) -> list[str]:
    """Write the value as clients do: compact, on one line, indented."""
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return [compact, *(json.dumps(value, ensure_ascii=False, indent=indent) for indent in (None, 2))]


def _orders(value: Any) -> Iterator[Any]:
    """Yield the value with the members of its objects in every order."""
    if isinstance(value, list):
        yield from (list(each) for each in product(*(list(islice(_orders(item), MOST_ORDERS)) for item in value)))
    elif isinstance(value, dict):
        for names in permutations(value):
            inner = [list(islice(_orders(value[name]), MOST_ORDERS)) for name in names]
            yield from (dict(zip(names, each, strict=True)) for each in product(*inner))
    else:
        yield value


def _whole(value: Any) -> Any:
    """Replace floats that are whole by integers."""
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _files(folder: Path, optional: bool) -> Iterator[tuple[str, Path]]:
    yield from ((path.stem, path) for path in sorted(folder.glob("*.json")))
    if optional:
        inner = folder / "optional"
        yield from (
            (f"optional {path.relative_to(inner).with_suffix('')}", path) for path in sorted(inner.rglob("*.json"))
        )


def _of(draft: str, case: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name the draft in the schema of the case, if drafts differ and the suite leaves it out."""
    schema = case["schema"]
    if not isinstance(schema, Mapping) or "$schema" in schema or draft not in OLD_DRAFTS:
        return case
    return {**case, "schema": {"$schema": OLD_DRAFTS[draft], **schema}}


class Compositions:
    """A source of random pairs of schemas of the suite as one schema, with the instances of both."""

    LEFT_OUT = ("ref", "refRemote", "anchor", "defs", "dynamicRef", "vocabulary", "format", "infinite-loop-detection")

    def __init__(self, folder: Path, seed: int = 1) -> None:
        paths = [path for path in sorted(folder.glob("*.json")) if path.stem not in self.LEFT_OUT]
        cases = [case for path in paths for case in json.loads(path.read_text(encoding="utf-8"))]
        self._pool = [
            (_without_names(case["schema"]), [test["data"] for test in case["tests"] if not _is_large(test["data"])])
            for case in cases
        ]
        self._random = Random(seed)

    def next(self) -> tuple[Any, list[Any]]:
        """Return a schema and its instances."""
        (first, values), (second, others) = self._random.choice(self._pool), self._random.choice(self._pool)
        both = values + others
        merged = {"allOf": [first, second]}
        if isinstance(first, dict) and isinstance(second, dict):
            merged = {**first, **second}
        kinds = ["object", "array", "string", "integer", "number"]
        return self._random.choice(
            [
                ({"allOf": [first, second]}, both),
                ({"anyOf": [first, second]}, both),
                (merged, both),
                ({**merged, "type": self._random.choice(kinds)}, both),
                ({**merged, "$ref": "#/$defs/other", "$defs": {"other": second}}, both),
                ({"type": "array", "items": merged}, [[value] for value in both]),
                (
                    {"type": "object", "properties": {"x": first, "y": second}, "required": ["x"]},
                    [{"x": x, "y": y} for x, y in zip(values, others, strict=False)],
                ),
            ]
        )

    def run(self, number: int, vocabulary: Bytes) -> Iterator[tuple[str, str]]:
        """Yield the result of each instance, or of the schema, and the case."""
        for _ in range(number):
            schema, values = self.next()
            try:
                validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
                grammar = json_schema(schema)
            except (OptionError, jsonschema_rs.ValidationError):
                yield "refused", json.dumps(schema)
                continue
            for value in values:
                valid, allowed = validator.is_valid(value), vocabulary.accepts(grammar, json.dumps(value))
                found = ("accepted" if allowed else "restricted") if valid else "broken" if allowed else "rejected"
                yield found, f"{json.dumps(value)} with {json.dumps(schema)}"


def _without_names(schema: Any) -> Any:
    return {name: value for name, value in schema.items() if name[0] != "$"} if isinstance(schema, dict) else schema


def _is_large(value: Any) -> bool:
    """Return True if the value has numbers that the validator rounds."""
    if isinstance(value, (list, dict)):
        return any(_is_large(each) for each in (value if isinstance(value, list) else value.values()))
    return isinstance(value, (int, float)) and abs(value) > 1e15


def _table(counts: Mapping[str, Count]) -> Iterator[str]:
    yield "| keyword | schemas | refused | valid: accepted | restricted | invalid: rejected | broken |"
    yield "|---|---|---|---|---|---|---|"
    for name, count in counts.items():
        causes = ", ".join(f"{number} {cause}" for cause, number in sorted(count.restricted.items())) or "0"
        yield (
            f"| {name} | {count.schemas} | {count.refused} | {count.accepted} | {causes} | {count.rejected} "
            f"| {count.broken} |"
        )


def _sum(counts: Mapping[str, Count]) -> dict[str, int]:
    numbers = ("schemas", "refused", "accepted", "rejected", "broken")
    found = {name: sum(getattr(count, name) for count in counts.values()) for name in numbers}
    return found | {"restricted": sum(count.restricted.total() for count in counts.values())}


def main() -> None:
    """Run the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="`tests` of the suite")
    parser.add_argument("--draft", action="append", help=f"folders of drafts (default: {' and '.join(DRAFTS)})")
    parser.add_argument("--optional", action="store_true", help="also the optional cases: formats, large numbers")
    parser.add_argument("--details", action="store_true", help="print every case that is refused, restricted or broken")
    parser.add_argument("--compositions", type=int, default=0, help="random pairs of schemas (default: none)")
    parser.add_argument("--save", type=Path, help="write the details to this file")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    details: list[str] = []
    for draft in options.draft or DRAFTS:
        suite = Suite()
        for name, path in _files(options.folder / draft, options.optional):
            suite.run(name, [_of(draft, case) for case in json.loads(path.read_text(encoding="utf-8"))])
        if not suite.counts:
            raise SystemExit(f"{options.folder / draft}: no cases; name the folder `tests` of the suite")
        print(f"\n{draft}\n", *_table(suite.counts), sep="\n")
        details += [f"{draft} {line}" for line in suite.details]
        result[draft] = _sum(suite.counts)
    if options.compositions:
        found = list(Compositions(options.folder / DRAFTS[0]).run(options.compositions, Bytes()))
        result["compositions"] = dict(Counter(kind for kind, _ in found))
        details += [f"compositions broken {said}" for kind, said in found if kind == "broken"]
    if options.details:
        print("", *details, sep="\n")
    if options.save:
        options.save.write_text("\n".join([*details, ""]), encoding="utf-8")
    print(json.dumps(result))
