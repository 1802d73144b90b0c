"""Calls written as Python, `[search(query="x", limit=3)]`: LFM2, and Llama's built-in tools.

Python's own parser reads them; they are never run. Only constants, lists, dictionaries and signs are accepted.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rest_local.chat.tools.format import Call, Tool, ToolFormat, json_calls, repeated
from rest_local.chat.tools.hermes import tagged
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.grammar.grammar import Lark

_OPENING, _CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"
_CONSTANTS = {"true": True, "false": False, "null": None}


def python_calls(text: str, known: Iterable[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of a list of calls. Raises Malformed for anything else.

    `known`: names of tools, which are accepted even if they are not Python names (`list-files`).
    """
    if "#" in text and _has_comment(text):
        raise Malformed
    aliases = {f"tool_{i}_alias": name for i, name in enumerate(known) if not name.isidentifier()}
    for alias, name in aliases.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}\(", f"{alias}(", text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        calls = [_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    if not calls:
        raise Malformed
    return [(aliases.get(name, name), _restored(arguments, aliases)) for name, arguments in calls]


def _restored(value: Any, aliases: Mapping[str, str]) -> Any:
    """The value with aliases in its strings replaced by the names they stand for."""
    if isinstance(value, str):
        for alias, name in aliases.items():
            value = value.replace(f"{alias}(", f"{name}(")
        return value
    if isinstance(value, list):
        return [_restored(inner, aliases) for inner in value]
    if isinstance(value, dict):
        return {_restored(key, aliases): _restored(inner, aliases) for key, inner in value.items()}
    return value


def _has_comment(text: str) -> bool:
    """Whether there is a comment, which Python's parser would drop."""
    try:
        return any(
            part.type == tokenize.COMMENT for part in tokenize.generate_tokens(io.StringIO(text.strip()).readline)
        )
    except (tokenize.TokenError, SyntaxError):
        return True


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise Malformed
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
    if len(arguments) != len(node.keywords):
        raise Malformed
    return ast.unparse(node.func), arguments


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_value(inner) for inner in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {
            str(ast.literal_eval(key)): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))) or value in (math.inf, -math.inf):
        raise Malformed
    return value


def _listed(source: Source) -> Wait[None]:
    yield from source.space()
    source_is_json = yield from _json_follows(source)
    if source_is_json:
        yield from json_calls(source)
        yield from source.space()
        yield from source.starts(_CLOSING)
        return
    text: list[str] = []
    if not (yield from source.until((_CLOSING,), text.append)):
        raise Malformed
    for name, arguments in python_calls("".join(text), source.tools):
        source.start(name)
        source.arguments(json.dumps(arguments, ensure_ascii=False))


def _json_follows(source: Source) -> Wait[bool]:
    """Whether JSON objects follow, which some versions of the model write between the same markers."""
    while len(source.rest().lstrip("[ \n")) < 1 and not source.final:
        yield
    return source.rest().lstrip("[ \n")[:1] == "{"


def _write(calls: Sequence[Call]) -> str:
    def call(one: Call) -> str:
        arguments = one["arguments"] if isinstance(one["arguments"], Mapping) else {}
        return f"{one['name']}({', '.join(f'{key}={_written(value)}' for key, value in arguments.items())})"

    return f"{_OPENING}[{', '.join(map(call, calls))}]{_CLOSING}"


def _written(value: Any) -> str:
    """The value in Python's notation, strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(str(key))}: {_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return repr(value)


def _force(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    """Values as JSON: Python reads JSON strings alike, and `python_calls` knows JSON's constants."""
    calls = []
    for tool in tools:
        members = tool.members(lark, partial(tool.argument, lark), ", ", "=")
        calls.append(f"{lark.literal(f'{tool.name}(')} {members} {lark.literal(')')}")
    listed = repeated(lark.one_of(calls), lark.literal(", "), many)
    return f"{lark.literal(_OPENING + '[')} {listed} {lark.literal(']' + _CLOSING)}"


PYTHONIC = ToolFormat("pythonic", {_OPENING: _listed, "<tool_call>": tagged}, _force, _write)
