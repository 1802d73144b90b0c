"""Formats of calls that are not JSON objects: Qwen3-Coder's tags, Gemma's brackets, Python, and harmony's channels."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rest_local.chat.tools.format import (
    Call,
    Tool,
    ToolFormat,
    Wrapped,
    closed,
    is_text,
    json_call,
    json_calls,
    repeated,
    text_until,
)
from rest_local.chat.tools.source import Malformed, Source, Wait
from rest_local.grammar.grammar import Lark

# Qwen3-Coder's and Qwen3.5's calls, without quotes around long strings:
#
#     <tool_call>
#     <function=write_file>
#     <parameter=path>
#     src/main.py
#     </parameter>
#     </function>
#     </tool_call>
#
# A parameter that the tool's schema declares as text is emitted as it arrives. Any other is JSON if it can be read as
# JSON, else text.

_PARAMETER = re.compile(r"[^<>\n]*")
_PARAMETER_ENDS = ("\n</parameter>", "</parameter>")


def tagged(source: Source) -> Wait[None]:
    """Read the text after `<tool_call>`: a JSON object in Hermes' notation, or Qwen's functions."""
    yield from source.space()
    if (yield from source.starts("<function=")):
        yield from function_call(source)
    else:
        yield from json_call(source)
    yield from closed(source, "</tool_call>")


def function_opened(source: Source) -> Wait[None]:
    """Read the text after `<function=` if the tag around it is missing."""
    yield from function_call(source)
    yield from closed(source, "</tool_call>")


def function_call(source: Source) -> Wait[None]:
    """Read the text after `<function=`. If it is cut off before its end, the arguments stay incomplete JSON."""
    name = yield from source.name()
    yield from source.need(">")
    source.start(name)
    between = "{"
    while True:
        yield from source.space()
        tag = yield from source.starts("<parameter=", "</function>")
        if not tag and source.cut:
            source.arguments("{" if between == "{" else "")
            return
        if tag != "<parameter=":
            source.arguments("}" if between == ", " else "{}")
            return
        key = yield from source.matching(_PARAMETER)
        if not (yield from source.starts(">")):
            if source.cut:
                source.arguments("{" if between == "{" else "")
                return
            source.arguments("}" if between == ", " else "{}")
            source.content(tag + key)
            return
        source.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        between = ", "
        yield from source.starts("\n")
        properties = source.tools.get(name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if not (yield from _parameter(source, schema)):
            return


def _parameter(source: Source, schema: Any) -> Wait[bool]:
    """Read a parameter's value. Returns False if its end is missing."""
    if is_text(schema):
        source.arguments('"')
        marker = yield from source.until(
            _PARAMETER_ENDS, lambda text: source.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        source.arguments('"' if marker else "")
        return bool(marker)
    raw: list[str] = []
    marker = yield from source.until(_PARAMETER_ENDS, raw.append)
    text = "".join(raw)
    source.arguments(_as_json(text) if marker else text)
    return bool(marker)


def _as_json(text: str) -> str:
    """Leave JSON unchanged, turn Python's constants into JSON's, and anything else into a string."""
    constants = {"True": "true", "False": "false", "None": "null"}
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return constants.get(text.strip()) or json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refused(constant: str) -> None:
    raise ValueError(constant)


def _write_qwen(call: Call) -> str:
    arguments = call["arguments"] if isinstance(call["arguments"], Mapping) else {}
    parameters = "".join(
        f"<parameter={key}>\n"
        + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        + "\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={call['name']}>\n{parameters}</function>\n</tool_call>"


def _force_qwen(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    functions = [
        f"{lark.literal(f'<function={tool.name}>' + chr(10))} {_force_parameters(lark, tool)} "
        f"{lark.literal('</function>' + chr(10))}"
        for tool in tools
    ]
    opening, closing = lark.literal("<tool_call>\n"), lark.literal("</tool_call>")
    return repeated(lark.add(f"{opening} {lark.one_of(functions)} {closing}"), lark.literal("\n"), many)


def _force_parameters(lark: Lark, tool: Tool) -> str:
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    parts, end = [], "\n</parameter>\n"
    for key, schema in properties.items() if isinstance(properties, Mapping) else ():
        opening = lark.literal(f"<parameter={key}>\n")
        json_value = "" if is_text(schema) else f"{tool.argument(lark, schema)} {lark.literal(end)}"
        part = lark.add(f"{opening} {json_value or text_until(lark, schema, end)}")
        parts.append(part if isinstance(required, list) and key in required else f"{part}?")
    return " ".join(parts)


QWEN = ToolFormat(
    "qwen",
    {"<tool_call>": tagged, "<function=": function_opened},
    _force_qwen,
    lambda calls: "\n".join(map(_write_qwen, calls)),
)


# Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,count:3,list:[true]}<tool_call|>`.

_GEMMA, _GEMMA_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_GEMMA_KEY = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|([^\s:{}\[\],"]+))\s*:\s*', re.DOTALL)
_GEMMA_SCALAR = re.compile(r"[^\s,{}\[\]]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_DEEPEST = 100


def _gemma(source: Source) -> Wait[None]:
    yield from source.space()
    yield from source.need("call:")
    name = yield from source.name()
    text: list[str] = []
    if not (yield from source.until((_GEMMA_END,), text.append)):
        raise Malformed
    arguments, end = _gemma_value("".join(text).strip(), 0, 0)
    if not isinstance(arguments, dict) or end < len("".join(text).strip()):
        raise Malformed
    source.start(name)
    source.arguments(json.dumps(arguments, ensure_ascii=False))


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at index `at`, and the index of its end."""
    if depth > _DEEPEST:
        raise Malformed
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise Malformed
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _gemma_members(text, at, depth)
    if text.startswith('"', at):
        try:
            return json.JSONDecoder(strict=False).raw_decode(text, at)
        except ValueError:
            raise Malformed from None
    found = _GEMMA_SCALAR.match(text, at)
    if not found:
        raise Malformed
    scalar = found[0]  # a number or a constant, else text without quotes
    if scalar in ("true", "false", "null") or (_NUMBER.fullmatch(scalar) and len(scalar) < 300):
        value = json.loads(scalar)
        return value if value not in (math.inf, -math.inf) else scalar, found.end()
    return scalar, found.end()


def _gemma_members(text: str, at: int, depth: int) -> tuple[Any, int]:
    closing = "}" if text[at] == "{" else "]"
    members: dict[str, Any] = {}
    items: list[Any] = []
    at = _after_space(text, at + 1)
    while text[at : at + 1] != closing:
        if closing == "}":
            key = _GEMMA_KEY.match(text, at)
            if not key:
                raise Malformed
            name = _gemma_value(key[2], 0, depth)[0] if key[2] else key[1] or key[3] or ""
            if name in members:
                raise Malformed
            members[name], at = _gemma_value(text, key.end(), depth + 1)
        else:
            item, at = _gemma_value(text, at, depth + 1)
            items.append(item)
        at = _after_space(text, at)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != closing:
            raise Malformed
    return (members if closing == "}" else items), at + 1


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _written_gemma(value: Any, bare_keys: bool = False) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, Mapping):
        keys = {key: key if bare_keys else f"{_QUOTE}{key}{_QUOTE}" for key in value}
        return "{" + ",".join(f"{keys[key]}:{_written_gemma(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written_gemma, value)) + "]"
    return json.dumps(value)


def _force_gemma(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    """Force strings in Gemma's quotes, and everything else as JSON, which `_gemma_value` reads too."""
    calls = []
    for tool in tools:

        def value(schema: Any, tool: Tool = tool) -> str:
            if is_text(schema):
                return f"{lark.literal(_QUOTE)} {text_until(lark, schema, _QUOTE)}"
            return tool.argument(lark, schema)

        members = tool.members(lark, value, ",", ":", sort=True)
        calls.append(f"{lark.literal(f'{_GEMMA}call:{tool.name}{{')} {members} {lark.literal('}' + _GEMMA_END)}")
    return repeated(lark.one_of(calls), "", many)


GEMMA = ToolFormat(
    "gemma",
    {_GEMMA: _gemma, "<tool_call>": tagged},
    _force_gemma,
    lambda calls: "".join(
        f"{_GEMMA}call:{call['name']}{_written_gemma(call['arguments'], True)}{_GEMMA_END}" for call in calls
    ),
)


# Calls written as Python, `[search(query="x", limit=3)]`: LFM2.
#
# Python's own parser reads them; they are never run. Only constants, lists, dictionaries and signs are accepted.

_PYTHON, _PYTHON_END = "<|tool_call_start|>", "<|tool_call_end|>"
_PYTHON_CONSTANTS = {"true": True, "false": False, "null": None}


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of a list of calls. Raises Malformed for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        calls = [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    if not calls:
        raise Malformed
    return calls


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    before = ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):  # `list-files()`: Python reads a difference
        before, node = ast.unparse(node.left).replace(" - ", "-") + "-", node.right
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise Malformed
    arguments = {keyword.arg: _python_value(keyword.value) for keyword in node.keywords if keyword.arg}
    if len(arguments) != len(node.keywords):
        raise Malformed
    return before + ast.unparse(node.func), arguments


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_python_value(inner) for inner in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {
            str(ast.literal_eval(key)): _python_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key
        }
    if isinstance(node, ast.Name) and node.id in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[node.id]
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))) or value in (math.inf, -math.inf):
        raise Malformed
    return value


def _pythonic(source: Source) -> Wait[None]:
    yield from source.space()
    while not source.rest().lstrip("[ \n") and not source.final:
        yield
    if source.rest().lstrip("[ \n").startswith("{"):  # some versions write JSON between the same markers
        yield from json_calls(source)
        yield from source.space()
        yield from source.starts(_PYTHON_END)
        return
    text: list[str] = []
    if not (yield from source.until((_PYTHON_END,), text.append)):
        raise Malformed
    for name, arguments in python_calls("".join(text)):
        source.start(name)
        source.arguments(json.dumps(arguments, ensure_ascii=False))


def _write_python(calls: Sequence[Call]) -> str:
    def call(one: Call) -> str:
        arguments = one["arguments"] if isinstance(one["arguments"], Mapping) else {}
        return f"{one['name']}({', '.join(f'{key}={_written_python(value)}' for key, value in arguments.items())})"

    return f"{_PYTHON}[{', '.join(map(call, calls))}]{_PYTHON_END}"


def _written_python(value: Any) -> str:
    """Write the value in Python's notation, with strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        members = (f"{_written_python(str(key))}: {_written_python(inner)}" for key, inner in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written_python, value)) + "]"
    return repr(value)


def _force_python(lark: Lark, tools: Sequence[Tool], many: bool) -> str:
    """Force values as JSON: Python reads JSON strings alike, and `python_calls` knows JSON's constants."""
    calls = []
    for tool in tools:
        members = tool.members(lark, partial(tool.argument, lark), ", ", "=")
        calls.append(f"{lark.literal(f'{tool.name}(')} {members} {lark.literal(')')}")
    listed = repeated(lark.one_of(calls), lark.literal(", "), many)
    return f"{lark.literal(_PYTHON + '[')} {listed} {lark.literal(']' + _PYTHON_END)}"


PYTHONIC = ToolFormat("pythonic", {_PYTHON: _pythonic, "<tool_call>": tagged}, _force_python, _write_python)


# gpt-oss (harmony): an answer is a sequence of messages, each in a channel, some addressed to a tool.
#
#     <|channel|>analysis<|message|>...<|end|><|start|>assistant
#     <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
#
# Analysis is reasoning, final is the answer, commentary to a function is a call, other commentary is text. The prompt
# ends with `<|start|>assistant`. The end marker of the last message may be missing, because it ends the generation.

_MESSAGE = "<|message|>"
FINAL = f"<|channel|>final{_MESSAGE}"  # the header of the answer
_BEGINS = ("<|start|>", "<|channel|>")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINS)
_LONGEST_HEADER = 400
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_COMMENTARY = Wrapped("<|channel|>commentary to=functions.", f" <|constrain|>json{_MESSAGE}")


def _messages(source: Source) -> Wait[None]:
    while (yield from source.peek()):
        header = yield from _header(source)
        if header is None:  # all of it is text
            end = yield from source.until(_MESSAGE_ENDS, source.content)
            if end in _BEGINS:
                source.unread(end)
            continue
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        emit = source.content
        if recipient and recipient[1] != "assistant":
            source.start(recipient[1])
            emit = source.arguments
            yield from source.space()
            # A string inside may contain markers.
            if (yield from source.peek()) == "{" and (yield from source.value(emit)):
                yield from source.space()
                emit = source.content
        elif channel and channel[1] == "analysis":
            emit = source.reasoning
        end = yield from source.until(_MESSAGE_ENDS, emit)
        if end in _BEGINS:  # the message lacks its end marker
            source.unread(end)


def _header(source: Source) -> Wait[str | None]:
    """Return the text before the next `<|message|>`, or None if no header begins here or it does not end."""
    source.begin()
    yield from source.space()
    begun = yield from source.starts("<|start|>assistant", "<|channel|>", "assistant<|channel|>", "to=")
    if begun:
        header: list[str] = [begun]
        while len("".join(header)) < _LONGEST_HEADER:
            step = yield from source.starts(_MESSAGE)
            if step:
                source.end()
                return "".join(header)
            character = yield from source.peek()
            if not character and source.cut:
                source.end()
                return ""
            if not character:
                break
            header.append((yield from source.matching(re.compile(r"<?[^<]*"), _LONGEST_HEADER)))
    source.rewind()
    # Consume the first marker, or half of one ("<|start|>assi"): it would end the text at once, again and again.
    source.content((yield from source.space()) + (yield from source.starts(*_BEGINS)))
    return None


def after_analysis(lark: Lark) -> str:
    """Return a rule for optional reasoning at the beginning."""
    opening = lark.literal(f"<|channel|>analysis{_MESSAGE}")
    return f"({opening} {lark.until('<|end|>')} {lark.literal('<|start|>assistant')})?"


def final(lark: Lark, body: str) -> str:
    """Return a rule for a constrained answer in its channel."""
    return f"{after_analysis(lark)} {lark.literal(FINAL)} {body}"


HARMONY = ToolFormat(
    "harmony",
    {},
    # The format has only one call per answer. Reasoning may come first, in its own channel.
    lambda lark, tools, many: f"{after_analysis(lark)} {_COMMENTARY.rule(lark, tools)}",
    lambda calls: "<|start|>assistant".join(_COMMENTARY.write(call) + "<|call|>" for call in calls),
    whole=_messages,
)
