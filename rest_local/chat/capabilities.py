"""What a chat template supports, found by rendering small conversations and checking the result.

Contract: template text in, facts out; nothing is inferred from names or from what the text mentions. Costs about 20
renders, 10 to 50 ms, once for each template and process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rest_local.chat.renderer import render
from rest_local.errors import TemplateFailed, TemplateTooCostly

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
_ID = "abcdef123"  # nine letters and digits: Mistral's templates accept no other


@dataclass(frozen=True)
class Capabilities:
    """What one template supports.

    system               a system message at the beginning
    late_system          a system message later on
    system_with_results  a system message where the last message is a tool's result
    tools                descriptions of tools
    tool_calls           earlier calls
    call_content         text in the same message as a call
    tool_results         results of earlier calls
    parallel_calls       several calls in one message
    object_arguments     arguments as an object, not as text
    null_calls           a message with calls needs None as its content: empty text is rendered differently
    string_content       content as text
    typed_content        content as a list of parts
    reasoning            the reasoning of the last answer, if that called a tool
    alternates           user and assistant must alternate
    short_ids            ids of calls must have nine characters
    """

    system: bool
    late_system: bool
    system_with_results: bool
    tools: bool
    tool_calls: bool
    call_content: bool
    tool_results: bool
    parallel_calls: bool
    object_arguments: bool
    null_calls: bool
    string_content: bool
    typed_content: bool
    reasoning: bool
    alternates: bool
    short_ids: bool

    def to_dict(self) -> dict[str, bool]:
        """`chat_template_caps` of `/props`, under llama-server's names."""
        return {
            "supports_object_arguments": self.object_arguments,
            "supports_parallel_tool_calls": self.parallel_calls,
            "supports_preserve_reasoning": self.reasoning,
            "supports_string_content": self.string_content,
            "supports_system_role": self.system,
            "supports_tool_calls": self.tool_calls,
            "supports_tools": self.tools,
            "supports_typed_content": self.typed_content,
        }


@lru_cache(maxsize=16)
def capabilities_of(template: str, bos: str | None, eos: str | None) -> Capabilities:
    """Measures a template. A template that renders nothing supports nothing. `bos`, `eos`: as for `render`.

    Raises TemplateTooCostly.
    """
    probe = _Probe(template, bos, eos)
    as_object = probe.shows([_USER, _call(1), _result()], "probe_tool", "probe_value", never="{'probe_key'")
    as_text = probe.shows([_USER, _call(1, text=True), _result()], "probe_tool", "probe_value")
    call, two_calls = _call(1, text=not as_object), _call(2, text=not as_object)
    long_id = [_USER, {**call, "tool_calls": [{**call["tool_calls"][0], "id": "call_" + 24 * "a"}]}]
    with_empty, with_null = (probe.text([_USER, {**call, "content": content}, _result()]) for content in ("", None))
    return Capabilities(
        system=probe.shows([{"role": "system", "content": "probe_system"}, _USER], "probe_system", "probe_user"),
        late_system=probe.shows(
            [_FIRST, _USER, _SAID, {"role": "system", "content": "probe_system"}, _USER],
            *("probe_first", "probe_answer", "probe_system"),
        ),
        system_with_results=probe.shows(
            [{"role": "system", "content": "probe_system"}, _USER, call, _result()], "probe_system"
        ),
        tools=probe.shows([_USER], "probe_tool", tools=[_TOOL]),
        tool_calls=as_object or as_text,
        call_content=probe.shows([_USER, {**call, "content": "probe_said"}, _result()], "probe_said", "probe_tool"),
        tool_results=probe.shows([_USER, call, _result()], "probe_result"),
        parallel_calls=probe.shows([_USER, two_calls], "probe_tool", "probe_other"),
        object_arguments=as_object,
        null_calls=with_null != with_empty and with_null is not None and _is_call(with_null),
        string_content=probe.shows([_USER], "probe_user"),
        typed_content=probe.shows(
            [{"role": "user", "content": [{"type": "text", "text": "probe_part"}]}], "probe_part", never="type"
        ),
        reasoning=probe.shows(
            [_USER, {**call, "reasoning_content": "probe_thought", "thinking": "probe_thought"}, _result()],
            "probe_thought",
        ),
        alternates=probe.text([_USER, _USER]) is None,
        short_ids=probe.text([_USER, call]) is not None and probe.text(long_id) is None,
    )


def _call(count: int, text: bool = False) -> dict[str, Any]:
    arguments: Any = '{"probe_key": "probe_value"}' if text else {"probe_key": "probe_value"}
    calls = [
        {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name in ("probe_tool", "probe_other")[:count]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _is_call(text: str) -> bool:
    return "probe_tool" in text and "None" not in text


def _result() -> dict[str, Any]:
    return {"role": "tool", "content": "probe_result", "tool_call_id": _ID, "name": "probe_tool"}


class _Probe:
    """Renders small conversations with one template."""

    def __init__(self, template: str, bos: str | None, eos: str | None) -> None:
        self._template, self._bos, self._eos = template, bos, eos

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        """The prompt, or None if the template refuses the messages."""
        try:
            return render(self._template, messages, bos=self._bos, eos=self._eos, tools=tools)
        except TemplateTooCostly:
            raise  # each of the twenty renders would be
        except TemplateFailed:
            return None

    def shows(
        self,
        messages: Sequence[Mapping[str, Any]],
        *words: str,
        never: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> bool:
        """Whether the prompt contains all of `words`, and not `never`."""
        text = self.text(messages, tools)
        return text is not None and all(word in text for word in words) and not (never and never in text)
