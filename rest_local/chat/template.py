"""A model's chat template: messages to prompt text, as Hugging Face's `apply_chat_template` renders it.

Knows nothing about models: Jinja source in, text out. Templates come with model files, so they are rendered in a
sandbox (`sandbox`), in a child process with a limit of time and memory (`renderer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rest_local.chat.renderer import render_limited
from rest_local.errors import TemplateFailed


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str | None,
    eos: str | None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for a conversation.

    `messages`: dicts with `role` and `content` (and what else the template reads). `bos`, `eos`: how the vocabulary
    renders them, None = it has none. `variables`: further names for the template, such as enable_thinking.
    The text holds special tokens spelled out: tokenize it with special=True, add_special=False.
    Raises TemplateFailed: not valid Jinja, it refused the messages, tried what the sandbox forbids; TemplateTooCostly:
    it passed a limit of time or memory; ServiceClosed where the thread was stopped."""
    names: dict[str, Any] = {**(variables or {}), "messages": list(messages), "tools": tools, "documents": None}
    names |= {"bos_token": bos or "", "eos_token": eos or "", "add_generation_prompt": add_generation_prompt}
    try:
        return render_limited(template, names)
    except TypeError as error:
        if tools is not None:
            raise TemplateFailed(f"TypeError: {error}") from error
    try:  # some templates loop over `tools` without asking whether there are any
        return render_limited(template, names | {"tools": []})
    except TypeError as error:
        raise TemplateFailed(f"TypeError: {error}") from error
