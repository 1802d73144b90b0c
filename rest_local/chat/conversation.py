"""Prepare a client's conversation for the model's own chat template.

Contract: OpenAI's messages and tools in, the prompt out. The template handles what it supports. Everything else is
written in another way:

- system messages join the first message of the user,
- calls and results become text, tools a description,
- several calls in one message become one message each,
- text becomes a list of one part,
- an empty answer becomes the shortest text that is accepted,
- neighbouring messages of one role become one, if user and assistant must alternate.

One thing is lost: text in addition to a call, if the template drops it and accepts no other order (Mistral). Messages
are never changed in place. Knows nothing about models. `capabilities_of` finds out what a template supports by
rendering small conversations and checking the result, never from names or from words in the template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rest_local.chat.images import Mark
from rest_local.chat.renderer import render
from rest_local.chat.tools.format import Call, Tool, write_calls
from rest_local.errors import OptionError, Place, TemplateFailed, TemplateTooCostly

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe_purpose",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
_FIRST = {"role": "system", "content": "probe_first"}
_USER = {"role": "user", "content": "probe_user"}
_SAID = {"role": "assistant", "content": "probe_answer"}
_ID = "abcdef123"  # Mistral's templates accept only nine letters and digits


@dataclass(frozen=True)
class Capabilities:
    system: bool  # a system message at the beginning
    late_system: bool  # a system message later on
    system_with_results: bool  # a system message if the last message is a tool's result
    tools: bool  # descriptions of tools
    tool_calls: bool  # earlier calls
    call_content: bool  # text in the same message as a call
    tool_results: bool  # results of earlier calls
    parallel_calls: bool  # several calls in one message
    object_arguments: bool  # arguments as an object, not as text
    null_calls: bool  # a message with calls needs None as its content: empty text is rendered differently
    part_roles: frozenset[str]  # roles whose text is lost unless it is in a list of parts (SmolVLM)
    empty_answer: str  # the least text of an answer: some templates refuse an empty one (Ministral 3)
    alternates: bool  # user and assistant must alternate
    short_ids: bool  # ids of calls must have nine characters

    def to_dict(self) -> dict[str, bool]:
        """Return `chat_template_caps` of `/props`, under llama-server's names."""
        return {
            "supports_object_arguments": self.object_arguments,
            "supports_parallel_tool_calls": self.parallel_calls,
            "supports_system_role": self.system,
            "supports_tool_calls": self.tool_calls,
            "supports_tools": self.tools,
        }


