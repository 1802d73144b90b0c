"""A conversation as a request: its prompt in the model's own chat template, the grammar that its answer has to keep,
and the message that the answer is.

Messages and tools are in OpenAI's form. `Engine.chat` and all protocols of the server make their requests of it. The
module knows neither slots nor scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rest_local.chat.conversation import ChatTemplate, content_text
from rest_local.chat.images import take_images
from rest_local.chat.tools import AnswerFormat, AnswerParser, Tool, message_of
from rest_local.decoding.stream import Result
from rest_local.errors import ModelError, OptionError
from rest_local.grammar import Grammar
from rest_local.llama.model import Model

FREE = (None, "auto", "none")  # Values of `tool_choice` that force no call.
_NOT_TEXT = ("tool_calls", "function_call", "reasoning_content", "reasoning")


def chat_template(model: Model) -> ChatTemplate:
    """Return the model's own template. Raises ModelError if it has none."""
    if not model.chat_template:
        raise ModelError(f"model {model.path}: has no chat template; give its prompts as plain text")
    piece = model.vocabulary.piece
    bos, eos = (
        None if token is None else piece(token).decode("utf-8", "replace")
        for token in (model.vocabulary.ids.bos, model.vocabulary.ids.eos)
    )
    return ChatTemplate(model.chat_template, bos, eos, model.template_variables)


class Chat:
    """One call of a chat.

    As in llama-server, the text of a last message of the assistant begins the answer (not with `continues=False`, and
    not where the message has calls or the answer is forced into a form). So does `begun`.

    Args:
        model: whose chat template renders the messages.
        messages: parts of type `image_url` become marks in the prompt.
        tools: that may be called. `tool_choice`, `parallel_tool_calls`: as in OpenAI's API.
        json_schema: that the text of the answer has to be valid for; True for any object.
        template_variables: further names for the template.
        begun: text that the model goes on after.
        add_generation_prompt: end the prompt where the answer begins.

    Attributes:
        prompt: the text, with special tokens spelled out.
        images: of the marks in the prompt.

    Raises:
        ModelError: the model has no chat template.
        OptionError: a message is invalid, or a forced call has a schema as well.
        TemplateFailed: the template refuses the messages.
    """

    def __init__(
        self,
        model: Model,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str | Mapping[str, Any] | None = "auto",
        parallel_tool_calls: bool = True,
        json_schema: Mapping[str, Any] | bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
        begun: str = "",
        continues: bool = True,
        add_generation_prompt: bool = True,
    ) -> None:
        self._template = chat_template(model)
        self._format = AnswerFormat.of(self._template.source, model.vocabulary.special_token)
        self._tools: Sequence[Tool] = () if tool_choice == "none" else tools
        self._choice, self._parallel, self._schema = tool_choice, parallel_tool_calls, json_schema
        self._variables, self._begins = template_variables, add_generation_prompt
        self._forced = tool_choice not in FREE
        if self._forced and json_schema is not None:
            raise OptionError("json_schema: a forced tool call has the schema of the tool; leave one of them out")
        self._messages, self.images = take_images(messages)
        if continues and not self._forced and json_schema is None and _ends_in_text(self._messages):
            last = self._messages.pop()
            begun = content_text(last.get("content"), ("messages", len(self._messages), "content"))
        self._rendered = self._render(self._messages)
        self._opening = self._format.opening(self._rendered) if begun else ""
        self.prompt = self._rendered + self._opening + begun
        self.images.check_all_in(self.prompt)

    def grammar(self) -> Grammar | None:
        """Return the grammar that `tool_choice` or `json_schema` asks for, or None if the answer is free.

        Raises OptionError for an unknown choice, and for a schema that cannot be kept.
        """
        if self._schema is not None:
            return self._format.schema(None if self._schema is True else self._schema, self.prompt)
        return self._format.forced(self._tools, self._choice, self.prompt, parallel=self._parallel)

    def parser(self) -> AnswerParser:
        """Return a parser that splits the text of an answer into reasoning, text and calls while it comes."""
        parser = self._format.parser(self._tools, self._rendered, forced=self._forced)
        parser.feed(self._opening)
        return parser

    def message(self, result: Result) -> dict[str, Any]:
        """Return the answer as a message: `content`, and `reasoning_content` and `tool_calls` if there are any."""
        parser = self.parser()
        return message_of([*parser.feed(result.text), *parser.finish(cut=result.cut)])

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._template.render(
            messages,
            tools=self._tools,
            variables=self._variables,
            add_generation_prompt=self._begins,
            calls_as_text=self._format.format.write,
        )


def _ends_in_text(messages: Sequence[Any]) -> bool:
    """Return True if the last of several messages is the assistant's and is text alone."""
    last = messages[-1] if len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") not in ("assistant", "model"):
        return False
    return not any(last.get(name) for name in _NOT_TEXT)
