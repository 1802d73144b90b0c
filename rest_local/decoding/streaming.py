"""`Stream` and `ChatStream` are what callers of `Engine` and `Service` hold: the pieces of an answer
as they come, and its result.

`Chat` is one call of `Engine.chat`: a conversation becomes a prompt, and the text of the answer a message. Messages and
tools are in OpenAI's form; the model's own chat template is applied between them. The module knows neither slots nor
scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rest_local.chat.conversation import ChatTemplate, fixed_beginning
from rest_local.chat.tools import AnswerFormat, AnswerParser, message_of, tools_of
from rest_local.decoding.request_state import RequestState
from rest_local.decoding.results import Statistics, Timings
from rest_local.decoding.stream import Piece, Result
from rest_local.errors import ModelError, OptionError, RestLocalError
from rest_local.llama.model import Model


def chat_template(model: Model) -> ChatTemplate:
    """The model's own template. Raises ModelError where it has none."""
    if not model.chat_template:
        raise ModelError(f"model {model.path}: has no chat template; give its prompts as plain text")
    piece = model.vocabulary.piece
    bos, eos = (
        None if token is None else piece(token).decode("utf-8", "replace")
        for token in (model.vocabulary.bos, model.vocabulary.eos)
    )
    return ChatTemplate(model.chat_template, bos, eos, model.template_variables)


class Chat:
    """The prompt of a conversation (`prompt`, text with special tokens spelled out), the grammar that `tool_choice` or
    `json_schema` asks for (None where the answer is free), and the message that an answer is.

    Raises ModelError where the model has no chat template, OptionError, TemplateFailed.
    """

    def __init__(
        self,
        model: Model,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        json_schema: Mapping[str, Any] | bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = chat_template(model)
        self._format = AnswerFormat.of(self._template.source, model.vocabulary.special_token)
        self._messages = messages
        self._tools = tools_of(tools) if tool_choice != "none" else []
        self._variables = template_variables
        self.prompt = self._render(messages)
        self.grammar = self._format.forced(self._tools, tool_choice, self.prompt, parallel=parallel_tool_calls)
        if json_schema is not None:
            if self.grammar is not None:
                raise OptionError("json_schema: a forced tool call has the schema of the tool; leave one of them out")
            self.grammar = self._format.schema(None if json_schema is True else json_schema, self.prompt)

    def beginning(self) -> str:
        """The part of the prompt before the first message that is not a system message: the tools and the system
        prompt, which a context shift should keep. Renders the template once more.
        """
        return fixed_beginning(self._messages, self.prompt, self._render)

    def parser(self) -> AnswerParser:
        """Splits the text of an answer into reasoning, text and calls while it comes."""
        return self._format.parser(self._tools, self.prompt)

    def message(self, result: Result) -> dict[str, Any]:
        """The answer as a message: `content`, and `reasoning_content` and `tool_calls` where there are any."""
        parser = self.parser()
        return message_of([*parser.feed(result.text), *parser.finish(cut=result.cut)])

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._template.render(
            messages, tools=self._tools, variables=self._variables, calls_as_text=self._format.format.write
        )


Advance = Callable[[Callable[[], bool], "float | None"], bool]
"""`advance(until, timeout)` lets the answer go on until `until()` is true; False where `timeout` seconds were over."""


class Stream:
    """Iterate it once for the pieces of the answer. `result` holds what has come so far and is complete afterwards.

    A stream of `Engine` goes on only while it is iterated or waited for, in the thread of the caller. One of
    `Service.submit` goes on in the thread of the service, and any thread may hold it. An iteration that is closed ends
    the answer.
    """

    def __init__(self, state: RequestState, advance: Advance, cancel: Callable[[RequestState], None]) -> None:
        self.state = state
        self._advance, self._cancel = advance, cancel
        self._pieces = self._run()

    @property
    def result(self) -> Result:
        """What has come so far; complete when `done`."""
        return self.state.result

    @property
    def statistics(self) -> Statistics:
        return self.state.statistics

    @property
    def timings(self) -> Timings:
        """Tokens and times so far, once the prompt is evaluated; any thread."""
        return self.state.answer.timings

    @property
    def done(self) -> bool:
        return self.state.done

    @property
    def error(self) -> RestLocalError | None:
        """The error that ended it, if any."""
        return self.state.error

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come. Raises the error that ended the answer, at the end."""
        return self._pieces

    def poll(self) -> list[Piece]:
        """What has come since the last call, without waiting. If `done` was True before this call, nothing follows."""
        return self.state.read()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises the error that ended the answer, and TimeoutError after `timeout` seconds."""
        if not self._advance(lambda: self.done, timeout):
            raise TimeoutError(f"the answer is not done after {timeout} s")
        if self.error:
            raise self.error
        return self.result

    def cancel(self) -> None:
        """End the answer, before the next forward pass. Its text so far stays in `result`."""
        self._cancel(self.state)

    def _run(self) -> Iterator[Piece]:
        try:
            while True:
                done = self.done
                yield from self.poll()
                if done:
                    break
                self._advance(lambda: self.done or self.state.has_news, None)
        finally:
            if not self.done:
                self.cancel()
        if self.error:
            raise self.error


class ChatStream(Stream):
    """The stream of an answer in a conversation. Pieces hold the text as the model writes it, tool calls included."""

    def __init__(
        self, state: RequestState, advance: Advance, cancel: Callable[[RequestState], None], chat: Chat
    ) -> None:
        super().__init__(state, advance, cancel)
        self._chat = chat

    def parser(self) -> AnswerParser:
        """Splits the text of the pieces into reasoning, text and calls while they come."""
        return self._chat.parser()

    @property
    def message(self) -> dict[str, Any]:
        """The finished answer in OpenAI's form, for the messages: role, content, reasoning_content, tool_calls."""
        return self._chat.message(self.result)
