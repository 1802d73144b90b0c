"""OpenAI's chat and completions: their requests and answers.

The other protocols of conversations are translated to a chat. A completion can also fill gaps, with `suffix` or with
the model's tokens for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rest_local.api.answers import (
    DONE,
    Answer,
    BodyT,
    HasResult,
    Part,
    RequestContext,
    Usage,
    event,
    new_id,
    prediction_counts,
    timings,
)
from rest_local.api.bodies import MAX_PROMPTS, AllowedTools, ChatBody, CompletionBody, NamedTool
from rest_local.api.errors import ApiError
from rest_local.api.requests import (
    grammar_of,
    infill_tokens,
    own_grammar,
    prompt_text,
    prompts_of,
    request_of,
    schema_of,
    template_of,
)
from rest_local.chat.tools import AnswerParser, CallStart, Content, Delta, Reasoning, Tool, message_of, tools_of
from rest_local.decoding.chat import FREE, Chat
from rest_local.decoding.request import Request

if TYPE_CHECKING:
    from rest_local.decoding.logprobs import TokenLogprobs
    from rest_local.llama.vocabulary import Vocabulary


class ChatCall:
    """A `Call` of one chat. The client may have begun the answer with the text `begun`, and the model goes on after it.

    Making it raises ApiError 501 if the model has no chat template.
    """

    def __init__(self, context: RequestContext, body: ChatBody, *, begun: str = "") -> None:
        template_of(context.engine)
        self.context, self._engine, self.body, self._begun = context, context.engine, body, begun
        self._tools, self._choice = chosen_tools(body)

    def count(self) -> int:
        """Count the tokens of the prompt, even if it is longer than the context. Raises OptionError, TemplateFailed."""
        chat = self._chat()
        return len(self._engine.image_prompt(chat.prompt, chat.images)[0])

    def prompt(self) -> str:
        """Return the text of the prompt. Raises OptionError, TemplateFailed."""
        return self._chat().prompt

    def requests(self) -> list[Request]:
        engine, body = self._engine, self.body
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: set logprobs to true as well", param="top_logprobs")
        self.made = chat = self._chat()
        prompt, chunks = engine.image_prompt(chat.prompt, chat.images, most=engine.n_ctx)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar = chat.grammar() or own_grammar(body)
        made = partial(request_of, engine, body, prompt, images=chunks, logprobs=logprobs, grammar=grammar)
        return [made(choice=choice, asks=body.messages[-1].content) for choice in range(body.n or 1)]

    def answer(self, answered: Sequence[HasResult]) -> ChatAnswer:
        return ChatAnswer(self.context, self.body, answered, [self.made.parser() for _ in answered])

    def _chat(self) -> Chat:
        """Make the conversation. A forced call takes precedence over a schema."""
        body, forced, schema = self.body, self._choice not in FREE, schema_of(self.body)
        if forced and body.grammar:
            raise ApiError(400, "give a grammar or force a call, not both", param="grammar")
        return Chat(
            self._engine.model,
            [message.model_dump(exclude_none=True) for message in body.messages],
            tools=self._tools,
            tool_choice=self._choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            json_schema=None if forced else True if schema == {} else schema,
            template_variables=body.chat_template_kwargs,
            begun=self._begun,
            continues=body.continue_final_message is not False,
            add_generation_prompt=body.add_generation_prompt is not False,
        )


def chosen_tools(body: ChatBody) -> tuple[list[Tool], Any]:
    """Return the tools that may be called, and OpenAI's `tool_choice` among them. Raises OptionError, ApiError 400."""
    tools, choice = tools_of(body.tools), body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        if unknown := allowed - {tool.name for tool in tools}:
            text = f"tool_choice.allowed_tools: no tool is called {min(unknown)[:80]!r}"
            raise ApiError(400, text, code="invalid_value", param="tool_choice")
        return [tool for tool in tools if tool.name in allowed], choice.allowed_tools.mode
    return tools, choice.model_dump() if isinstance(choice, NamedTool) else choice


