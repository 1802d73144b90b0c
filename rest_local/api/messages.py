"""Anthropic's Messages API: bodies, and the conversation as OpenAI's chat, which the server understands.

- Types are strict, unknown fields are ignored, null means absent, as in `bodies`. Content blocks and tools are plain
  JSON in the types, because an error has to name the place of a block.
- Consecutive messages of one role are one turn, as in Anthropic's API.
- A turn of the user becomes its tool results, one message each, then its text and images. Images of a result are sent
  with the text after it, because few templates accept them in a result.
- A turn of the assistant becomes its text, its reasoning and its calls. Reasoning that Anthropic encrypted
  (`redacted_thinking`) cannot be read and is left out. Calls that Anthropic's servers ran are translated like all
  others, each with its result.
- A last turn of the assistant is the beginning of the answer (`Translated.begun`), starting after the last of these
  results.
- A system message after the first turn stays where it is if the template allows that. Otherwise it becomes text of the
  user's turn. In front of the conversation it would change the beginning of the prompt, so that all of it would have to
  be evaluated again.
- Documents and search results become text. Nothing is fetched, so URLs are refused.

docs/SERVER.md says which tools are translated, left out or refused. Tools that Anthropic defines and the client runs
have no schema in a request, because Anthropic's models were trained with it: other models are told the arguments.
Tools that Anthropic's servers run are left out if there are others, because agents offer them to every model. Alone or
forced, they are refused: a client would take what the model makes up for the result of a search.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from rest_local.api.bodies import MAX_STOPS, Body, ChatBody, Extension, JsonObject, Many, Stop
from rest_local.api.errors import ApiError, wrong
from rest_local.errors import OptionError


class InputMessage(Body):
    """One message. `system` is allowed after the first message, as in Anthropic's API of 2026."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[JsonObject]


class ToolChoice(Body):
    """A rule about whether the model may or must call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """A switch for reasoning. How much (`budget_tokens`) is left to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Body):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class CountBody(Body):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[Many[InputMessage], Field(min_length=1)]
    system: str | Many[JsonObject] | None = None
    tools: Many[JsonObject] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: JsonObject | None = None


