"""One call of `Engine.chat`: a conversation becomes a prompt, and the text of the answer becomes a message.

Contract: messages and tools in OpenAI's form in and out, the model's own chat template between them. Knows the
vocabulary and the template of the model, and neither slots nor scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rest_local.chat.conversation import ChatTemplate, fixed_beginning
from rest_local.chat.tools import AnswerFormat, message_of, tools_of
from rest_local.decoding.stream import Result
from rest_local.errors import ModelError, OptionError
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
    return ChatTemplate(model.chat_template, bos, eos)


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

    def message(self, result: Result) -> dict[str, Any]:
        """The answer as a message: `content`, `reasoning_content` and `tool_calls`, the last two where there are
        any.
        """
        parser = self._format.parser(self._tools, self.prompt)
        return message_of([*parser.feed(result.text), *parser.finish(cut=result.finish_reason == "length")])

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._template.render(
            messages,
            tools=self._tools,
            variables=self._variables,
            calls_as_text=self._format.format.write,
        )
