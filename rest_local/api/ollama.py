"""Ollama's API for clients that know nothing else: /api/chat, /api/generate and /api/embed.

Its bodies are translated into those of the server's own calls, so an answer is the same in every protocol.

- A whole number may be written as 40.0, and a model may be called `name` instead of `model`.
- Options keep their names, or get OpenAI's. Options without a meaning here are ignored, like other unknown fields.
- Images are base64 without a type. They become OpenAI's `image_url` parts.
- Calls have no ids in Ollama's older form, so they get some here. A result answers the first call of its name that has
  no result yet, or else the first call.
- An answer is a stream of JSON lines, or one object. Each line is sent by itself, because some clients read each part
  of the body that arrives as one line.
- A call is sent when it is complete, with its arguments as an object. A call that was cut off is left out.
- Durations are nanoseconds. `prompt_eval_count` is the whole prompt, including what was in memory. Where steps are
  hidden, the time of the prompt is left out and the other times are rounded, as in llama-server's `timings`.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import to_json

from rest_local.api.answers import COARSE_MS, Answer, Choice, HasResult, Part, RequestContext, Usage
from rest_local.api.bodies import (
    MAX_PROMPTS,
    MAX_STOPS,
    Body,
    ChatBody,
    EmbeddingBody,
    Extension,
    GenerationBody,
    JsonObject,
    Many,
    Message,
    ResponseFormat,
    Stop,
    TokenId,
)
from rest_local.api.errors import ApiError, ollama_shape
from rest_local.api.models import written
from rest_local.api.openai import ChatCall, chat_logprobs
from rest_local.api.requests import checked_ids, grammar_of, infill_tokens, request_of
from rest_local.api.vectors import Embed, check_embeds, embeddings
from rest_local.chat.tools import CallStart, Content, Delta, Reasoning
from rest_local.decoding.engine import Engine
from rest_local.decoding.request import Request
from rest_local.llama.embedding import longest_text

MAX_IMAGES = 64


def _whole(value: Any) -> Any:
    """Accept an integer that JavaScript or Lua wrote as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Image = Annotated[str, Field(min_length=1)]
Images = Annotated[Many[Image], Field(max_length=MAX_IMAGES)]
Think = bool | Literal["low", "medium", "high", "max", ""]
Format = dict[str, Any] | Literal["", "json"]


class Options(Body):
    """Options of an answer."""

    num_predict: Annotated[Whole, Field(ge=-2)] | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    mirostat: Whole | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class NamedBody(Body):
    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str | None:
        return self.model or self.name


class AnswerBody(NamedBody):
    """The fields that the two generating calls share. The last three are our own."""

    options: Options = Field(default_factory=Options)
    format: Format | None = None
    stream: bool = True
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    datastore: str | Many[str] | None = None
    prompt_cache_key: str | None = None
    rest_local: Extension | None = None


class CalledFunction(Body):
    """A call that the model made earlier."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class Called(Body):
    """An entry of `tool_calls`."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(Body):
    role: str
    content: str = ""
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Many[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(AnswerBody):
    """The body of POST /api/chat. Without messages the model is loaded and nothing is generated."""

    messages: Many[OllamaMessage] = Field(default_factory=list)
    tools: Many[JsonObject] | None = None


class GenerateBody(AnswerBody):
    """The body of POST /api/generate. Without a prompt the model is loaded and nothing is generated.

    `context` has the tokens of an earlier conversation, as its last answer gave them.
    """

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Images | None = None
    context: Many[TokenId] | None = None


class EmbedBody(NamedBody):
    """The body of POST /api/embed."""

    input: str | Annotated[Many[str], Field(max_length=MAX_PROMPTS)]
    truncate: bool | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None


class OldEmbedBody(NamedBody):
    """The body of POST /api/embeddings, which came before /api/embed."""

    prompt: str = ""


class ShowBody(NamedBody):
    """The body of POST /api/show."""

    @model_validator(mode="after")
    def _check_name(self) -> ShowBody:
        if not self.asked:
            raise ValueError("name the model")
        return self


_SAMPLERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", "typical_p", "mirostat", "mirostat_tau", "mirostat_eta"),
)