@lru_cache(maxsize=16)
def capabilities_of(template: str, bos: str | None, eos: str | None) -> Capabilities:
    """Measure a template (see `render`). One that renders nothing supports nothing. Raises TemplateTooCostly."""

    def text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """Return the prompt, or None if the template refuses the messages."""
        try:
            return render(template, [_in_parts(each, part_roles) for each in messages], bos=bos, eos=eos, tools=tools)
        except TemplateTooCostly:
            raise  # all twenty renders would be too costly
        except TemplateFailed:
            return None

    def shows(
        messages: Sequence[Mapping[str, Any]],
        *words: str,
        never: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> bool:
        """Return True if the prompt contains all of `words`, and not `never`."""
        prompt = text(messages, tools)
        return prompt is not None and all(word in prompt for word in words) and not (never and never in prompt)

    part_roles: set[str] = set()
    for role, word, messages in (
        ("user", "probe_user", [_USER]),
        ("assistant", "probe_answer", [_USER, _SAID]),
        ("system", "probe_first", [_FIRST, _USER]),
        ("tool", "probe_result", [_USER, _call(1), _result()]),
    ):
        if not shows(messages, word):
            part_roles.add(role)
            if not shows(messages, word, never="'type'"):
                part_roles.remove(role)
    as_object = shows([_USER, _call(1), _result()], "probe_tool", "probe_value", never="{'probe_key'")
    as_text = shows([_USER, _call(1, text=True), _result()], "probe_tool", "probe_value")
    call, two_calls = _call(1, text=not as_object), _call(2, text=not as_object)
    long_id = [_USER, {**call, "tool_calls": [{**call["tool_calls"][0], "id": "call_" + 24 * "a"}]}]
    with_empty, with_null = (text([_USER, {**call, "content": content}, _result()]) for content in ("", None))
    return Capabilities(
        system=shows([{"role": "system", "content": "probe_system"}, _USER], "probe_system", "probe_user"),
        late_system=shows(
            [_FIRST, _USER, _SAID, {"role": "system", "content": "probe_system"}, _USER],
            *("probe_first", "probe_answer", "probe_system"),
        ),
        system_with_results=shows(
            [{"role": "system", "content": "probe_system"}, _USER, call, _result()], "probe_system"
        ),
        tools=shows([_USER], "probe_tool", tools=[_TOOL]),
        tool_calls=as_object or as_text,
        call_content=shows([_USER, {**call, "content": "probe_said"}, _result()], "probe_said", "probe_tool"),
        tool_results=shows([_USER, call, _result()], "probe_result"),
        parallel_calls=shows([_USER, two_calls], "probe_tool", "probe_other"),
        object_arguments=as_object,
        null_calls=with_null != with_empty
        and with_null is not None
        and "probe_tool" in with_null
        and "None" not in with_null,
        part_roles=frozenset(part_roles),
        empty_answer=next(
            (said for said in ("", " ", "...") if text([_USER, {**_SAID, "content": said}, _USER]) is not None), ""
        ),
        alternates=text([_USER, _USER]) is None,
        short_ids=text([_USER, call]) is not None and text(long_id) is None,
    )


def _call(count: int, text: bool = False) -> dict[str, Any]:
    arguments: Any = '{"probe_key": "probe_value"}' if text else {"probe_key": "probe_value"}
    calls = [
        {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name in ("probe_tool", "probe_other")[:count]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result() -> dict[str, Any]:
    return {"role": "tool", "content": "probe_result", "tool_call_id": _ID, "name": "probe_tool"}


Message = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool", "ipython": "tool", "model": "assistant"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe tools for a template that does not support them, with calls as in `write_calls`."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> tags:\n<tools>\n{described}\n</tools>\n\n"
        "For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> "
        'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the texts of the vocabulary's start and end tokens, None if it has none.

    `variables` are defaults for names that a conversation does not set.
    """

    source: str
    bos: str | None = None
    eos: str | None = None
    variables: Mapping[str, Any] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Return what the template supports, measured once by `capabilities_of`."""
        return capabilities_of(self.source, self.bos, self.eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        calls_as_text: Callable[[Sequence[Call]], str] = write_calls,
    ) -> str:
        """Return the prompt.

        `variables` are further names for the template, such as enable_thinking (`chat_template_kwargs`).
        `calls_as_text` writes earlier calls if the template does not. Raises OptionError, which names the place, for an
        invalid message, and TemplateFailed for what the template refuses even so.
        """
        able = self.capabilities
        offered = [tool.for_template() for tool in tools]
        prepared = [_message(message, i) for i, message in enumerate(messages)]
        if offered and not able.tools:
            prepared.insert(0, {"role": "system", "content": describe_tools(offered)})
        prepared = _systems(prepared, able)
        prepared = _calls(prepared, able, calls_as_text)
        if able.alternates:
            prepared = _alternating(prepared)
        prepared = [_in_parts(_answered(_thinking(each, self.source), able), able.part_roles) for each in prepared]
        return render(
            self.source,
            prepared,
            bos=self.bos,
            eos=self.eos,
            add_generation_prompt=add_generation_prompt,
            tools=offered if offered and able.tools else None,
            variables={**(self.variables or {}), **(variables or {})},
        )


def content_text(content: Any, place: Place) -> str:
    """Return the text of a message's content, which is text or parts.

    Parts are joined with line feeds as in llama-server, except around the marks of images (`rest_local.chat.images`).
    Raises OptionError, which names the place, for any other part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise OptionError("give text or a list of parts", place)
    texts: list[str] = []
    between = ""
    for i, part in enumerate(content):
        text = part
        if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS:
            text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise OptionError(f"parts of type {str(kind)[:40]!r} are not supported, only text", (*place, i))
        texts += (text,) if isinstance(text, Mark) else (between, text)
        between = "" if isinstance(text, Mark) else "\n"
    return "".join(texts)


def _message(message: Any, number: int) -> Message:
    """Return the message with its content as text and, if they are JSON, the arguments of its calls as objects."""
    place: Place = ("messages", number)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise OptionError("give an object with a role", place)
    role = _ROLES.get(message["role"], message["role"])
    known: Message = {key: value for key, value in message.items() if value is not None and key != "refusal"}
    known |= {"role": role, "content": content_text(message.get("content"), (*place, "content"))}
    calls = known.pop("tool_calls", [])
    legacy = known.pop("function_call", None)
    if not isinstance(calls, list):
        raise OptionError("give a list", (*place, "tool_calls"))
    if legacy is not None:
        calls = [*calls, {"function": legacy}]
    if calls and role == "assistant":
        known["tool_calls"] = [_called(call, number, i) for i, call in enumerate(calls)]
    if "reasoning" in known and "reasoning_content" not in known:
        known["reasoning_content"] = known.pop("reasoning")
    return known


def _called(call: Any, number: int, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        place = ("messages", number, "tool_calls", index)
        raise OptionError("give an object with a function that has a name", place)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            read = arguments  # the template gets a model's invalid JSON unchanged
        arguments = read if isinstance(read, dict) else arguments
    known = call.get("id")
    return {
        "id": known if isinstance(known, str) and known else f"call_{number}_{index}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _systems(messages: list[Message], able: Capabilities) -> list[Message]:
    """Put system messages where the template takes them: unchanged, joined in front, or in the first user message."""
    places = [i for i, message in enumerate(messages) if message["role"] == "system"]
    results = any(message["role"] == "tool" for message in messages)
    takes = able.system and (able.system_with_results or not results)
    if not places or (takes and (places == [0] or able.late_system)):
        return messages
    whole = "\n\n".join(messages[i]["content"] for i in places if messages[i]["content"])
    others = [message for message in messages if message["role"] != "system"]
    if takes:
        return [{"role": "system", "content": whole}, *others]
    first = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": whole}, *others]
    question = others[first]["content"]
    merged = {**others[first], "content": "\n\n".join(text for text in (whole, question) if text)}
    return [*others[:first], merged, *others[first + 1 :]]


def _calls(messages: list[Message], able: Capabilities, as_text: Callable[[Sequence[Call]], str]) -> list[Message]:
    """Rewrite calls and results in the form that the template supports."""
    if able.tool_calls and not able.parallel_calls:
        messages = _one_by_one(messages)
    done = []
    for message in messages:
        if "tool_calls" in message:
            if message["content"] and able.tool_calls and not able.call_content and not able.alternates:
                done.append({"role": "assistant", "content": message["content"]})
                message = {**message, "content": ""}
            message = _with_calls(message, able, as_text)
        if message["role"] == "tool":
            message = _with_result(message, able)
        done.append(message)
    return done


def _with_calls(message: Message, able: Capabilities, as_text: Callable[[Sequence[Call]], str]) -> Message:
    if not able.tool_calls:
        text = as_text([call["function"] for call in message["tool_calls"]])
        content = "\n".join(part for part in (message["content"], text) if part)
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not able.object_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif able.object_arguments and isinstance(arguments, str):
            arguments = {"arguments": arguments}  # the template would fail on text that is not JSON
        calls.append(
            {
                **call,
                "id": _short(call["id"]) if able.short_ids else call["id"],
                "function": {**call["function"], "arguments": arguments},
            }
        )
    prepared = {**message, "tool_calls": calls}
    return {**prepared, "content": None} if able.null_calls and not message["content"] else prepared


def _with_result(message: Message, able: Capabilities) -> Message:
    if not able.tool_results:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    known = str(message.get("tool_call_id", ""))
    return {**message, "tool_call_id": _short(known) if able.short_ids else known}


def _short(known: str) -> str:
    """Return nine letters and digits, the same for the same id."""
    if len(known) == 9 and known.isalnum():
        return known
    return hashlib.sha256(known.encode("utf-8", "replace")).hexdigest()[:9]


def _one_by_one(messages: list[Message]) -> list[Message]:
    """Split a message with several calls into one message for each call, followed by its result."""
    done: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            done.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            done.append({**message, "content": message["content"] if i == 0 else "", "tool_calls": [call]})
            mine = next((r for r in results if r.get("tool_call_id") == call["id"]), None)
            if mine is None and results and "tool_call_id" not in results[0]:
                mine = results[0]
            if mine is not None:
                results.remove(mine)
                done.append(mine)
        done += results
    return done


def _alternating(messages: list[Message]) -> list[Message]:
    """Make user and assistant alternate, the user first: join neighbours of one role, fill gaps with empty messages.

    Messages with calls, and results, do not count as turns (Mistral).
    """
    done: list[Message] = []
    turn = "assistant"
    for message in messages:
        role = message["role"]
        if role not in ("user", "assistant") or "tool_calls" in message:
            done.append(message)
            continue
        if role == turn and done and done[-1]["role"] == role and "tool_calls" not in done[-1]:
            joined = "\n\n".join(text for text in (done[-1]["content"], message["content"]) if text)
            done[-1] = {**done[-1], "content": joined}
            continue
        if role == turn:
            done.append({"role": "user" if role == "assistant" else "assistant", "content": ""})
        done.append(message)
        turn = role
    return done


def _answered(message: Message, able: Capabilities) -> Message:
    """Return an answer without text as the template accepts it. A client may have stopped it, or it fills a gap."""
    if message["role"] != "assistant" or message["content"] != "" or "tool_calls" in message:
        return message
    return {**message, "content": able.empty_answer}


def _in_parts(message: Mapping[str, Any], roles: Collection[str]) -> Message:
    """Return the message with its text in a part, if its role is one of these."""
    if message["role"] not in roles or not isinstance(message["content"], str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _thinking(message: Message, template: str) -> Message:
    """Add reasoning under the name that gpt-oss's template reads. It accepts none next to the content of a call."""
    thought = message.get("reasoning_content")
    if not thought or ".thinking" not in template or (message.get("tool_calls") and message["content"]):
        return message
    return {**message, "thinking": thought}
