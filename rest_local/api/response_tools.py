"""The tools of a request to the Responses API: what the model is offered, and whose call it then makes.

Chat templates know functions with JSON arguments only, so every tool is offered as one (docs/howto/responses.md). The
call of a `custom` tool is text: it becomes a function with one argument, `input`, and a grammar keeps its format where
that can be written as one regular expression (`expression_of`). Tools that OpenAI's servers execute are left out where
an answer without them is an answer, and refused where a client expects what they find.
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
            raise wrong(
                f"{place}.type", f"tools of type {str(kind)[:40]!r} are not supported, only function and custom"
            )
        return True

    def _keep(self, tool: Offered, place: str) -> None:
        known = known_name(tool.name, tool.namespace)
        other = self.tools.get(known)
        if other is not None and (other.kind, other.name, other.namespace) != (tool.kind, tool.name, tool.namespace):
            raise wrong(f"{place}.name", f"another tool is called {known[:80]!r}, too")
        self.tools[known] = tool  # of two with one name, the later one, which a search for tools has found

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": dict(tool.function)} for tool in self.tools.values()]

    def choose(self, choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
        """`tool_choice` in the form of a chat; tools that are not allowed are removed. Raises ApiError 400."""
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
        """The tool that the model calls by this name; a function without a namespace where none is known by it."""
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


def schema_of_text(wanted: Mapping[str, Any], place: str) -> tuple[dict[str, Any], str, bool]:
    """The schema of the text inside of JSON, a note for the model, and whether a forced call has to keep the schema.

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
    expression = definition if syntax == "regex" else expression_of(definition)
    if expression is None:
        return plain, note, False
    return plain | {"pattern": f"^(?:{expression})$"}, note, True


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(  # text inside of quotes that no later character can change; half of a surrogate pair is not
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


class InputText:
    """The text of a custom tool's call, read from its arguments, `{"input": "..."}`, as they arrive.

    Nothing is lost: arguments in another form become the text themselves, or their only string does.
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
        """What is certain of the text after another fragment of the arguments."""
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
        """The rest of the text, when the arguments are complete."""
        if self._ended:
            return ""
        raw = "".join(self._raw)
        try:
            value = json.loads(raw or "{}", strict=False)
        except (ValueError, RecursionError):
            cut = self._opened or '{"input":"'.startswith("".join(raw.split()))  # by a limit
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
    except ValueError:  # an escape that JSON does not know, such as \d
        return text


MAX_CHARACTERS = 20_000  # of the grammar, and of the expression: rules are written out where they are used
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "NUMBER": r"[0-9]+(?:\.[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|//[^\n]*|\r)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<alias>->[ \t]*\w+)
    |(?P<range>\.\.)
    |(?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<name>(?:^[!?])?[_a-zA-Z]\w*)
    |(?P<sign>[:|()\[\]?*+])
    |(?P<priority>\.-?\d+)
    |(?P<line>\n)
    |(?P<command>%[^\n]*)""",
    re.VERBOSE | re.MULTILINE,
)
_IMPORT = re.compile(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*")
Token = tuple[str, str]


class _Unread(Exception):
    """The grammar has what is not read here."""


def expression_of(text: str) -> str | None:
    """The regular expression of a grammar with a rule `start`, without anchors."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return _Expression(_rules(text)).of("start")
    except (_Unread, RecursionError):
        return None


def _rules(text: str) -> dict[str, list[Token] | str]:
    """The tokens of each rule's body; of an imported terminal its expression."""
    rules: dict[str, list[Token] | str] = {}
    tokens = _tokens(text)
    body: list[Token] = []
    for number, (kind, value) in enumerate(tokens):
        if kind == "command":
            found = _IMPORT.fullmatch(value)
            if found is None or found[1] not in _COMMON:
                raise _Unread
            rules[found[2] or found[1]] = _COMMON[found[1]]
        elif kind == "name" and _begins_rule(tokens, number):
            body = rules[value.lstrip("!?")] = []
        elif kind not in ("line", "priority") and (kind, value) != ("sign", ":"):
            body.append((kind, value))
    return rules


def _begins_rule(tokens: list[Token], at: int) -> bool:
    """Whether a name is followed by a colon, maybe with a priority in between."""
    rest = [token for token in tokens[at + 1 : at + 3] if token[0] != "priority"]
    return (at == 0 or tokens[at - 1][0] == "line") and rest[:1] == [("sign", ":")]


def _tokens(text: str) -> list[Token]:
    found, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise _Unread
        at = token.end()
        if token.lastgroup not in ("space", "alias"):
            found.append((str(token.lastgroup), token[0]))
    return found


class _Expression:
    """Writes rules as expressions, each once."""

    def __init__(self, rules: dict[str, list[Token] | str]) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}
        self._open: set[str] = set()

    def of(self, name: str) -> str:
        body = self._rules.get(name)
        if body is None or name in self._open:  # unknown, or recursive
            raise _Unread
        if isinstance(body, str):
            return body
        if name not in self._known:
            self._open.add(name)
            found, rest = self._ways(body)
            self._open.discard(name)
            if rest:
                raise _Unread
            self._known[name] = found
        if len(self._known[name]) > MAX_CHARACTERS:
            raise _Unread
        return self._known[name]

    def _ways(self, tokens: list[Token]) -> tuple[str, list[Token]]:
        """Alternatives up to a closing bracket, and the tokens from there."""
        ways, sequence = [], ""
        while tokens and tokens[0][1] not in (")", "]"):
            if tokens[0] == ("sign", "|"):
                ways.append(sequence)
                sequence, tokens = "", tokens[1:]
                continue
            atom, tokens = self._atom(tokens)
            sequence += atom
        return "|".join([*ways, sequence]), tokens

    def _atom(self, tokens: list[Token]) -> tuple[str, list[Token]]:
        (kind, value), tokens = tokens[0], tokens[1:]
        if kind == "string" and tokens[:1] == [("range", "..")] and tokens[1:2] and tokens[1][0] == "string":
            found = f"[{_literal(value)}-{_literal(tokens[1][1])}]"
            tokens = tokens[2:]
        elif kind == "string":
            found = _literal(value)
        elif kind == "regex" and value.endswith("/"):
            found = value[1:-1].replace(r"\/", "/")
        elif kind == "name":
            found = self.of(value)
        elif kind == "sign" and value in "([":
            found, tokens = self._ways(tokens)
            if not tokens or tokens[0][1] != {"(": ")", "[": "]"}[value]:
                raise _Unread
            tokens = tokens[1:]
            found = f"(?:{found})?" if value == "[" else found
        else:
            raise _Unread
        found = f"(?:{found})"
        while tokens and (tokens[0][1] in ("?", "*", "+") or tokens[0][0] == "times"):
            times, tokens = tokens[0][1], tokens[1:]
            if times.startswith("~"):
                times = f"{{{times[1:].replace(' ', '').replace('..', ',')}}}"
            found = f"(?:{found}{times})"
        return found, tokens


def _literal(value: str) -> str:
    if value.endswith("i"):
        return f"(?i:{re.escape(_plain(value[1:-2]))})"
    return re.escape(_plain(value[1:-1]))


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


def _plain(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        if found[1] not in _ESCAPES:
            raise _Unread
        return _ESCAPES[found[1]]

    return re.sub(r"\\(.)", one, text)
