"""The tools of a request to the Responses API: what the model is offered, and which tool a call then means.

Chat templates know functions with JSON arguments only, so every tool is offered as one (docs/howto/responses.md). The
call of a `custom` tool is text: it becomes a function with one argument, `input`. The model is told its format, and a
forced call keeps it if it is a regular expression. Tools that OpenAI's servers run are left out if the model can answer
without them, and refused if the client depends on their results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from rest_local.api.bodies import Body, JsonObject, Many, NamedFunction, NamedTool
from rest_local.api.errors import given, text_of, wrong
from rest_local.chat.tools.source import encodable

MAX_TOOLS = 2_000


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[Many[JsonObject], Field(max_length=MAX_TOOLS)]


class ChosenTool(Body):
    """One tool that must be called. Types other than `function` and `custom` are refused later, by name."""

    type: str
    name: str | None = None
    namespace: str | None = None


ToolChoice = Literal["none", "auto", "required"] | AllowedTools | ChosenTool


# These are prefixes, because some types carry a date. Codex offers `web_search` with every request.
LEFT_OUT = ("web_search", "image_generation", "programmatic_tool_calling")
OWN = "functions"  # OpenAI's name for tools without a namespace
SEARCH = "tool_search"
Kind = Literal["function", "custom", "tool_search"]


@dataclass(frozen=True)
class Offered:
    """A tool with the client's name and namespace. `function` is its form in a chat, which the template gets."""

    kind: Kind
    name: str
    namespace: str | None
    function: Mapping[str, Any]


