"""How models call tools and reason: calls are read from their answers and forced by grammars. See `answer`."""

from rest_local.chat.tools.answer import AnswerFormat, AnswerParser, format_of
from rest_local.chat.tools.format import Tool, tools_of
from rest_local.chat.tools.source import CallArguments, CallStart, Content, Delta, Reasoning, joined, message_of

__all__ = [
    "AnswerFormat", "AnswerParser", "CallArguments", "CallStart", "Content", "Delta", "Reasoning", "Tool", "format_of",
    "joined", "message_of", "tools_of",
]  # fmt: skip
