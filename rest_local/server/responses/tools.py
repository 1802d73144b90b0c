"""The tools of a request: what the model is offered, and whose call it then makes.

Chat templates know functions with JSON arguments only, so every tool is offered as one:

- `function`: as it is.
- `custom`, whose call is text: a function with one argument, `input`.
- `tool_search` that the client executes: a function with the search's parameters.
- `namespace`: its tools, each called `namespace__tool`; those of OpenAI's own `functions` have no prefix.

Tools that OpenAI's servers execute are left out where an answer without them is an answer (web search, images, a search
for tools that the server would execute). Others are refused: a client that sends them expects what they find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rest_local.server.bodies import NamedFunction, NamedTool
from rest_local.server.responses.bodies import AllowedTools, ChosenTool, ToolChoice
from rest_local.server.responses.fields import bad, given, text_of
from rest_local.server.responses.formats import schema_of_text

LEFT_OUT = ("web_search", "image_generation", "programmatic_tool_calling")
"""Beginnings of types, because some carry a date. Codex offers `web_search` with every request."""

OWN = "functions"  # OpenAI's name for tools without a namespace
SEARCH = "tool_search"
Kind = Literal["function", "custom", "tool_search"]


@dataclass(frozen=True)
class Offered:
    """A tool, by the client's name and namespace. `function`: what the template is given, in the form of a chat."""

    kind: Kind
    name: str
    namespace: str | None
    function: Mapping[str, Any]


@dataclass
class Toolbox:
    """The tools of one request, by the name under which the model knows them. `shown`: as the client gave them."""

    tools: dict[str, Offered] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def add(self, tools: Iterable[Any], place: str, *, shown: bool = False) -> None:
        """Offer these tools. Raises ApiError 400, which names the place.

        shown   the answer repeats them
        """
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
                raise bad(f"{place}.tools", "give a list of tools")
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
            raise bad(f"{place}.type", f"tools of type {str(kind)[:40]!r} are not supported, only function and custom")
        return True

    def _keep(self, tool: Offered, place: str) -> None:
        known = known_name(tool.name, tool.namespace)
        other = self.tools.get(known)
        if other is not None and (other.kind, other.name, other.namespace) != (tool.kind, tool.name, tool.namespace):
            raise bad(f"{place}.name", f"another tool is called {known[:80]!r}, too")
        self.tools[known] = tool  # of two with one name, the later one, which a search for tools has found

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools in the form of a chat."""
        return [{"type": "function", "function": dict(tool.function)} for tool in self.tools.values()]

    def choose(self, choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
        """`tool_choice` in the form of a chat; tools that are not allowed are removed. Raises ApiError 400."""
        if isinstance(choice, ChosenTool):
            return NamedTool(type="function", function=NamedFunction(name=self._chosen(choice)))
        if not isinstance(choice, AllowedTools):
            if choice == "required" and not self.tools:
                raise bad("tool_choice", self._missing("a call is required"))
            return choice
        allowed = set()
        for number, tool in enumerate(choice.tools):
            if not str(tool.get("type")).startswith((*LEFT_OUT, "mcp")):
                given_name, namespace = tool.get("name"), tool.get("namespace")
                allowed.add(known_name(str(given_name), namespace if isinstance(namespace, str) else None))
                if not allowed <= self.tools.keys():
                    raise bad(f"tool_choice.tools[{number}]", f"no tool is called {str(given_name)[:80]!r}")
        self.tools = {name: tool for name, tool in self.tools.items() if name in allowed}
        if choice.mode == "required" and not self.tools:
            raise bad("tool_choice", self._missing("a call is required"))
        return choice.mode if self.tools else "none"

    def _chosen(self, choice: ChosenTool) -> str:
        if choice.type not in ("function", "custom"):
            raise bad("tool_choice.type", f"calls of {choice.type[:40]!r} cannot be forced, only function and custom")
        known = known_name(choice.name or "", choice.namespace)
        if known not in self.tools:
            raise bad("tool_choice.name", self._missing(f"no tool is called {known[:80]!r}"))
        return known

    def _missing(self, message: str) -> str:
        some = f" (left out: {', '.join(sorted(self.left_out))})" if self.left_out else ""
        return f"{message}, but there is none{some}" if not self.tools else message + some

    def of(self, known: str) -> Offered:
        """The tool that the model calls by this name; a function without a namespace where none is known by it."""
        return self.tools.get(known) or Offered("function", known, None, {})


def known_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool."""
    return name if namespace in (None, "", OWN) else f"{namespace}__{name}"


def _function(tool: Mapping[str, Any], place: str, namespace: str | None) -> Offered:
    name = text_of(tool, "name", place)
    parameters, description = tool.get("parameters"), tool.get("description")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise bad(f"{place}.parameters", "give a JSON schema")
    if description is not None and not isinstance(description, str):
        raise bad(f"{place}.description", "give text")
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
        raise bad(f"{place}.description", "give text")
    parameters = {
        "type": "object",
        "properties": {"input": schema},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {
        "name": known_name(name, namespace),
        "description": "\n\n".join(part for part in (description, note) if part),
        "parameters": parameters,
    }
    return Offered("custom", name, namespace, function | ({"strict": True} if keeps else {}))


def _search(tool: Mapping[str, Any]) -> Offered:
    parameters = tool.get("parameters")
    default = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    function = {
        "name": SEARCH,
        "description": str(tool.get("description") or "Search for tools that are not listed here."),
        "parameters": parameters if isinstance(parameters, Mapping) else default,
    }
    return Offered("tool_search", SEARCH, None, function)


def _repeated(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool for the answer, with the fields that clients read without a check."""
    if tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "parameters": None, "strict": False} | tool


def found_tools(tools: Sequence[Any]) -> str:
    """What a search has found, as the result of its call."""
    names = []
    for tool in tools:
        if isinstance(tool, Mapping) and isinstance(tool.get("tools"), list):
            inner = [each for each in tool["tools"] if isinstance(each, Mapping)]
            names += [known_name(str(each.get("name")), str(tool.get("name"))) for each in inner]
        elif isinstance(tool, Mapping):
            names.append(str(tool.get("name", tool.get("type"))))
    return f"Found: {', '.join(names)}" if names else "Found none."
