"""What assistants wrote in transcripts of chats in OpenAI's message form, as a model's chat template renders it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rest_local.errors import OptionError, RestLocalError
from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.fields import MAX_ROW, Row, files_of, json_rows, open_file, size_of
from rest_local.retrieval.sources.skipped import Skipped
from rest_local.retrieval.sources.source import Reading, Source
from rest_local.retrieval.sources.walk import absolute


@dataclass(frozen=True, slots=True)
class Chat(Source):
    """One document for each turn of an assistant, named `FILE:LINE#TURN`, both from 1.

    path: a file or a glob. A row of JSON Lines, or an element of a JSON list, is a list of messages or an object with
    `messages`, and perhaps `system`. So are sessions of `rest-local chat` and rows for fine-tuning.
    """

    kind: ClassVar[str] = "chat"
    path: str
    allow_secrets: bool = False

    def texts(self, reading: Reading) -> Iterator[Text]:
        if reading.render is None:
            raise OptionError(f"chat transcript {self.path}: needs a model with a chat template; give `model`")
        files = files_of(self.path)
        return (text for file in files for text in self._texts(file, reading))

    def measure(self) -> tuple[int, int]:
        return size_of(self.path)

    def about(self) -> str:
        return f"chats in {self.path}"

    def prepared(self) -> Chat:
        return replace(self, path=absolute(self.path))

    def _texts(self, file: str, reading: Reading) -> Iterator[Text]:
        assert reading.render is not None
        for row in _conversations(file, reading):
            try:
                turns = reading.render(row.value)
            except RestLocalError:
                reading.skipped.add("refused by the chat template", row.name)
                continue
            for number, parts in enumerate(turns, 1):
                text = "".join(part for part, _ in parts)
                name = f"{row.name}#{number}"
                # No mark: the text depends on the template too, so only the text says whether it changed.
                yield from reading.text(name, text, 0, allow_secrets=self.allow_secrets, parts=parts)


def _conversations(file: str, reading: Reading) -> Iterator[Row]:
    """The conversations of a file, each a list of messages."""
    if _is_lines(file):
        for row in json_rows(file, reading.skipped, reading.looked_at):
            found = [row.value] if _messages(row.value) else row.value if isinstance(row.value, list) else [row.value]
            for number, value in enumerate(found, 1):
                name = row.name if len(found) == 1 else f"{row.name}.{number}"
                yield from _conversation(name, value, reading.skipped)
        return
    value = _whole(file, reading)
    found = value if isinstance(value, list) and not _messages(value) else [value]
    for number, value in enumerate(found, 1):
        yield from _conversation(f"{file}:{number}", value, reading.skipped)


def _conversation(name: str, value: Any, skipped: Skipped) -> Iterator[Row]:
    messages = _messages(value)
    if messages:
        yield Row(name, messages, 0)
    else:
        skipped.add("without messages", name)


def _messages(value: Any) -> list[Mapping[str, Any]]:
    """The messages of a conversation, none if it is no conversation."""
    system = value.get("system") if isinstance(value, dict) else None
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        return []
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_lines(file: str) -> bool:
    """Whether the file is JSON Lines: by its name, else by whether its first line is a JSON value."""
    if file.lower().endswith((".jsonl", ".ndjson", ".gz")):
        return True
    raw, _ = open_file(file)
    with raw:
        line = raw.readline(MAX_ROW).strip() or b"x"
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _whole(file: str, reading: Reading) -> Any:
    """The value of a JSON file, None with the reason counted."""
    raw, _ = open_file(file)
    with raw:
        data = raw.read(MAX_ROW + 1)
    reading.looked_at(len(data))
    if len(data) > MAX_ROW:
        reading.skipped.add("too large", file)
        return None
    try:
        return json.loads(data.decode("utf-8", "replace").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        reading.skipped.add("damaged JSON", file)
        return None