class Completion:
    """A `Call` of one completion.

    `top` says how many likely tokens are reported with each token. None means no log-probabilities.
    """

    def __init__(self, context: RequestContext, body: CompletionBody) -> None:
        self.context, self.body = context, body
        given = body.logprobs
        self.top = given if given is None or not isinstance(given, bool) else 0 if given else None
        self.prompts: list[list[int]] = []  # set by `requests`

    def requests(self) -> list[Request]:
        engine, body, n = self.context.engine, self.body, self.body.n or 1
        if body.echo and self.top is not None:
            text = "echo: the log-probabilities of a prompt are not computed; leave out echo or logprobs"
            raise ApiError(400, text, code="unsupported", param="echo")
        if not body.suffix:
            self.prompts = prompts_of(engine, body.prompt, MAX_PROMPTS // n, engine.n_ctx)
        elif isinstance(body.prompt, str):
            self.prompts = [infill_tokens(engine, body.prompt, body.suffix, answer=max(body.max_tokens or 0, 0))]
        else:
            raise ApiError(400, "suffix: the prompt must be one text", param="suffix")
        grammar = grammar_of(body)
        return [
            request_of(engine, body, prompt, logprobs=self.top, grammar=grammar, choice=choice, asks=body.prompt)
            for prompt in self.prompts
            for choice in range(n)
        ]

    def answer(self, answered: Sequence[HasResult]) -> CompletionAnswer:
        return CompletionAnswer(self, answered)


class OpenAIAnswer(Answer[BodyT]):
    """The base of both answers: an id, the time, and counts at the end."""

    ID_PREFIX: str
    EVENT_KIND: str

    def __init__(
        self, context: RequestContext, body: Any, answered: Sequence[HasResult], parsers: Sequence[AnswerParser] = ()
    ) -> None:
        super().__init__(context, body, answered, parsers, per_prompt=body.n or 1)
        self._id, self._created = new_id(f"{self.ID_PREFIX}-"), int(time.time())
        # The client may request the counts in a separate event.
        self._includes_usage = bool(body.stream_options and body.stream_options.include_usage)

    def end(self) -> list[bytes]:
        if not self._includes_usage:
            return [DONE]
        return [event(self._head(self.EVENT_KIND) | {"choices": []} | self._counts()), DONE]

    def _counts(self) -> dict[str, Any]:
        found = Usage.of(self.results, self.per_prompt)
        usage: dict[str, Any] = {
            "prompt_tokens": found.prompt,
            "completion_tokens": found.completion,
            "total_tokens": found.prompt + found.completion,
        }
        if self.shows_steps:
            usage["prompt_tokens_details"] = {"cached_tokens": found.cached}
        if self.body.prediction is not None:
            usage["completion_tokens_details"] = prediction_counts(self.results)
        return {"usage": usage, "timings": timings(self.results, self.shows_steps)}

    def _closing(self, number: int) -> dict[str, Any]:
        fields = self._counts() if not self._includes_usage and not self.remaining else {}
        if self.sends_origins:
            fields["rest_local"] = {"draft": self.results[number].draft.to_dict()}
        return fields

    def _head(self, kind: str) -> dict[str, Any]:
        named = {"id": self._id, "object": kind, "created": self._created, "model": self.context.model}
        return named | {"system_fingerprint": self.context.fingerprint}

    def _event(
        self,
        index: int,
        content: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Any = None,
        **fields: Any,
    ) -> bytes:
        """Encode one event of an answer. `content` is its text or delta."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._head(self.EVENT_KIND) | {"choices": [choice]} | fields)


class ChatAnswer(OpenAIAnswer[ChatBody]):
    ID_PREFIX = "chatcmpl"
    EVENT_KIND = "chat.completion.chunk"

    def begin(self) -> list[bytes]:
        return [self._event(i, {"delta": {"role": "assistant", "content": ""}}) for i in range(len(self.choices))]

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        return [self._event(number, {"delta": {}}, **fields)]

    def advance(self, number: int, part: Part) -> list[bytes]:
        if not (part.deltas or part.logprobs or part.origins):
            return []
        logprobs = chat_logprobs(self.engine.model.vocabulary, part.logprobs) if part.logprobs else None
        first, *rest = [_delta(delta) for delta in part.deltas] or [{}]
        events = [self._event(number, {"delta": first}, logprobs=logprobs, **part.extension)]
        return [*events, *(self._event(number, {"delta": each}) for each in rest)]

    def complete(self, number: int) -> list[bytes]:
        reason = self._finish_reason(number)
        return [self._event(number, {"delta": {}}, finish_reason=reason, **self._closing(number))]

    def whole(self) -> dict[str, Any]:
        vocabulary, choices = self.engine.model.vocabulary, []
        for number, choice in enumerate(self.choices):
            logprobs = chat_logprobs(vocabulary, choice.logprobs) if self.body.logprobs else None
            fields = {"index": number, "message": message_of(choice.deltas), "logprobs": logprobs}
            choices.append(fields | {"finish_reason": self._finish_reason(number)})
        return self._head("chat.completion") | {"choices": choices} | self._counts()

    def _finish_reason(self, number: int) -> str:
        reason, parser = self.finish_reason(number), self.choices[number].parser
        return "tool_calls" if reason == "stop" and parser and parser.called else reason


def _delta(delta: Delta) -> dict[str, Any]:
    """Return the delta as OpenAI's field of an event."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


class CompletionAnswer(OpenAIAnswer[CompletionBody]):
    ID_PREFIX = "cmpl"
    EVENT_KIND = "text_completion"

    def __init__(self, call: Completion, answered: Sequence[HasResult]) -> None:
        super().__init__(call.context, call.body, answered)
        self._prompts, self._reports = call.prompts, call.top is not None
        self._sent = [0] * len(self.choices)  # number of characters, for text_offset

    def begin(self) -> list[bytes]:
        if not self.body.echo:
            return []
        events = []
        for number in range(len(self.choices)):
            text = self._echo(number)
            self._sent[number] = len(text)
            events.append(self._event(number, {"text": text}))
        return events

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        return [self._event(number, {"text": ""}, **fields)]

    def advance(self, number: int, part: Part) -> list[bytes]:
        if not (part.text or part.origins or part.logprobs):
            return []
        logprobs = self._logprobs(part.logprobs, self._sent[number]) if part.logprobs else None
        self._sent[number] += len(part.text)
        return [self._event(number, {"text": part.text}, logprobs=logprobs, **part.extension)]

    def complete(self, number: int) -> list[bytes]:
        return [self._event(number, {"text": ""}, finish_reason=self.finish_reason(number), **self._closing(number))]

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, choice in enumerate(self.choices):
            text = (self._echo(number) if self.body.echo else "") + choice.text
            logprobs, reason = self._logprobs(choice.logprobs), self.finish_reason(number)
            choices.append({"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason})
        return self._head(self.EVENT_KIND) | {"choices": choices} | self._counts()

    def _echo(self, number: int) -> str:
        if isinstance(self.body.prompt, str):
            return self.body.prompt
        return prompt_text(self.engine.model.vocabulary, self._prompts[number // self.per_prompt])

    def _logprobs(self, entries: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any] | None:
        """Return `choices[].logprobs`, with `offset` characters of the answer before the first entry."""
        if not self._reports:
            return None
        vocabulary = self.engine.model.vocabulary
        texts = [vocabulary.piece(entry.token).decode("utf-8", "replace") for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        tops = [{vocabulary.piece(t).decode("utf-8", "replace"): p for t, p in entry.top} for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def chat_logprobs(vocabulary: Vocabulary, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    content = [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}
