"""How models call tools and reason: read out of what they say, forced by grammars. See `answer`."""

from rest_local.chat.tools.answer import AnswerFormat, AnswerParser, format_of
from rest_local.chat.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning, joined, message_of

__all__ = [
    "AnswerFormat",
    "AnswerParser",
    "CallArguments",
    "CallStart",
    "Content",
    "Delta",
    "Reasoning",
    "format_of",
    "joined",
    "message_of",
]
