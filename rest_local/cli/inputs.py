"""Read what commands are given: prompts, predictions, grammars, and the file that -m names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import terminal
from rest_local.errors import InputInvalid, ModelNotHere, OptionError

if TYPE_CHECKING:
    from rest_local.grammar import Grammar

_TOLD = "rest_local.default_model"


def model_path(value: str | Path | None) -> Path:
    """Resolve the value of -m to a file (`rest_local.catalog.stores`). None means the default model, which a command
    says once. At a terminal, a model that is on a hub and not here is downloaded after a question.

    Raises ModelNotFound, ModelInvalid, HubError.
    """
    from rest_local.catalog.stores import DEFAULT, model_file

    try:
        path = model_file(value)
    except ModelNotHere as error:
        if not terminal.can_ask():
            raise
        from rest_local.cli.models import offer

        return offer(error)
    context = click.get_current_context(silent=True)
    if value is None and context is not None and not context.meta.get(_TOLD):
        context.meta[_TOLD] = True
        terminal.say(f"rest-local: no model was named (-m): using {DEFAULT}, a small one (135M)")
    return path


def model_name(value: str | Path | None) -> str:
    """Return the name that answers give to the model of -m.

    That is its file name without the ending and the number of a part, as clients of llama-server expect. If the file
    name says nothing, as in Ollama's store, it is the value of -m. Raises the errors of `model_path`.
    """
    from rest_local.catalog.quantization import stem_of

    path = model_path(value)
    return stem_of(path.name) if path.suffix.lower() == ".gguf" else str(value)


def read_grammar(grammar_file: Path | None, json_schema: Path | None) -> Grammar | None:
    """Read the grammar (Lark if the name ends in `.lark`, else GBNF) or JSON schema. Raises OptionError,
    InputInvalid.
    """
    if grammar_file is not None and json_schema is not None:
        raise OptionError("--grammar-file and --json-schema: give one of them")
    path, what = (grammar_file, "grammar file") if json_schema is None else (json_schema, "JSON schema")
    if path is None:
        return None
    import json

    from rest_local import grammar

    text = read_text(path, what)
    try:
        if json_schema is not None:
            return grammar.json_schema(json.loads(text))
        return grammar.lark(text) if path.suffix == ".lark" else grammar.gbnf(text)
    except OptionError as error:
        raise InputInvalid(what, path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise InputInvalid(what, path, f"not JSON: {error}") from error


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file that an option named. Errors call it `what`. Raises InputInvalid."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputInvalid(what, path, f"not UTF-8 text at byte {error.start}") from error
    except OSError as error:
        raise InputInvalid(what, path, error.strerror or str(error)) from error


def read_stdin() -> str:
    return decode(sys.stdin.buffer.read(), "stdin")


def read_file(path: Path, what: str) -> str:
    """Read a UTF-8 file, or the standard input for "-". Raises InputInvalid."""
    return read_stdin() if str(path) == "-" else read_text(path, what)


def read_image(path: Path) -> bytes:
    """Read the bytes of an image. Raises InputInvalid if the file cannot be read or is too large."""
    from rest_local.chat.images import MAX_BYTES

    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputInvalid("image", path, f"has more than {MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InputInvalid("image", path, error.strerror or str(error)) from error


def clean(text: str, origin: str) -> str:
    """Replace bytes that were not UTF-8, which Python marks with lone surrogates, by U+FFFD, and warn."""
    escaped = all(0xDC80 <= ord(c) <= 0xDCFF for c in text if 0xD800 <= ord(c) <= 0xDFFF)
    return decode(text.encode("utf-8", "surrogateescape" if escaped else "replace"), origin)


def decode(data: bytes, origin: str) -> str:
    """Decode UTF-8, with U+FFFD for invalid bytes and one warning that names `origin`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        terminal.warn(f"{origin}: not UTF-8 at byte {error.start}; invalid bytes were replaced")
        return data.decode("utf-8", "replace")


def read_prediction(path: Path | None, prompt: str | None) -> str:
    """Read the text of --prediction. Raises InputInvalid, and UsageError if stdin is the prompt too."""
    if path is None:
        return ""
    if str(path) == "-" and prompt in (None, "-"):
        raise click.UsageError("the prompt and --prediction - cannot both be the standard input")
    return read_file(path, "prediction")


def read_prompt(argument: str | None) -> str:
    """Return the prompt: the argument, or all of stdin if the argument is "-" or missing. Raises click.UsageError."""
    if argument not in (None, "-"):
        return clean(argument or "", "prompt")
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or - to read it from the standard input")
    text = read_stdin()
    if not text:
        raise click.UsageError("the standard input is empty; give a PROMPT")
    return text
