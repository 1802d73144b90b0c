"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`. See `calls`."""

from rest_local.server.messages.calls import ROUTES

__all__ = ["ROUTES"]
