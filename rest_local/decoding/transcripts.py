"""Joins a model's chat template and its vocabulary, so that transcripts of chats become text for a datastore."""

from __future__ import annotations

from collections.abc import Iterable

from rest_local.chat.transcripts import TurnRenderer
from rest_local.decoding.streaming import chat_template
from rest_local.llama.model import Model
from rest_local.retrieval.sources.records import Chat
from rest_local.retrieval.sources.source import Render, Source


def turn_renderer(model: Model, sources: Iterable[Source]) -> Render | None:
    """What renders the transcripts among the sources for this model, None if there are none. It may be opened with
    `vocab_only`. Raises ModelError if the model has no chat template.
    """
    if not any(isinstance(source, Chat) for source in sources):
        return None
    vocabulary = model.vocabulary
    control = [vocabulary.piece(token) for token in range(vocabulary.size) if vocabulary.is_control(token)]
    return TurnRenderer(chat_template(model), [piece.decode("utf-8", "replace") for piece in control])
