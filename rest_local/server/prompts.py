"""Makes the tokens of a prompt from what a client sends: a conversation, a plain prompt, or a gap to fill.

Special tokens are recognized in plain prompts, because clients build prompts with them. In the text around a gap they
are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rest_local.chat.conversation import ChatTemplate
from rest_local.chat.tools import Tool, format_of
from rest_local.decoding.streaming import chat_template
from rest_local.errors import CannotGenerate, OptionError, PromptTooLong
from rest_local.llama.embedding import pooling_of
from rest_local.server.bodies import MAX_PROMPTS, PromptField
from rest_local.server.errors import ApiError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.llama.vocabulary import Vocabulary

REPOSITORY = "project"
PREFIX_SHARE = 0.75
"""Share of the free context for the text before the gap if the text after it is long too; llama-server's value."""


def chat_text(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The conversation in the model's own template.

    Raises OptionError for an invalid message, TemplateFailed, ApiError 501 if the model has no template.
    """
    template = template_of(engine)
    return template.render(
        messages,
        tools=tools,
        variables=variables,
        add_generation_prompt=add_generation_prompt,
        calls_as_text=format_of(template.source).write,
    )


def check_generates(engine: Engine) -> None:
    """Raises CannotGenerate for a model that only reads."""
    if not engine.generates:
        raise CannotGenerate(ranks=pooling_of(engine.model) == "rank")


def template_of(engine: Engine) -> ChatTemplate:
    """The model's own template. Raises ApiError 501 if it has none, CannotGenerate."""
    check_generates(engine)
    if not engine.model.chat_template:
        raise ApiError(501, "the model has no chat template; use /v1/completions", code="no_chat_template")
    return chat_template(engine.model)


def special_text(vocabulary: Vocabulary, token: int | None) -> str | None:
    """The text of a special token; None where the vocabulary has no such token."""
    return None if token is None else vocabulary.piece(token).decode("utf-8", "replace")


def prompts_of(
    engine: Engine, prompt: PromptField, most: int = MAX_PROMPTS, longest: int | None = None, field: str = "prompt"
) -> list[list[int]]:
    """Token ids of each prompt: one is a text, or ids among which there may be texts; several are a list of these.

    most      prompts at once
    longest   tokens of one prompt
    field     its name in the body

    Raises ApiError 400 for no prompt, for more than `most` and for a list among ids, OptionError for an unknown id,
    PromptTooLong.
    """
    if isinstance(prompt, str) or any(isinstance(part, int) for part in prompt):
        return [_prompt(engine, prompt, longest, field)]
    if not 1 <= len(prompt) <= most:
        message = f"{field}: give 1 to {most} prompts at once, not {len(prompt)}"
        raise ApiError(400, message, code="invalid_value", param=field)
    return [_prompt(engine, each, longest, field) for each in prompt]  # type: ignore[arg-type]


def _prompt(
    engine: Engine, prompt: str | Sequence[int | str | Sequence[int | str]], longest: int | None, field: str
) -> list[int]:
    if isinstance(prompt, str):
        return engine.tokenize(prompt, most=longest)
    tokens: list[int] = []
    for number, part in enumerate(prompt):
        if isinstance(part, int):
            tokens += checked_ids(engine, [part])
        elif not isinstance(part, str):
            raise ApiError(400, "give one prompt, of texts and token ids, or a list of such prompts", param=field)
        elif number == 0:
            tokens += engine.tokenize(part, most=longest)
        else:
            tokens += engine.model.vocabulary.tokenize(part, special=True, most=longest).tolist()
        if longest is not None and len(tokens) > longest:
            raise PromptTooLong(len(tokens), longest)
    return tokens


def checked_ids(engine: Engine, ids: Any) -> list[int]:
    """The ids, checked. Raises OptionError for an id that the model does not have: llama.cpp would end the process."""
    size = engine.model.vocabulary.size
    if any(not isinstance(token, int) or not 0 <= token < size for token in ids):
        raise OptionError(f"the prompt contains token ids outside 0..{size - 1}")
    return list(ids)


def prompt_text(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """The text of the tokens, special tokens included."""
    return b"".join(vocabulary.piece(token) for token in tokens).decode("utf-8", "replace")


def infill_tokens(
    engine: Engine,
    prefix: str,
    suffix: str,
    extra: Sequence[tuple[str, str]] = (),
    prompt: str = "",
    answer: int = 0,
) -> list[int]:
    """The prompt for a gap, in the form that the model was trained on, shortened to leave room for `answer` tokens.

    extra    (file name, text) of other files, the most important last
    prompt   the beginning of the gap's own text

    Text far from the gap is dropped first: the first extra files, the front of the prefix, the end of the suffix.
    Raises ApiError 501 if the model has no fill-in-the-middle tokens.
    """
    vocabulary = engine.model.vocabulary
    markers = vocabulary.fim_prefix, vocabulary.fim_suffix, vocabulary.fim_middle
    if any(marker is None for marker in markers):
        raise ApiError(501, "the model has no fill-in-the-middle tokens", code="no_infill")
    before, after, middle = (int(marker) for marker in markers if marker is not None)
    start = [vocabulary.bos] if vocabulary.add_bos and vocabulary.bos is not None else []
    begun = _ids(vocabulary, prompt)
    room = max(engine.n_ctx - 1 - min(answer, engine.n_ctx // 2) - len(start) - len(begun) - 3, 0)
    left, right = _shortened(_ids(vocabulary, prefix), _ids(vocabulary, suffix), room)
    around = _context(vocabulary, extra, room - len(left) - len(right))
    return [*start, *around, before, *left, after, *right, middle, *begun]


def _shortened(left: list[int], right: list[int], room: int) -> tuple[list[int], list[int]]:
    share = int(PREFIX_SHARE * room)
    keep = min(len(left), max(share, room - len(right)))
    return left[len(left) - keep :], right[: room - keep]


def _context(vocabulary: Vocabulary, extra: Sequence[tuple[str, str]], room: int) -> list[int]:
    """As many of the last files as fit, with markers of repository and file where the model has them."""
    parts = [_file(vocabulary, name, text) for name, text in extra]
    if not parts:
        return []
    head: list[int] = []
    if vocabulary.fim_rep is not None:
        head = [vocabulary.fim_rep, *_ids(vocabulary, f"{REPOSITORY}\n")]
    tail = [] if vocabulary.fim_sep is None else [vocabulary.fim_sep, *_ids(vocabulary, "filename\n")]
    room -= len(head) + len(tail)
    taken: list[list[int]] = []
    for part in reversed(parts):
        room -= len(part)
        if room < 0:
            break
        taken.insert(0, part)
    return [*head, *(token for part in taken for token in part), *tail] if taken else []


def _file(vocabulary: Vocabulary, name: str, text: str) -> list[int]:
    if vocabulary.fim_sep is None:
        return _ids(vocabulary, f"{text}\n")
    return [vocabulary.fim_sep, *_ids(vocabulary, f"{name or 'tmp'}\n{text}")]


def _ids(vocabulary: Vocabulary, text: str) -> list[int]:
    tokens: list[int] = vocabulary.tokenize(text).tolist() if text else []
    return tokens
