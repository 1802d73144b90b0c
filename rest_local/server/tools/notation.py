"""Grammars for arguments in notations that are nearly JSON: Python's and Gemma's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rest_local.llama.grammar import Rules, literal

_DEEPEST = 12


@dataclass(frozen=True)
class Notation:
    """How values are spelled. `text`: the rule of a text; `key`: a member's name; `written`: a constant as a literal's
    text. `sort`: members come by name, not in the schema's order."""

    rules: Rules
    text: str
    true: str
    false: str
    null: str
    comma: str
    colon: str
    key: Callable[[str], str]
    written: Callable[[Any], str]
    sort: bool = False

    def value(self, schema: Any, depth: int = 0) -> str:
        """The name of a rule. Where the schema says no type, or is too deep, any value."""
        known = schema if isinstance(schema, Mapping) and depth < _DEEPEST else {}
        values, kind = known.get("enum", [known["const"]] if "const" in known else None), known.get("type")
        if isinstance(values, list) and values:
            return self.rules.add(" | ".join(literal(self.written(value)) for value in values))
        if kind in ("integer", "number"):
            return self.rules.json(str(kind))
        if kind == "boolean":
            return self.rules.add(f"{literal(self.true)} | {literal(self.false)}")
        if kind == "null":
            return self.rules.add(literal(self.null))
        if kind == "array":
            return self.rules.add(self._array(self.value(known.get("items"), depth + 1)))
        if kind == "object" and known.get("properties"):
            members = self.members(known, self.key, literal(self.colon), depth + 1)
            return self.rules.add(f'"{{" {members} "}}"')
        return {"string": self.text, "object": self.rules.add(self._map())}.get(str(kind), self._anything())

    def members(self, schema: Mapping[str, Any], key: Callable[[str], str], colon: str, depth: int = 0) -> str:
        """A rule for the members of an object, required ones always; from right to left, as in `json_schema`: what may
        follow with nothing said yet, and with something. `colon`: a GBNF literal."""
        properties, required = schema.get("properties"), schema.get("required")
        names = list(properties) if isinstance(properties, Mapping) else []
        first, later = '""', '""'
        for name in reversed(sorted(names) if self.sort else names):
            assert isinstance(properties, Mapping)
            value = self.value(properties[name], depth)
            said = f"{literal(key(name))} {colon} {value} {self.rules.add(later)}"
            must = isinstance(required, list) and name in required
            later, first = (
                f"{literal(self.comma)} {said}" + ("" if must else f" | {self.rules.add(later)}"),
                said + ("" if must else f" | {self.rules.add(first)}"),
            )
        return self.rules.add(first)

    def _array(self, item: str) -> str:
        return f'"[" ({item} ({literal(self.comma)} {item})*)? "]"'

    def _map(self) -> str:
        member = self.rules.add(f"{self.text} {literal(self.colon)} {self._anything()}")
        return f'"{{" ({member} ({literal(self.comma)} {member})*)? "}}"'

    def _anything(self) -> str:
        value = self.rules.reserve()
        member = f"{self.text} {literal(self.colon)} {value}"
        constants = " | ".join(map(literal, (self.true, self.false, self.null)))
        mapping = f'"{{" ({member} ({literal(self.comma)} {member})*)? "}}"'
        self.rules.set(
            value, f"{self.text} | {self.rules.json('number')} | {constants} | {self._array(value)} | {mapping}"
        )
        return value
