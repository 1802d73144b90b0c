"""One edit: the conversation that asks a model for the whole changed file, and the file that came back.

    stream = begin(engine, file, "rename width to w")
    for piece in stream: ...
    write_whole(file.target, changed(file, stream), like=file.target)

Contract: the old text is the prediction of the answer, so what stays is drafted. Nothing is written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_local.editing.answer import NoFile, fence_for, file_in
from rest_local.editing.text_file import TextFile
from rest_local.errors import EditRefused, printable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rest_local.decoding.engine import Engine
    from rest_local.decoding.request import RequestOptions
    from rest_local.decoding.streaming import ChatStream

_MARKDOWN = (".md", ".markdown", ".mdx", ".rmd", ".qmd")  # an edit may add blocks of code to these


def messages_for(file: TextFile, instruction: str) -> list[dict[str, str]]:
    """The conversation: one message with the file first, so that a second edit of it finds it in the KV cache."""
    begin, end = _fences(file)
    return [
        {
            "role": "user",
            "content": f"This is the file {_safe(file.path.as_posix())}:\n\n{begin}\n{_ended(file.text)}{end}\n\n"
            f"Change it as follows:\n\n{instruction.strip()}\n\n"
            f"Answer with the whole changed file in one block of code, which begins with {begin} and ends with {end}, "
            "and with nothing else. Leave out nothing, and leave all other lines as they are.",
        }
    ]


def prediction_for(file: TextFile) -> str:
    """What the answer most likely is: the old text in its block."""
    begin, end = _fences(file)
    return f"{begin}\n{_ended(file.text)}{end}"


def begin(engine: Engine, file: TextFile, instruction: str, **options: Unpack[RequestOptions]) -> ChatStream:
    """Evaluate the conversation and return the stream of the answer. `options`: the fields of `Request`, of which the
    prediction is set here. Raises as `Engine.chat`.
    """
    options["prediction"] = prediction_for(file)
    return engine.chat(messages_for(file, instruction), **options)


def changed(file: TextFile, stream: ChatStream) -> bytes:
    """The new content of the file, from a stream that has ended. Raises EditRefused for an answer that was cut off by a
    limit, for one that was written without sight of the whole file, and for one without a whole file.
    """
    result = stream.result
    if result.finish_reason != "stop" or result.truncated:
        cause = f"the answer was cut off after {len(result.tokens)} tokens"
        if result.truncated:
            cause = "a context shift dropped the beginning of the file"
        raise EditRefused(file.path, cause, "raise `n_ctx` or `max_tokens`, or give a smaller file")
    try:
        return file.with_text(file_in(stream.message["content"] or "", file.text))
    except NoFile as error:
        raise EditRefused(file.path, str(error), "say it in other words, or use a larger model") from error


def _fences(file: TextFile) -> tuple[str, str]:
    """The first and the last line of the block: the first with the suffix of the file as its language."""
    suffix = file.path.suffix.lower()
    fence = fence_for(file.text, has_blocks=suffix in _MARKDOWN)
    return fence + _safe(suffix.removeprefix(".")), fence


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


def _safe(name: str) -> str:
    return printable(name).replace("`", "'")
