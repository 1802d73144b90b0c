"""`rest-local chat`: a conversation in the terminal, or one question from the command line or a pipe."""

from rest_local.cli.chat.command import chat

__all__ = ["chat"]