class MessagesBody(CountBody):
    """The body of POST /v1/messages. `datastore` and `rest_local` are fields of this server."""

    max_tokens: Annotated[int, Field(ge=0)]
    stream: bool | None = None
    stop_sequences: Annotated[Many[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    mcp_servers: Many[JsonObject] | None = None
    datastore: str | Many[str] | None = None
    rest_local: Extension | None = None


# Claude Code's first system block is for Anthropic's accounting. It differs between conversations, so with it their
# common beginning would not be found in the cache.
_BILLING = "x-anthropic-billing-header:"
_PICTURES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high
Block = tuple[str, JsonObject]  # a content block and its place in the body
Places = tuple[str, list[str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Translated:
    """A chat, with the text `begun` that the client begins the answer with.

    `places` has the place in the client's body of each message's content and of its parts.
    """

    body: ChatBody
    begun: str
    places: list[Places]

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`. Places of the chat in its OptionErrors become places of the client's body."""
        try:
            return call()
        except OptionError as error:
            match error.place:
                case "messages", int(number), *rest if number < len(self.places):
                    whole, parts = self.places[number]
                case _:
                    raise
            match rest:
                case "content", int(part), *rest if part < len(parts):
                    place = f"{parts[part]}.source" if rest else parts[part]
                case _:
                    place = whole
            raise OptionError(error.message, (place,)) from error


def translated(body: CountBody, *, late_system: bool) -> Translated:
    """Translate the body into a chat. `late_system`: the template accepts system messages after the first turn.

    Raises ApiError 400, which names the place. The cost is proportional to the number of blocks; texts are not copied.
    """
    if body.thread is not None:
        # Anthropic's package then sends all messages. The cache still has what was evaluated before.
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        text = "thread: this server holds no conversations; send all messages"
        raise ApiError(400, text, code="invalid_value", param="thread", extra={"details": details})
    tools = openai_tools(body.tools or (), body.tool_choice)
    turns = _turns(body, late_system)
    begun = ""
    if turns[-1].role == "assistant":
        last = turns[-1]
        ran = max((i for i, (_, block) in enumerate(last.blocks, 1) if _ran_there(block)), default=0)
        begun = _begun(last.blocks[ran:])
        del last.blocks[ran:]
        if not ran:
            turns.pop()
    messages = _Messages()
    if system := _system(body):
        messages.add("system", {"role": "system", "content": system})
    for turn in turns:
        if turn.role == "assistant":
            messages.add_answer(turn)
        elif turn.role == "system":
            text = "\n\n".join(_text(*block) for block in turn.blocks)
            messages.add(turn.place, {"role": "system", "content": text})
        else:
            messages.add_question(turn)
    choice = openai_choice(body.tool_choice, tools)
    schema = (body.output_config and body.output_config.format) or body.output_format
    if begun and (schema is not None or choice not in (None, "auto", "none")):
        text = "an answer that you begin cannot be forced to call a tool or to match a schema"
        raise _wrong(f"messages[{len(body.messages) - 1}]", text)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages.list,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": not serial(body),
        "chat_template_kwargs": _variables(body, bool(begun)),
        "response_format": schema and {"type": "json_schema", "json_schema": {"schema": schema.schema_}},
    }
    if isinstance(body, MessagesBody):
        fields |= _generation(body)
    return Translated(ChatBody.model_validate(fields), begun, messages.places)


def serial(body: CountBody) -> bool:
    """Return True if an answer may contain one call only."""
    return bool(body.tool_choice and body.tool_choice.disable_parallel_tool_use)


def _generation(body: MessagesBody) -> dict[str, Any]:
    if body.mcp_servers:
        raise _wrong("mcp_servers", "this server connects to no MCP server; let the client do so, and offer its tools")
    return {
        "stream": body.stream,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "prompt_cache_key": body.metadata and body.metadata.user_id,
        "datastore": body.datastore,
        "rest_local": body.rest_local,
    }


def _variables(body: CountBody, begun: bool) -> dict[str, Any]:
    """Return template variables: whether the model reasons (only if requested, as in Anthropic's API) and how much."""
    thinks = body.thinking is not None and body.thinking.type != "disabled" and not begun
    variables: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    if thinks and body.output_config and body.output_config.effort:
        effort = body.output_config.effort
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return variables


def _system(body: CountBody) -> str:
    """Return the system prompt, including system messages before the first turn."""
    texts = [_text(*block) for block in _blocks(body.system or "", "system")]
    for number, turn in enumerate(body.messages):
        if turn.role != "system":
            break
        texts += [_text(*block) for block in _blocks(turn.content, f"messages[{number}].content")]
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))


@dataclass
class _Turn:
    """Consecutive messages of one role. `place` is the content of the first of them."""

    role: str
    place: str
    blocks: list[Block] = field(default_factory=list)


def _turns(body: CountBody, late_system: bool) -> list[_Turn]:
    """Return the turns after the first system messages. Raises ApiError 400 for a message without content."""
    turns: list[_Turn] = []
    for number, message in enumerate(body.messages):
        place, role = f"messages[{number}].content", message.role
        if role == "system":
            if not turns:
                continue  # `_system` reads it
            role = "system" if late_system else "user"
        elif not turns and role != "user":
            raise _wrong(f"messages[{number}].role", "the first message must be from the user")
        given = _blocks(message.content, place)
        blocks = [(at, block) for at, block in given if block.get("type") != "text" or block.get("text") != ""]
        if not blocks and (role == "user" or number < len(body.messages) - 1):
            raise _wrong(place, "give some content")
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role, place))
        turns[-1].blocks += blocks
    if not turns:
        raise _wrong("messages", "give a message from the user")
    return turns


def _blocks(content: Any, place: str) -> list[Block]:
    """Return text or a list as blocks. Raises ApiError 400 for anything else."""
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _wrong(place, "give text or a list of blocks")
    return [(f"{place}[{number}]", block) for number, block in enumerate(content)]


def _begun(blocks: Sequence[Block]) -> str:
    """Return the text of the assistant's last blocks, which the answer begins with."""
    for place, block in blocks:
        if block.get("type") == "tool_use":
            raise _wrong(place, "no later message has a tool_result for this call")
    return "".join(_text(*block) for block in blocks if block[1].get("type") not in _REASONING)


def _ran_there(block: JsonObject) -> bool:
    """Return True for a call that Anthropic's servers ran (`server_tool_use`, `mcp_tool_use`), or its result."""
    return str(block.get("type")).endswith(("_tool_use", "_tool_result"))


_REASONING = ("thinking", "redacted_thinking")


class _Messages:
    """Collects the messages of a chat. `places` is as in `Translated`."""

    def __init__(self) -> None:
        self.list: list[JsonObject] = []
        self.places: list[Places] = []
        self._names: dict[str, str] = {}  # call id -> name of the tool

    def add(self, place: str, message: JsonObject, parts: Iterable[str] = ()) -> None:
        self.list.append(message)
        self.places.append((place, list(parts)))

    def add_question(self, turn: _Turn) -> None:
        parts: list[Block] = []
        for place, block in turn.blocks:
            if block.get("type") == "tool_result":
                parts += self._add_result(place, block)
        for place, block in turn.blocks:
            if block.get("type") != "tool_result":
                parts += ((place, part) for part in _parts(place, block))
        if parts:
            content: str | list[JsonObject] = [part for _, part in parts]
            if all(part["type"] == "text" for _, part in parts):
                content = "\n".join(part["text"] for _, part in parts)
            self.add(turn.place, {"role": "user", "content": content}, (place for place, _ in parts))

    def _add_result(self, place: str, block: JsonObject) -> list[Block]:
        """Add the text of a result, and return its images."""
        known = self._known(place, block)
        inner = _blocks(block.get("content") or "", f"{place}.content")
        parts = [(at, part) for at, each in inner for part in _parts(at, each, in_result=True)]
        text = "\n".join(part["text"] for _, part in parts if part["type"] == "text")
        if block.get("is_error") is True and not text.lower().startswith("error"):
            text = f"Error: {text}"
        self.add(place, {"role": "tool", "tool_call_id": known, "name": self._names[known], "content": text})
        return [(at, part) for at, part in parts if part["type"] != "text"]

    def _known(self, place: str, block: JsonObject) -> str:
        """Return the id of the call that this result answers."""
        known = block.get("tool_use_id")
        if not isinstance(known, str) or known not in self._names:
            shown = known[:80] if isinstance(known, str) else known
            raise _wrong(f"{place}.tool_use_id", f"no earlier tool_use has the id {shown!r}")
        return known

    def add_answer(self, turn: _Turn) -> None:
        begin = 0
        for end, (place, block) in enumerate(turn.blocks):
            if _ran_there(block) and not str(block["type"]).endswith("_use"):
                self._add_message(turn.place, turn.blocks[begin:end])
                begin, known = end + 1, self._known(place, block)
                text = _written(block.get("content"))
                self.add(place, {"role": "tool", "tool_call_id": known, "name": self._names[known], "content": text})
        self._add_message(turn.place, turn.blocks[begin:])

    def _add_message(self, at: str, blocks: Sequence[Block]) -> None:
        """Add a message of the assistant at the place `at`, unless there are no blocks."""
        texts, thoughts, calls = [], [], []
        for place, block in blocks:
            kind = block.get("type")
            if kind == "tool_use" or _ran_there(block):
                calls.append(self._call(place, block))
            elif kind == "thinking":
                thoughts.append(_field(place, block, "thinking"))
            elif kind != "redacted_thinking":
                texts.append(_text(place, block))
        message: JsonObject = {"role": "assistant", "content": "\n".join(texts)}
        if thought := "\n".join(filter(None, thoughts)):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        if blocks:
            self.add(at, message)

    def _call(self, place: str, block: JsonObject) -> JsonObject:
        known, name = _field(place, block, "id"), _field(place, block, "name")
        given = block.get("input")
        if not isinstance(given, dict):
            raise _wrong(f"{place}.input", "give an object")
        self._names[known] = name
        arguments = json.dumps(given, ensure_ascii=False)
        return {"id": known, "type": "function", "function": {"name": name, "arguments": arguments}}


def _written(content: Any) -> str:
    """Return the text that a tool of Anthropic's servers has found, or JSON without what only Anthropic can read."""
    blocks = content if isinstance(content, list) else [{"text": content}]
    texts = [block["text"] for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(blocks) else json.dumps(_readable(content), ensure_ascii=False)


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _readable(inner)
            for key, inner in value.items()
            if inner is not None and not key.startswith("encrypted_")
        }
    return [_readable(inner) for inner in value] if isinstance(value, list) else value


def _field(place: str, block: JsonObject, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", "give text")
    return value


def _text(place: str, block: JsonObject) -> str:
    """Return the text of a block that must be text."""
    if block.get("type") != "text":
        raise _unknown(place, block)
    return _field(place, block, "text")


def _unknown(place: str, block: JsonObject) -> Exception:
    kind = block.get("type")
    shown = repr(kind[:64]) if isinstance(kind, str) else "no type"
    return _wrong(f"{place}.type", f"blocks of type {shown} are not supported here")


def _parts(place: str, block: JsonObject, in_result: bool = False) -> list[JsonObject]:
    kind = block.get("type")
    if kind == "text":
        return [_as_text(_field(place, block, "text"))]
    if kind == "image":
        return [_image(place, block)]
    if kind == "document":
        return _document(place, block)
    if kind == "search_result":
        text = "\n".join(_text(*inner) for inner in _blocks(block.get("content"), f"{place}.content"))
        title, source = _field(place, block, "title"), _field(place, block, "source")
        return [_as_text(f"<search_result>\ntitle: {title}\nsource: {source}\n{text}\n</search_result>")]
    if kind == "tool_reference" and in_result:
        return [_as_text(f"The tool {_field(place, block, 'tool_name')} is available.")]
    raise _unknown(place, block)


def _as_text(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _source(place: str, block: JsonObject) -> tuple[str, JsonObject]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise _wrong(f"{place}.source", "give a source")
    return f"{place}.source", source


def _image(place: str, block: JsonObject) -> JsonObject:
    place, source = _source(place, block)
    if source.get("type") != "base64":
        raise _wrong(f"{place}.type", "images are not fetched; send them as base64")
    if source.get("media_type") not in _PICTURES:
        raise _wrong(f"{place}.media_type", f"give one of {', '.join(_PICTURES)}")
    url = f"data:{source['media_type']};base64,{_field(place, source, 'data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(place: str, block: JsonObject) -> list[JsonObject]:
    """Return the text with its title and context. A document's content may have images."""
    source_place, source = _source(place, block)
    if source.get("type") == "text":
        inner = [_as_text(_field(source_place, source, "data"))]
    elif source.get("type") == "content":
        blocks = _blocks(source.get("content"), f"{source_place}.content")
        inner = [part for each in blocks for part in _parts(*each)]
    else:
        raise _wrong(f"{source_place}.type", "documents are read as text only; extract the text, and send that")
    head = [f"{name}: {block[name]}" for name in ("title", "context") if isinstance(block.get(name), str)]
    return [_as_text("\n".join(["<document>", *head])), *inner, _as_text("</document>")]


_RUN_THERE = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
# Descriptions of the tools that Anthropic defines and clients run.
_RUN_BY_CLIENTS = {
    "bash_": "Run `command` in a bash shell that keeps its state between calls, or start it anew with `restart`: true.",
    "text_editor_": "View and edit the text file `path`. `command` is one of: view (perhaps with `view_range`: "
    "[first, last]), create (with `file_text`), str_replace (`old_str`, which occurs once, and `new_str`), insert "
    "(`insert_line`, the line before it, and `insert_text`).",
    "memory_": "Keep notes in files below /memories, which outlive the conversation. `command` is one of: view, "
    "create, str_replace, insert, delete (with `path` and a text editor's arguments), rename (`old_path`, `new_path`).",
}


def _wrong(place: str, text: str) -> ApiError:
    """Make an error for a place of the body such as `messages[2].content[0].type`. `param` is its field."""
    return wrong(place, text, param=place.partition("[")[0].partition(".")[0])


def openai_tools(tools: Sequence[JsonObject], choice: ToolChoice | None) -> list[JsonObject]:
    """Return the tools that are offered. Raises ApiError 400, which names the place."""
    offered, left_out = [], {}
    for number, tool in enumerate(tools):
        place, kind, name = f"tools[{number}]", tool.get("type") or "custom", tool.get("name")
        if not isinstance(kind, str):
            raise _wrong(f"{place}.type", "give text")
        if kind.startswith(_RUN_THERE):
            left_out[name if isinstance(name, str) else kind] = (place, kind)
        elif not isinstance(name, str) or not name:
            raise _wrong(f"{place}.name", "give a name")
        else:
            offered.append(_function(tool, kind, name, place))
    wanted = choice.name if choice is not None and choice.type == "tool" else None
    if left_out and (not offered or wanted in left_out):
        place, kind = left_out.get(wanted or "") or next(iter(left_out.values()))
        raise _wrong(f"{place}.type", f"{kind[:64]} runs on Anthropic's servers, not on this one")
    return offered


def openai_choice(choice: ToolChoice | None, offered: Sequence[JsonObject]) -> Any:
    """Return OpenAI's `tool_choice`. Raises ApiError 400 for a tool that is not offered."""
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if not offered:
        raise _wrong("tool_choice", "a call is forced, but no tools are given")
    if choice.type == "any":
        return "required"
    if choice.name not in {tool["function"]["name"] for tool in offered}:
        raise _wrong("tool_choice.name", "no tool has this name")
    return {"type": "function", "function": {"name": choice.name}}


def _function(tool: JsonObject, kind: str, name: str, place: str) -> JsonObject:
    if kind == "custom":
        description, schema = tool.get("description") or "", tool.get("input_schema")
        if not isinstance(description, str):
            raise _wrong(f"{place}.description", "give text")
        if not isinstance(schema, dict):
            raise _wrong(f"{place}.input_schema", "give a JSON schema")
    else:
        description = next((text for prefix, text in _RUN_BY_CLIENTS.items() if kind.startswith(prefix)), "")
        if not description:
            raise _wrong(f"{place}.type", f"tools of type {kind[:64]!r} are not supported")
        schema = {"type": "object"}
    function: JsonObject = {"name": name, "description": description, "parameters": schema}
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}
