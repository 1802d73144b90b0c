"""Rewrite JSON schemas for llguidance: add limits, spell keywords in its way, refuse others by name.

Contract: `json_rule` allows only values that are valid for the given schema. An OptionError names a part that cannot be
kept. llguidance ignores keywords that it does not know, as the standard says; keywords of draft 3 and formats are
checked here, because ignoring them would allow invalid values. `widened` is for callers that prefer some of the schema
to nothing. Knows nothing about tokens. docs/howto/json.md has the results of the public test suite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rest_local.errors import OptionError

MAX_BYTES = 1 << 20
MAX_LEVELS = 100  # the child refuses schemas that are nested deeper
LARGEST = 2**53 - 1  # 16 digits; readers that use doubles change larger integers (RFC 8259, section 6)
FRACTION = 1e-10  # the smallest power of ten that llguidance 1.9.1 accepts for `multipleOf`
# One space, or a line break with indentation: otherwise a model can write white space up to the token limit.
_JSON_OPTIONS = {"whitespace_pattern": "( |\\n[ \\t]{0,20})?"}

Schema = Mapping[str, Any]

_LITERAL = ("enum", "const", "default", "example", "examples")  # these hold values, as do names that begin with x-
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties")
_EVALUATING = (*_COMPOSED, "$dynamicRef", "$recursiveRef", "dependencies", "contains")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_DRAFT_3 = ("disallow", "divisibleBy", "extends")
_REFUSED = (
    *_DRAFT_3, "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef",
    "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
)  # fmt: skip

_DATE = (  # llguidance's `date` knows no leap years
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_LEAP_SECOND = "(?:.{6}[0-5]|23:59:60(?:\\.[0-9]+)?(?:[Zz]|[+-]00:00)$)"  # its `time` takes one at any minute
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_NARROWED = {"date": f"^{_DATE}$", "time": f"^{_LEAP_SECOND}", "date-time": f"^{_DATE}[Tt]{_LEAP_SECOND}"}
_WRITTEN = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "base64": _BASE64,
    "byte": _BASE64,
}
_FORMATS = (*_NARROWED, "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")  # llguidance knows these
_FREE = ("password", "binary")  # OpenAPI's; they limit nothing
_BITS = {f"{kind}{bits}": (kind, bits) for kind in ("int", "uint") for bits in (8, 16, 32)}
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9bBk]")  # look-around, back-references, word boundaries


def json_rule(schema: Schema | bool, **options: str) -> str:
    """Return a term of a Lark rule for the values of a schema. llguidance gets the `options`. Raises OptionError."""
    if not isinstance(schema, (Mapping, bool)):
        raise OptionError(f"JSON schema: {type(schema).__name__} is not a schema; give an object or a boolean")
    document = {} if schema is True else schema
    try:
        if isinstance(document, Mapping):
            if "properties" in document and "type" not in document:
                document = {"type": "object", **document}  # or a number would be valid too
            document = _changed(_tightened(document), _respelled)
            document = {**document, "x-guidance": {**_JSON_OPTIONS, **options}}
        text = json.dumps(document, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"JSON schema: cannot be written as JSON: {error}; remove that value") from error
    if len(text) > MAX_BYTES:
        raise OptionError(f"JSON schema: larger than {MAX_BYTES} bytes; use a smaller one")
    return f"%json {text}"


def widened(schema: Schema) -> Schema:
    """Return the schema without keywords, formats and patterns that cannot be kept. It allows more values, never fewer.
    `oneOf` becomes `anyOf`, as its alternatives may exclude each other in a way that cannot be kept.
    """
    found: Schema = _changed(schema, _wider)
    return found


def cause(message: str) -> str:
    """Return the cause in a message of llguidance about a schema, with a way out if there is one."""
    message = re.sub(r"^\d+\(\d+\): ", "", message)
    if found := re.match(r"Unimplemented keys: \[(.*)\]", message):
        names = found[1].replace('"', "")
        return f"{names} cannot be kept; leave {'them' if ',' in names else 'it'} out"
    if found := re.match(r"Resource '(.*)' is not present", message):
        return f"$ref to another document, {found[1]}; copy what it names into $defs"
    if message.startswith(("regex parse error", "lookarounds")):
        return f"the pattern cannot be kept: {message.removeprefix('regex parse error: ')}; write it in another way"
    if message.startswith("oneOf constraints"):
        return "oneOf cannot be kept where the types or a required const do not tell its schemas apart; use anyOf"
    if message == "it allows nothing":
        return "no value is valid; a $ref that leads to itself has no end"
    return message.replace("Unsatisfiable schema:", "no value is valid:")


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], levels: int = MAX_LEVELS) -> Any:
    """Apply `change` to all schemas in a schema, the inner ones first."""
    if not levels or not isinstance(schema, (list, Mapping)):
        return schema
    if isinstance(schema, list):
        return [_changed(each, change, levels - 1) for each in schema]
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _LITERAL or name.startswith("x-"):
            found[name] = value
        elif name in _NAMED and isinstance(value, Mapping):
            found[name] = {key: _changed(each, change, levels - 1) for key, each in value.items()}
        else:
            found[name] = _changed(value, change, levels - 1)
    return change(found)


# These limits apply if the schema sets none, so that a small model comes to an end of its answer.

_ANY = {"$ref": "#/$defs/any"}
_NUMBERS = {"minimum": -LARGEST, "maximum": LARGEST, "multipleOf": FRACTION}
_ANY_VALUE = {"$defs": {"any": {**_NUMBERS, "items": _ANY, "additionalProperties": _ANY}}}
_OPEN = {
    "{}": {**_ANY, **_ANY_VALUE},
    '{"type": "object"}': {"type": "object", "additionalProperties": _ANY, **_ANY_VALUE},
}


def _tightened(schema: Schema) -> Schema:
    """Return the schema with limits where it sets none.

    - Objects that name their properties have no others, unless others are required.
    - Integers and numbers lie between -LARGEST and LARGEST, or in the range of their format (`int32`); numbers have at
      most 10 digits after the point.

    Schemas with `allOf`, and objects that are composed of several schemas, are left unchanged: closed parts could
    contradict each other.
    """
    text = json.dumps(schema, default=str)
    if text in _OPEN:
        return _OPEN[text]
    if '"allOf"' in text:
        return schema
    # llguidance computes a common multiple of two factors in 32 bits, without a check.
    step = None if '"multipleOf"' in text else FRACTION
    tightened: Schema = _changed(schema, lambda each: _closed(each) | _number_limits(each, step))
    return tightened


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list) or schema.get("type") != "object":
        return schema
    others = any(name in schema for name in (*_COMPOSED, "additionalProperties", "patternProperties"))
    closes = not others and names.keys() >= set(map(str, required))
    return {**schema, "additionalProperties": False} if closes else schema


def _number_limits(schema: Schema, step: float | None) -> dict[str, float]:
    """Return limits for a schema of integers or numbers that sets none."""
    kind = schema.get("type")
    types: list[Any] = kind if isinstance(kind, list) else [kind]
    if not ("integer" in types or "number" in types) or "enum" in schema or "const" in schema:
        return {}
    least, most = _range(schema.get("format"))
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    bounds = {name: schema[name] for name in names if isinstance(schema.get(name), (int, float))}
    limits: dict[str, float] = {}
    if not any(name in bounds for name in names[:2]) and all(value > least for value in bounds.values()):
        limits["minimum"] = least
    if not any(name in bounds for name in names[2:]) and all(value < most for value in bounds.values()):
        limits["maximum"] = most
    if "number" in types and step is not None:
        limits["multipleOf"] = step
    return limits


def _range(format_: Any) -> tuple[int, int]:
    if not isinstance(format_, str) or format_ not in _BITS:
        return -LARGEST, LARGEST
    kind, bits = _BITS[format_]
    return (0, 2**bits - 1) if kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


# The following functions spell the same values in keywords that llguidance knows.


def _respelled(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite one schema in llguidance's keywords. Raises OptionError for those that would be ignored."""
    for name in _DRAFT_3:
        if name in schema:
            raise OptionError(f"JSON schema: {name} is of draft 3 and cannot be kept; leave it out")
    if schema.get("required") is True:
        raise OptionError("JSON schema: required: true is of draft 3; give a list of names, next to `properties`")
    found = {name: value for name, value in schema.items() if not _says_nothing(name, value, schema)}
    for name in _COUNTS:
        if isinstance(found.get(name), float) and found[name].is_integer():
            found[name] = int(found[name])
    return _formats(_property_names(_unevaluated(found)))