@dataclass
class Toolbox:
    """The tools of one request, by the name that the model knows. `shown` has them as the client sent them."""

    tools: dict[str, Offered] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def add(self, tools: Iterable[Any], place: str, *, shown: bool = False) -> None:
        """Offer these tools; with `shown` the answer repeats them. Raises ApiError 400, which names the place."""
        for number, tool in enumerate(tools):
            where = f"{place}[{number}]"
            fields = given(tool, where)
            if self._offer(fields, where, None) and shown:
                self.shown.append(_repeated(fields))

    def _offer(self, tool: dict[str, Any], place: str, namespace: str | None) -> bool:
        kind = tool.get("type", "function")
        if kind == "namespace" and namespace is None:
            within = text_of(tool, "name", place)
            inner = tool.get("tools", [])
            if not isinstance(inner, list):
                raise wrong(f"{place}.tools", "give a list of tools")
            offers = [self._offer(given(each, f"{place}.tools[{i}]"), f"{place}.tools[{i}]", within)
                      for i, each in enumerate(inner)]  # fmt: skip
            return any(offers)
        if kind == "function":
            self._keep(_function(tool, place, namespace), place)
        elif kind == "custom":
            self._keep(_custom(tool, place, namespace), place)
        elif kind == SEARCH and tool.get("execution") == "client":
            self._keep(_search(tool), place)
        elif isinstance(kind, str) and (kind == SEARCH or kind.startswith(LEFT_OUT)):
            self.left_out.add(kind)
            return False
        else:
            raise wrong(f"{place}.type", f"tools of type {str(kind)[:40]!r} are not supported; function and custom are")
        return True

    def _keep(self, tool: Offered, place: str) -> None:
        known = known_name(tool.name, tool.namespace)
        other = self.tools.get(known)
        if other is not None and (other.kind, other.name, other.namespace) != (tool.kind, tool.name, tool.namespace):
            raise wrong(f"{place}.name", f"another tool is called {known[:80]!r}, too")
        self.tools[known] = tool  # a search for tools may find one that is already known

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": dict(tool.function)} for tool in self.tools.values()]

    def choose(self, choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
        """Translate `tool_choice` to a chat's, and remove tools that are not allowed. Raises ApiError 400."""
        if isinstance(choice, ChosenTool):
            return NamedTool(type="function", function=NamedFunction(name=self._chosen(choice)))
        if not isinstance(choice, AllowedTools):
            if choice == "required" and not self.tools:
                raise wrong("tool_choice", self._missing("a call is required"))
            return choice
        allowed = set()
        for number, tool in enumerate(choice.tools):
            if not str(tool.get("type")).startswith((*LEFT_OUT, "mcp")):
                given_name, namespace = tool.get("name"), tool.get("namespace")
                allowed.add(known_name(str(given_name), namespace if isinstance(namespace, str) else None))
                if not allowed <= self.tools.keys():
                    raise wrong(f"tool_choice.tools[{number}]", f"no tool is called {str(given_name)[:80]!r}")
        self.tools = {name: tool for name, tool in self.tools.items() if name in allowed}
        if choice.mode == "required" and not self.tools:
            raise wrong("tool_choice", self._missing("a call is required"))
        return choice.mode if self.tools else "none"

    def _chosen(self, choice: ChosenTool) -> str:
        if choice.type not in ("function", "custom"):
            raise wrong("tool_choice.type", f"calls of {choice.type[:40]!r} cannot be forced, only function and custom")
        known = known_name(choice.name or "", choice.namespace)
        if known not in self.tools:
            raise wrong("tool_choice.name", self._missing(f"no tool is called {known[:80]!r}"))
        return known

    def _missing(self, message: str) -> str:
        some = f" (left out: {', '.join(sorted(self.left_out))})" if self.left_out else ""
        return f"{message}, but there is none{some}" if not self.tools else message + some

    def of(self, known: str) -> Offered:
        """Return the tool that the model calls by this name. An unknown name is a function without a namespace."""
        return self.tools.get(known) or Offered("function", known, None, {})


def known_name(name: str, namespace: str | None) -> str:
    return name if namespace in (None, "", OWN) else f"{namespace}__{name}"


def _function(tool: Mapping[str, Any], place: str, namespace: str | None) -> Offered:
    name = text_of(tool, "name", place)
    parameters, description = tool.get("parameters"), tool.get("description")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong(f"{place}.parameters", "give a JSON schema")
    if description is not None and not isinstance(description, str):
        raise wrong(f"{place}.description", "give text")
    function: dict[str, Any] = {
        "name": known_name(name, namespace),
        "description": description or "",
        "parameters": parameters or {},
    }
    if tool.get("strict") is True:
        function["strict"] = True
    return Offered("function", name, namespace, function)


def _custom(tool: Mapping[str, Any], place: str, namespace: str | None) -> Offered:
    name = text_of(tool, "name", place)
    wanted = given(tool.get("format", {"type": "text"}), f"{place}.format")
    schema, note, keeps = schema_of_text(wanted, f"{place}.format")
    description = tool.get("description") or ""
    if not isinstance(description, str):
        raise wrong(f"{place}.description", "give text")
    function = {
        "name": known_name(name, namespace),
        "description": "\n\n".join(filter(None, (description, note))),
        "parameters": _object({"input": schema}) | {"additionalProperties": False},
    }
    return Offered("custom", name, namespace, function | ({"strict": True} if keeps else {}))


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _search(tool: Mapping[str, Any]) -> Offered:
    parameters, default = tool.get("parameters"), _object({"query": {"type": "string"}})
    function = {
        "name": SEARCH,
        "description": str(tool.get("description") or "Search for tools that are not listed here."),
        "parameters": parameters if isinstance(parameters, Mapping) else default,
    }
    return Offered("tool_search", SEARCH, None, function)


def _repeated(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool for the answer, with the fields that clients read without a check."""
    if tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "parameters": None, "strict": False} | tool


def found_tools(tools: Sequence[Any]) -> str:
    """Return the result of a search for tools as text."""
    names = []
    for tool in tools:
        if isinstance(tool, Mapping) and isinstance(tool.get("tools"), list):
            inner = [each for each in tool["tools"] if isinstance(each, Mapping)]
            names += [known_name(str(each.get("name")), str(tool.get("name"))) for each in inner]
        elif isinstance(tool, Mapping):
            names.append(str(tool.get("name", tool.get("type"))))
    return f"Found: {', '.join(names)}" if names else "Found none."


def schema_of_text(wanted: Mapping[str, Any], place: str) -> tuple[dict[str, Any], str, bool]:
    """Return the schema of the text within JSON, a note for the model, and True if a forced call must match the schema.

    Raises ApiError 400, which names the place.
    """
    kind = wanted.get("type")
    plain = {"type": "string", "description": "The whole text of the call."}
    if kind == "text":
        return plain, "", False
    if kind != "grammar":
        raise wrong(f"{place}.type", 'give "text" or "grammar"')
    syntax, definition = wanted.get("syntax"), text_of(wanted, "definition", place)
    if syntax not in ("lark", "regex"):
        raise wrong(f"{place}.syntax", 'give "lark" or "regex"')
    note = f"The argument `input` is the text of the call. It must match this {syntax} grammar:\n{definition}"
    if syntax == "lark":
        return plain, note, False
    return plain | {"pattern": f"^(?:{definition})$"}, note, True


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Text within quotes that no later character can change. Half of a surrogate pair can still change.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


class InputText:
    """The text of a custom tool's call, read from its arguments `{"input": "..."}` as they arrive.

    Nothing is lost: of arguments in another form, their only string is the text, or else all of them are.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._tail = ""
        self._said: list[str] = []
        self._opened = self._ended = False

    @property
    def text(self) -> str:
        return "".join(self._said)

    def feed(self, fragment: str) -> str:
        """Return the text that is certain after another fragment of the arguments."""
        self._raw.append(fragment)
        self._tail += fragment
        if not self._opened:
            opening = _OPENING.match(self._tail)
            if opening is None:
                return ""
            self._opened, self._tail = True, self._tail[opening.end() :]
        if self._ended:
            return ""
        found = _WHOLE.match(self._tail)
        assert found is not None
        self._tail = self._tail[found.end() :]
        self._ended = self._tail.startswith('"')
        return self._say(_decoded(found[0]))

    def finish(self) -> str:
        """Return the remaining text when the arguments are complete."""
        if self._ended:
            return ""
        raw = "".join(self._raw)
        try:
            value = json.loads(raw or "{}", strict=False)
        except (ValueError, RecursionError):
            cut = self._opened or '{"input":"'.startswith("".join(raw.split()))
            return "" if cut else self._say(raw)
        texts = [each for each in value.values() if isinstance(each, str)] if isinstance(value, dict) else []
        given = value.get("input") if isinstance(value, dict) else None
        whole = given if isinstance(given, str) else texts[0] if len(texts) == 1 else "" if value == {} else raw
        return self._say(encodable(whole).removeprefix(self.text))

    def _say(self, text: str) -> str:
        self._said.append(text)
        return text


def _decoded(text: str) -> str:
    try:
        return encodable(json.loads(f'"{text}"', strict=False))
    except ValueError:  # an escape that JSON lacks, such as \d
        return text
