"""JSON schemas (drafts 4 to 2020-12) as grammar rules.

Contract: what is generated is valid by the keywords understood; not everything valid can be generated. Understood: type
(also a list), enum, const, $ref within the schema (also recursive), anyOf, oneOf (as anyOf), allOf, nullable;
properties, required, additionalProperties; items, prefixItems, minItems, maxItems; minLength, maxLength, pattern;
formats date, time, date-time, uuid; minimum and maximum of integers. Properties come in their order, further ones only
where none are named. Left to the model, as in llama-server: bounds of other numbers (but for the sign), uniqueItems,
multipleOf, number of properties, other formats, length beside a pattern. What would change the shape and is not
understood is refused.

Not llama-cpp-python's converter (0.3.36): there a quote in a constant breaks the grammar, strings hold raw line breaks,
`.` in a pattern can end the string, and recursive definitions with `_` in their name have no rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rest_local.errors import OptionError
from rest_local.llama.digits import integers
from rest_local.llama.grammar import MOST_REPEATS, Rules, literal
from rest_local.llama.pattern import pattern_rule

_DEEPEST = 64
_MOST_PARTS = 5000
_REFUSED = (
    *("not", "if", "patternProperties", "propertyNames", "contains", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_SAYS_TYPE = {  # keywords that say what is meant where no type is given
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_SHAPES = (
    *("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "nullable"),
    *(keyword for keywords in _SAYS_TYPE.values() for keyword in keywords),
)
_DATE = '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | "1" [0-9] | "2" [0-8])'  # a day that every month has
_TIME = (
    '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? '
    '("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
)
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": '[0-9a-f]{8} ("-" [0-9a-f]{4}){3} "-" [0-9a-f]{12}',
}
_QUOTE = literal('"')


class Schema:
    """One schema, the document that its references look into, being turned into rules."""

    def __init__(self, rules: Rules, schema: Any) -> None:
        self._rules, self._document = rules, schema
        self._parts = 0
        self._referred: dict[str, str] = {}

    def root(self) -> str:
        """The name of the rule for the whole schema. Raises OptionError."""
        return self.rule(self._document, "#", 0)

    def rule(self, schema: Any, path: str, depth: int = 0) -> str:
        """The name of the rule for a part. `path`: for messages."""
        self._parts += 1
        if depth > _DEEPEST:
            raise _wrong(path, f"deeper than {_DEEPEST} levels")
        if self._parts > _MOST_PARTS:
            raise _wrong(path, f"more than {_MOST_PARTS} parts")
        if schema is True:
            return self._rules.json("value")
        if not isinstance(schema, Mapping):
            raise _wrong(path, "allows nothing" if schema is False else f"{type(schema).__name__} is no schema")
        for keyword in _REFUSED:
            if keyword in schema:
                raise _wrong(path, f"{keyword!r} is not supported")
        return self._shaped({key: value for key, value in schema.items() if key in _SHAPES}, path, depth)

    def _shaped(self, schema: dict[str, Any], path: str, depth: int) -> str:
        if "$ref" in schema:
            return self._reference(schema, path, depth)
        if "allOf" in schema:
            return self._shaped(self._all_of(schema, path), path, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                base = {key: value for key, value in schema.items() if key != keyword}
                options = _list(schema[keyword], f"{path}/{keyword}")
                return self._union(
                    [_merged(base, option, path) if base else option for option in options], f"{path}/{keyword}", depth
                )
        if schema.get("nullable") is True:
            plain = {key: value for key, value in schema.items() if key != "nullable"}
            return self._union([plain, {"type": "null"}], path, depth)
        if "const" in schema or "enum" in schema:
            return self._constants(schema, path)
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._union([{**schema, "type": one} for one in _list(kind, f"{path}/type")], path, depth)
        if kind is None:
            kind = next((kind for kind, words in _SAYS_TYPE.items() if any(word in schema for word in words)), "value")
        elif kind not in _TYPES:
            raise _wrong(path, f"type {kind!r} is none of {', '.join(_TYPES)}")
        return self._typed(kind, schema, path, depth)

    def _typed(self, kind: str, schema: dict[str, Any], path: str, depth: int) -> str:
        if kind == "object":
            return self._object(schema, path, depth)
        if kind == "array":
            return self._array(schema, path, depth)
        if kind == "string":
            return self._string(schema, path)
        if kind in ("integer", "number"):
            return self._number(kind, schema, path)
        return self._rules.json(kind)

    def _union(self, options: list[Any], path: str, depth: int) -> str:
        return self._rules.add(
            " | ".join(self.rule(option, f"{path}/{i}", depth + 1) for i, option in enumerate(options))
        )

    def _reference(self, schema: dict[str, Any], path: str, depth: int) -> str:
        target, name = self._resolved(schema, path)
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        if beside and isinstance(target, Mapping):
            known = {key: value for key, value in target.items() if key in _SHAPES}
            merged = _merged(known, beside, path)
            if merged != known:
                return self.rule(merged, path, depth + 1)
        if name not in self._referred:
            self._referred[name] = self._rules.reserve()  # before its parts: they may refer to it
            self._rules.set(self._referred[name], self.rule(target, name, depth + 1))
        return self._referred[name]

    def _resolved(self, schema: Mapping[str, Any], path: str) -> tuple[Any, str]:
        """What a reference means in the end, and its name; references to references are followed."""
        seen: set[str] = set()
        while True:
            name = schema["$ref"]
            if not isinstance(name, str) or (name != "#" and not name.startswith("#/")):
                raise _wrong(path, f"$ref {str(name)[:80]!r}: only references within the schema (#/...) are followed")
            if name in seen:
                raise _wrong(path, f"$ref {name[:80]!r} refers to itself")
            seen.add(name)
            target = self._find(name, path)
            if not (isinstance(target, Mapping) and "$ref" in target):
                return target, name
            schema = target

    def _find(self, name: str, path: str) -> Any:
        target = self._document
        for part in name.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and len(key) < 7 and int(key) < len(target):
                target = target[int(key)]
            else:
                raise _wrong(path, f"$ref {name[:80]!r} is not in the schema")
        return target

    def _all_of(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        whole = {key: value for key, value in schema.items() if key != "allOf"}
        for i, part in enumerate(_list(schema["allOf"], f"{path}/allOf")):
            if isinstance(part, Mapping) and "$ref" in part:
                part = self._resolved(part, path)[0]
            whole = _merged(whole, part, f"{path}/allOf/{i}")
            self._parts += 1
        return whole

    def _constants(self, schema: Mapping[str, Any], path: str) -> str:
        values = [schema["const"]] if "const" in schema else _list(schema["enum"], f"{path}/enum")
        kinds = schema.get("type", _TYPES)
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        fitting = [value for value in values if any(_is(kind, value) for kind in kinds)]
        if not fitting:
            raise _wrong(path, "none of its constants has its type")
        try:
            texts = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in fitting]
        except (ValueError, RecursionError) as error:
            raise _wrong(path, f"a constant that is no JSON: {error}") from error
        return self._rules.add(" | ".join(map(literal, texts)))

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _wrong(path, "properties is an object and required a list")
        named = {**properties, **{str(name): True for name in required if name not in properties}}
        further = schema.get("additionalProperties", True)
        space = self._rules.json("space")
        if named:
            inner = self._members(named, {str(name) for name in required}, path, depth)
            return self._rules.add(f'"{{" {space} {inner} "}}"')
        if further is False:
            return self._rules.add(f'"{{" {space} "}}"')
        if further is True:
            return self._rules.json("object")
        value = self.rule(further, f"{path}/additionalProperties", depth + 1)
        member = self._rules.add(f'{self._rules.json("string")} {space} ":" {space} {value}')
        return self._rules.add(f'"{{" {space} ({member} ({space} "," {space} {member})* {space})? "}}"')

    def _members(self, named: dict[str, Any], required: set[str], path: str, depth: int) -> str:
        """Right to left: a member from each place on, behind its quote, and what may follow it.

        Quote and comma stand outside the alternatives: the time of a mask grows with the ways that begin at a place
        (200 members, 152 k tokens, busy machine: median 247 ms with them inside, 139 ms so)."""
        space = self._rules.json("space")
        names = list(named)
        last = max((i for i, name in enumerate(names) if name in required), default=-1)
        following, after = "", space
        for i in reversed(range(len(names))):
            value = self.rule(named[names[i]], f"{path}/properties/{names[i]}"[:200], depth + 1)
            key = literal(json.dumps(names[i], ensure_ascii=False)[1:])
            way = f'{key} {space} ":" {space} {value} {self._rules.add(after)}'
            others = f" | {following}" if following and names[i] not in required else ""
            following = self._rules.add(way + others)
            after = f'{space} "," {space} {_QUOTE} {following}' + (f" | {space}" if i > last else "")
        return self._rules.add(f"{_QUOTE} {following}" + (' | ""' if last < 0 else ""))

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> str:
        items = schema.get("items", True)
        fixed = items if isinstance(items, list) else schema.get("prefixItems", [])
        least, most = _bounds(schema, "minItems", "maxItems", path)
        parts = [self.rule(part, f"{path}/items/{i}", depth + 1) for i, part in enumerate(fixed)]
        parts = parts[:most] if most is not None else parts
        further = not isinstance(items, list) and items is not False and (not fixed or "items" in schema)
        if not further and least > len(parts):
            raise _wrong(path, f"minItems {least}, and only {len(parts)} items are described")
        space = self._rules.json("space")
        comma = f'{space} "," {space}'
        body = f" {comma} ".join(parts)
        if further and (most is None or most > len(parts)):
            item = self.rule(items, f"{path}/items", depth + 1)
            low, high = max(least - len(parts), 0), None if most is None else most - len(parts)
            body = _repeated(item, comma, low, high, bool(parts), body)
        return self._rules.add(f'"[" {space} {body} {space} "]"')

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise _wrong(path, "pattern is a string")
            return self._rules.add(f"{_QUOTE} {pattern_rule(self._rules, schema['pattern'])} {_QUOTE}")
        if schema.get("format") in _FORMATS:
            return self._rules.add(f"{_QUOTE} {_FORMATS[schema['format']]} {_QUOTE}")
        least, most = _bounds(schema, "minLength", "maxLength", path)
        if least == 0 and most is None:
            return self._rules.json("string")
        return self._rules.add(f"{_QUOTE} {self._rules.json('char')}{_times(least, most)} {_QUOTE}")

    def _number(self, kind: str, schema: Mapping[str, Any], path: str) -> str:
        low, high = _limits(schema, path)
        if kind == "integer" and (low is not None or high is not None):
            body = integers(low, high)
            if body is None:
                raise _wrong(path, "no integer lies between minimum and maximum")
            return self._rules.add(body)
        if low is not None and low >= 0:
            return self._rules.add('("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})?')
        return self._rules.json(kind)


def _repeated(item: str, comma: str, low: int, high: int | None, behind: bool, body: str) -> str:
    """`low` to `high` items with commas between, `behind` what `body` already holds."""
    if behind:
        return f"{body} ({comma} {item}){_times(low, high)}"
    rest = f"{item} ({comma} {item}){_times(max(low - 1, 0), None if high is None else high - 1)}"
    return rest if low else f"({rest})?"


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _wrong(path: str, cause: str) -> OptionError:
    return OptionError(f"JSON schema at {path[:200]}: {cause}")


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(path, "give a list with something in it")
    return value


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    kinds = {str: ("string",), int: ("integer", "number"), float: ("number",), list: ("array",), dict: ("object",)}
    return kind in kinds.get(type(value), ("null",))


def _bounds(schema: Mapping[str, Any], least: str, most: str, path: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    for keyword, value in ((least, low), (most, high)):
        number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value <= MOST_REPEATS):
            raise _wrong(path, f"{keyword} {str(value)[:20]}: at most {MOST_REPEATS} can be kept")
    if high is not None and high < low:
        raise _wrong(path, f"{most} is less than {least}")
    return low or 0, high


def _limits(schema: Mapping[str, Any], path: str) -> tuple[float | None, float | None]:
    """The least and the greatest value, those of draft 4 (exclusiveMinimum: true) included; open ends of integers."""
    limits: list[float | None] = []
    for inner, outer, step in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        limit, open_limit = schema.get(inner), schema.get(outer)
        if open_limit is True:
            limit, open_limit = None, limit
        for value in (limit, open_limit):
            if value not in (None, False) and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise _wrong(path, f"{inner} and {outer} are numbers")
        found = [value for value in (limit, _next(open_limit, step)) if value is not None]
        limits.append((max if step > 0 else min)(found) if found else None)
    return limits[0], limits[1]


def _next(limit: Any, step: int) -> float | None:
    """The integer next to an open limit."""
    if limit is None or limit is False:
        return None
    whole = int(limit // 1)
    return whole + step if whole == limit else (whole + 1 if step > 0 else whole)


def _merged(first: Mapping[str, Any], second: Any, path: str) -> dict[str, Any]:
    """Both schemas at once."""
    if not isinstance(second, Mapping):
        raise _wrong(path, "a part that is no object cannot be joined with others")
    whole = dict(first)
    for key, value in second.items():
        if key not in _SHAPES or (key in whole and whole[key] == value):
            if key in _REFUSED:
                raise _wrong(path, f"{key!r} is not supported")
        elif key not in whole:
            whole[key] = value
        elif key == "required" and isinstance(value, list):
            whole[key] = [*whole[key], *(name for name in value if name not in whole[key])]
        elif key == "properties" and isinstance(value, Mapping):
            both = {name: {"allOf": [whole[key][name], part]} for name, part in value.items() if name in whole[key]}
            whole[key] = {**whole[key], **value, **both}
        elif key == "additionalProperties":
            whole[key] = value if whole[key] is True else whole[key]
        else:
            raise _wrong(path, f"two different {key!r} for one value")
    return whole
