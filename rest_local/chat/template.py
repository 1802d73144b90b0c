"""Renders a model's chat template: messages in, prompt text out, as Hugging Face's `apply_chat_template` does.

Knows nothing about models. Templates come with model files, which are not trusted: they are rendered in a sandbox
(`sandbox`) and in a child process with limits of time and memory (`renderer`).
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
    """The prompt for a conversation. Special tokens are spelled out: tokenize with special=True, add_special=False.

    messages    dicts with `role` and `content`, and what else the template reads
    bos, eos    the texts of the vocabulary's start and end tokens, None where it has none
    variables   further names for the template, such as enable_thinking

    Raises TemplateFailed where the template is not valid Jinja, refuses the messages or does what the sandbox forbids;
    TemplateTooCostly where it exceeds a limit of time or memory; ServiceClosed where the thread is stopped.
    """
    names: dict[str, Any] = {**(variables or {}), "messages": list(messages), "tools": tools, "documents": None}
    names |= {"bos_token": bos or "", "eos_token": eos or "", "add_generation_prompt": add_generation_prompt}
    try:
        return render_limited(template, names)
    except TypeError as error:
        if tools is not None:
            raise TemplateFailed(f"TypeError: {error}") from error
    try:  # some templates loop over `tools` without a check that there are any
        return render_limited(template, names | {"tools": []})
    except TypeError as error:
        raise TemplateFailed(f"TypeError: {error}") from error
