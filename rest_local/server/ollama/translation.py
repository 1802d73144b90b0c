"""From Ollama's bodies to those of the server's own calls. Knows no HTTP.

- Options keep their names, or get OpenAI's. What has no meaning here is left out and named by `ignored`.
- Images are base64 without a type, which their first bytes tell; they become OpenAI's `image_url` parts.
- Calls have no ids in Ollama's older form. They get some here, and each result gets the id of the call that it answers:
  the first one of its name that has no result yet, else the first one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from rest_local.server.bodies import ChatBody, Extension, GenerationBody, Message, ResponseFormat
from rest_local.server.errors import ApiError
from rest_local.server.ollama.bodies import AnswerBody, GenerateBody, OllamaChatBody, OllamaMessage

TEMPLATE = "the template of the model's own file is used"
LOADED = "set when the server was started"
UNKNOWN = "this server has no such option"
_AT_LOAD = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram", "numa")
_SAMPLERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty"),
)
_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
)
MAX_IGNORED = 32


def ignored(body: AnswerBody) -> dict[str, str]:
    """Fields of a body that have no meaning here, each with the reason."""
    found = {}
    if isinstance(body, GenerateBody) and body.template:
        found["template"] = TEMPLATE
    for name in list(body.options.model_extra or {})[:MAX_IGNORED]:
        found[f"options.{name[:64]}"] = LOADED if name in _AT_LOAD else UNKNOWN
    return found


def fields_of(body: AnswerBody) -> dict[str, Any]:
    """The fields of `GenerationBody` that both calls share."""
    options = body.options
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAMPLERS}
    fields |= {"stream": body.stream, "n_predict": options.num_predict, "n_keep": options.num_keep, "model": body.asked}
    if body.format == "json":
        fields["response_format"] = ResponseFormat.model_validate({"type": "json_object"})
    elif isinstance(body.format, dict):
        fields["json_schema"] = body.format
    fields |= {name: getattr(body, name) for name in ("datastore", "prompt_cache_key", "rest_local")}
    if body.shift:
        fields["rest_local"] = (body.rest_local or Extension()).model_copy(update={"context_shift": True})
    return {name: value for name, value in fields.items() if value is not None}


def plain_body(body: GenerateBody) -> GenerationBody:
    """The body of a prompt that is evaluated as it is."""
    return GenerationBody(**fields_of(body))


def chat_body(body: AnswerBody, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> ChatBody:
    """The body of a conversation."""
    more: dict[str, Any] = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    more["tools"] = list(tools) if tools else None
    more["chat_template_kwargs"] = thinking_variables(body.think)
    given = {name: value for name, value in more.items() if value is not None}
    return ChatBody(messages=list(messages), **fields_of(body), **given)


def thinking_variables(think: bool | str | None) -> dict[str, Any] | None:
    """The names by which templates are told to reason or not, and how much; None for what the model does by default."""
    if think is None or think == "":
        return None
    switched = {"enable_thinking": bool(think), "thinking": bool(think)}
    return switched | {"reasoning_effort": think} if isinstance(think, str) else switched


def prompt_messages(body: GenerateBody) -> list[Message]:
    """The conversation of one prompt."""
    system = [OllamaMessage(role="system", content=body.system)] if body.system else []
    asked = OllamaMessage(role="user", content=body.prompt)
    return [*(_message(each, "system") for each in system), _message(asked, "", images=_parts(body.images, "images"))]


def chat_messages(body: OllamaChatBody) -> list[Message]:
    """The conversation in OpenAI's form. Raises ApiError 400 for an image that is not one."""
    found: list[Message] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for number, message in enumerate(body.messages):
        place = f"messages[{number}]"
        more: dict[str, Any] = {}
        if message.tool_calls:
            ids = [call.id or f"call_{number}_{i}" for i, call in enumerate(message.tool_calls)]
            waiting = [(known, call.function.name) for known, call in zip(ids, message.tool_calls, strict=True)]
            more["tool_calls"] = [
                {"id": known, "type": "function", "function": call.function.model_dump()}
                for known, call in zip(ids, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            more |= _answered(message, waiting)
        found.append(_message(message, place, images=_parts(message.images, f"{place}.images"), **more))
    return found


def _answered(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """The id of the call that a result answers, and its name; the call is taken from those that wait."""
    at = next((i for i, (known, _) in enumerate(waiting) if known == message.tool_call_id), None)
    if at is None:
        at = next((i for i, (_, name) in enumerate(waiting) if name == message.tool_name), 0)
    known, name = waiting.pop(at) if at < len(waiting) else (message.tool_call_id, message.tool_name)
    return {key: value for key, value in {"tool_call_id": known, "name": message.tool_name or name}.items() if value}


def _message(message: OllamaMessage, place: str, *, images: Sequence[dict[str, Any]] = (), **more: Any) -> Message:
    content: Any = message.content
    if images:
        content = [*([{"type": "text", "text": message.content}] if message.content else []), *images]
    if message.thinking:
        more["reasoning_content"] = message.thinking
    return Message(role=message.role, content=content, **more)


def _parts(images: Sequence[str] | None, place: str) -> list[dict[str, Any]]:
    """OpenAI's content parts. `place`: the field, for errors. Raises ApiError 400."""
    return [
        {"type": "image_url", "image_url": {"url": _data_url(image, f"{place}[{number}]")}}
        for number, image in enumerate(images or ())
    ]


def _data_url(image: str, place: str) -> str:
    if image.startswith("data:"):
        return image
    try:
        head = base64.b64decode(image[:64], validate=True)
        base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"{place}: give an image in base64", code="invalid_value", param=place) from error
    kind = next((kind for begin, kind in _KINDS if head.startswith(begin)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        kind = "image/webp"
    if kind is None:
        raise ApiError(400, f"{place}: give a PNG, JPEG, WebP or GIF image in base64", param=place)
    return f"data:{kind};base64,{image}"