def _says_nothing(name: str, value: Any, schema: Schema) -> bool:
    """Return True if a keyword that llguidance does not know changes nothing."""
    if name in ("uniqueItems", "not", "required"):
        return value is False
    if name in ("unevaluatedItems", "unevaluatedProperties"):
        return _is_any(value)
    if name == "propertyNames":
        return _is_any(value) or (isinstance(value, Mapping) and not _limits_of_names(value))
    if name in ("dependentRequired", "dependentSchemas", "dependencies"):
        return isinstance(value, Mapping) and all(each == [] or _is_any(each) for each in value.values())
    if name in ("minContains", "maxContains"):
        return "contains" not in schema
    if name in ("then", "else"):
        return "if" not in schema
    return name == "if" and "then" not in schema and "else" not in schema and "unevaluated" not in "".join(schema)


def _is_any(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and not schema)


def _limits_of_names(names: Schema) -> set[str]:
    """Return the keywords of `propertyNames` that names do not always satisfy."""
    said = {"title", "description", *(["type"] if names.get("type") == "string" else [])}
    return names.keys() - said


def _unevaluated(schema: dict[str, Any]) -> dict[str, Any]:
    """Turn `unevaluated` into `additional` if no other schemas evaluate parts of the value."""
    for name, next_to in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        others = [each for each in _EVALUATING if each != name and each in schema]
        if name not in schema or others:
            continue
        if name == "unevaluatedItems" and isinstance(schema.get("items"), list):
            next_to = "additionalItems"
        value = schema.pop(name)
        schema.setdefault(next_to, value)
    return schema