def fields_of(body: AnswerBody) -> dict[str, Any]:
    """Return the fields of `GenerationBody` that both calls share."""
    options = body.options
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAMPLERS}
    fields |= {"stream": body.stream, "n_predict": options.num_predict, "model": body.asked}
    if body.format == "json":
        fields["response_format"] = ResponseFormat.model_validate({"type": "json_object"})
    elif isinstance(body.format, dict):
        fields["json_schema"] = body.format
    fields |= {name: getattr(body, name) for name in ("datastore", "prompt_cache_key", "rest_local")}
    return {name: value for name, value in fields.items() if value is not None}


def chat_body(body: AnswerBody, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> ChatBody:
    more: dict[str, Any] = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    more["tools"] = list(tools) if tools else None
    more["chat_template_kwargs"] = thinking_variables(body.think)
    given = {name: value for name, value in more.items() if value is not None}
    return ChatBody(messages=list(messages), **fields_of(body), **given)


def thinking_variables(think: bool | str | None) -> dict[str, Any] | None:
    """Return the variables that switch reasoning in templates. None keeps the model's default."""
    if think is None or think == "":
        return None
    switched = {"enable_thinking": bool(think), "thinking": bool(think)}
    return switched | {"reasoning_effort": think} if isinstance(think, str) else switched


def prompt_messages(body: GenerateBody) -> list[Message]:
    system = [Message(role="system", content=body.system)] if body.system else []
    asked = OllamaMessage(role="user", content=body.prompt)
    return [*system, _message(asked, images=_parts(body.images, "images"))]


def chat_messages(body: OllamaChatBody) -> list[Message]:
    """Translate the conversation to OpenAI's form. Raises ApiError 400 for an invalid image."""
    found: list[Message] = []
    waiting: list[tuple[str, str]] = []  # (id, name) of each call without a result
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
        found.append(_message(message, images=_parts(message.images, f"{place}.images"), **more))
    return found


def _answered(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the id and name of the call that a result answers, and remove that call from those waiting."""
    at = next((i for i, (known, _) in enumerate(waiting) if known == message.tool_call_id), None)
    if at is None:
        at = next((i for i, (_, name) in enumerate(waiting) if name == message.tool_name), 0)
    known, name = waiting.pop(at) if at < len(waiting) else (message.tool_call_id, message.tool_name)
    return {key: value for key, value in {"tool_call_id": known, "name": message.tool_name or name}.items() if value}


def _message(message: OllamaMessage, *, images: Sequence[dict[str, Any]] = (), **more: Any) -> Message:
    content: Any = message.content
    if images:
        content = [*([{"type": "text", "text": message.content}] if message.content else []), *images]
    if message.thinking:
        more["reasoning_content"] = message.thinking
    return Message(role=message.role, content=content, **more)


def _parts(images: Sequence[str] | None, place: str) -> list[dict[str, Any]]:
    """Return OpenAI's content parts. Raises ApiError 400, which names the field `place`."""
    urls = [_data_url(image, f"{place}[{number}]") for number, image in enumerate(images or ())]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def _data_url(image: str, place: str) -> str:
    if image.startswith("data:"):
        return image
    try:
        base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"{place}: give an image in base64", code="invalid_value", param=place) from error
    return f"data:image/png;base64,{image}"  # the decoder recognizes other formats by their bytes


LINES = "application/x-ndjson"
_NS = 1_000_000  # nanoseconds per millisecond


def line(value: dict[str, Any]) -> bytes:
    return to_json(value, inf_nan_mode="null") + b"\n"


class Calls:
    def __init__(self) -> None:
        self._open: tuple[int, str] | None = None
        self._arguments = ""

    def feed(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the previous call if this delta shows that it is complete."""
        if isinstance(delta, (Content, Reasoning)):
            return self.finish()
        if isinstance(delta, CallStart):
            complete = self.finish()
            self._open = (delta.index, delta.name)
            return complete
        self._arguments += delta.text
        return []

    def finish(self) -> list[dict[str, Any]]:
        """Return the open call if its arguments are complete."""
        begun, text = self._open, self._arguments
        self._open, self._arguments = None, ""
        if begun is None:
            return []
        try:
            arguments = json.loads(text or "{}")
        except ValueError:  # the model made a mistake
            return []
        known = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        return [{"function": {"index": begun[0], "name": begun[1], "arguments": known}}]


class OllamaCall:
    """A `Call` with a chat, a prompt for the model's template, or a raw prompt.

    `requests` sets `plain`, the body as OpenAI's. `began` is when the request came, by `time.perf_counter`.
    """

    def __init__(self, context: RequestContext, body: OllamaChatBody | GenerateBody, began: float) -> None:
        self.context, self.body, self.began = context, body, began
        self.chat: ChatCall | None = None  # None if no template is used
        self.tokens: Sequence[int] | None = None  # the prompt's tokens if the client gets them back as `context`

    def requests(self) -> list[Request]:
        engine, body = self.context.engine, self.body
        if isinstance(body, OllamaChatBody):
            self.plain: GenerationBody = chat_body(body, chat_messages(body), body.tools)
            self.chat = ChatCall(self.context, self.plain)
            return self.chat.requests()
        if body.raw or body.suffix or not engine.model.chat_template:
            requests = self._continued(body)
        else:
            self.plain = chat_body(body, prompt_messages(body), None)
            self.chat = ChatCall(self.context, self.plain)
            requests = self.chat.requests()
        if body.context:
            (made,) = requests
            prompt, ids = list(made.prompt), engine.model.vocabulary.ids
            # BOS must not occur again within the text, but some models begin each turn with the same token.
            if prompt[:1] == [ids.bos] and (ids.add_bos or ids.bos not in prompt[1:]):
                del prompt[0]
            requests = [replace(made, prompt=[*checked_ids(engine, body.context), *prompt])]
        if not (body.raw or body.suffix or body.images):  # Images have no ids that a client could send back.
            self.tokens = requests[0].prompt
        return requests

    def _continued(self, body: GenerateBody) -> list[Request]:
        """Make the request that continues text without a template."""
        if body.images:
            raise ApiError(400, "images: they need a chat template; leave out raw and suffix", param="images")
        engine, self.plain, text = self.context.engine, GenerationBody(**fields_of(body)), ""
        if body.suffix:
            tokens = infill_tokens(engine, body.prompt, body.suffix, answer=max(body.options.num_predict or 0, 0))
        else:
            text = body.prompt if body.raw or not body.system else f"{body.system}\n\n{body.prompt}"
            tokens = engine.tokenize(text, most=engine.n_ctx)
        top = (body.top_logprobs or 0) if body.logprobs else None
        return [request_of(engine, self.plain, tokens, logprobs=top, grammar=grammar_of(self.plain), asks=text)]

    def answer(self, answered: Sequence[HasResult]) -> OllamaAnswer:
        return OllamaAnswer(self, answered)


class OllamaAnswer(Answer[GenerationBody]):
    MEDIA_TYPE = LINES
    SENDS_APART = True

    def __init__(self, call: OllamaCall, answered: Sequence[HasResult]) -> None:
        super().__init__(call.context, call.plain, answered, [call.chat.made.parser()] if call.chat else [])
        self._began, self._tokens = call.began, call.tokens
        self._of_chat = isinstance(call.body, OllamaChatBody)
        self._calls = Calls()

    def advance(self, number: int, part: Part) -> list[bytes]:
        lines = []
        for delta in self._deltas(part):
            if calls := self._calls.feed(delta):
                lines.append(self._said(calls=calls))
            if isinstance(delta, Content) and delta.text:
                lines.append(self._said(delta.text))
            elif isinstance(delta, Reasoning):
                lines.append(self._said(thinking=delta.text))
        if part.logprobs:
            lines = [(lines[0] if lines else self._said()) | self._logprobs(part), *lines[1:]]
        return [line(self._head() | fields | {"done": False}) for fields in lines]

    def complete(self, number: int) -> list[bytes]:
        calls = self._finished()
        lines = [line(self._head() | self._said(calls=calls) | {"done": False})] if calls else []
        return [*lines, line(self._head() | self._said() | self._closing())]

    def whole(self) -> dict[str, Any]:
        deltas = self._deltas(self.choices[0])
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        thinking = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls = [call for delta in deltas for call in self._calls.feed(delta)] + self._finished()
        logprobs = self._logprobs(self.choices[0]) if self.choices[0].logprobs else {}
        return self._head() | self._said(content, thinking, calls) | logprobs | self._closing()

    def quiet(self) -> list[bytes]:
        return [line(self._head() | self._said() | {"done": False})]

    def error_event(self, error: ApiError) -> bytes:
        return line(ollama_shape(error))

    def _finished(self) -> list[dict[str, Any]]:
        """Return the last call, unless it was cut off."""
        parser = self.choices[0].parser
        return [] if parser is None or parser.unfinished else self._calls.finish()

    def _deltas(self, part: Part | Choice) -> Sequence[Delta]:
        """Return the deltas of a part. Without a template, all of the text is content."""
        return part.deltas if self.choices[0].parser else [Content(part.text)]

    def _logprobs(self, part: Part | Choice) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(self.engine.model.vocabulary, part.logprobs)["content"]}

    def _said(self, content: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._of_chat:
            return {"response": content} | more
        return {"message": {"role": "assistant", "content": content} | more | ({"tool_calls": calls} if calls else {})}

    def _head(self) -> dict[str, Any]:
        return {"model": self.context.model, "created_at": written(time.time())}

    def _closing(self) -> dict[str, Any]:
        result, usage = self.results[0], Usage.of(self.results)
        timings, elapsed = result.timings, 1e3 * (time.perf_counter() - self._began)
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": self.finish_reason(0),
            "total_duration": self._nanoseconds(elapsed),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "eval_count": usage.completion,
            "eval_duration": self._nanoseconds(timings.predicted_ms),
        }
        if self.shows_steps:
            fields["prompt_eval_duration"] = self._nanoseconds(timings.prompt_ms)
        if self._tokens is not None:
            fields["context"] = [*self._tokens, *result.tokens]
        return fields

    def _nanoseconds(self, milliseconds: float) -> int:
        step = 1.0 / _NS if self.shows_steps else COARSE_MS
        return round(_NS * step * round(milliseconds / step))


def embedded(
    engine: Engine, model: str, texts: Sequence[str], dimensions: int | None, embed: Embed, *, cut: bool
) -> tuple[list[Any], int]:
    """Compute the vectors of texts, and count their tokens. Without any text there are no vectors.

    `cut` shortens texts that are too long. The last token stays, since it ends the text for the model.
    Raises what `embeddings` raises, and ApiError 501 if the model makes no vectors.
    """
    check_embeds(engine)
    if not any(texts):
        return [], 0
    ids: list[Any] = []
    most = longest_text(engine.model)
    for text in texts:
        tokens = engine.tokenize(text)
        ids.append([*tokens[: most - 1], tokens[-1]] if cut and len(tokens) > most else tokens)
    answer = embeddings(engine, EmbeddingBody(input=ids, dimensions=dimensions), model, embed)
    return [entry["embedding"] for entry in answer["data"]], answer["usage"]["prompt_tokens"]


def loaded(model: str, *, of_chat: bool) -> dict[str, Any]:
    """Answer a request that only loads the model."""
    text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if of_chat else {"response": ""}
    head = {"model": model, "created_at": written(time.time())}
    return head | text | {"done": True, "done_reason": "load"}