def _property_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `propertyNames` with a pattern or a list of names if nothing else names properties."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or "properties" in schema or "patternProperties" in schema:
        return schema
    limits = _limits_of_names(names)
    listed = names.get("enum", [names.get("const")])
    if limits not in ({"const"}, {"enum"}, {"pattern"}) or not isinstance(listed, list):
        return schema
    value = schema.pop("additionalProperties", True)
    del schema["propertyNames"]
    if "pattern" in names:
        return {**schema, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    named = {name: value for name in listed if isinstance(name, str)}
    return {**schema, "properties": named, "additionalProperties": False}


def _formats(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite formats as patterns if llguidance does not know them, or is wider than the standard."""
    name, kind = schema.get("format"), schema.get("type", "string")
    if name is None or "string" not in (kind if isinstance(kind, list) else [kind]):
        return schema
    if name not in (*_FORMATS, *_WRITTEN, *_FREE):
        raise OptionError(f"JSON schema: the format {name} cannot be kept; leave it out, or give a `pattern`")
    if name not in _FORMATS:
        del schema["format"]
    pattern = {**_NARROWED, **_WRITTEN}.get(name)
    if pattern is None:
        return schema
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    return {**schema, "allOf": [*schema.get("allOf", []), {"pattern": pattern}]}


def _wider(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the parts of one schema that cannot be kept."""
    found = {name: value for name, value in schema.items() if name not in _REFUSED}
    if isinstance(found.get("required"), bool):
        del found["required"]
    if "oneOf" in found:
        found.setdefault("anyOf", found.pop("oneOf"))
        found.pop("oneOf", None)
    if found.get("format") not in (*_FORMATS, *_WRITTEN):
        found.pop("format", None)
    if _NOT_REGULAR.search(str(found.get("pattern", ""))):
        del found["pattern"]
    if not str(found.get("$ref", "#")).startswith("#"):
        del found["$ref"]
    return found
