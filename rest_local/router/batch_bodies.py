"""The bodies of `/v1/files` and `/v1/batches`: JSON by pydantic, and a form with a file that is written as it arrives.

A form is never held in memory: `Form` takes it in parts of any size and gives the bytes of its file to `write`. A
file's name is text to be shown, cut and without control characters, and never part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from email.message import Message
from typing import Annotated, Literal

from pydantic import Field
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from rest_local.errors import printable
from rest_local.server.bodies import Body
from rest_local.server.errors import ApiError

LONGEST_NAME = 255  # characters of a file's name
MOST_PARTS = 16
MOST_HEAD = 4 << 10  # bytes of a part's headers
MOST_FIELD = 4 << 10  # bytes of a field that is no file
HOUR, DAY = 3600, 86400
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
LONGEST_WINDOW = 30 * DAY
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class ExpiresAfter(Body):
    """When a file is deleted: seconds after it was made, an hour to 30 days."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR, le=30 * DAY)]


Label = Annotated[str, Field(max_length=512)]
LabelName = Annotated[str, Field(max_length=64)]


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Endpoint
    completion_window: Annotated[str, Field(max_length=8)]
    metadata: Annotated[dict[LabelName, Label], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


def seconds_of(window: str) -> int:
    """The seconds of a completion window: `24h`, `7d`, 30 days at most. Raises ApiError."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * (HOUR if found[2] == "h" else DAY) if found else 0
    if not 0 < seconds <= LONGEST_WINDOW:
        message = "completion_window: give hours or days, up to 30 days, for example 24h or 7d"
        raise ApiError(400, message, code="invalid_value", param="completion_window")
    return seconds


class Form:
    """A `multipart/form-data` body with one file in the field `file`. `write` gets the bytes of the file, in parts.

    Raises ApiError 400 for what is no such form, or more of it than makes sense.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], object]) -> None:
        head = Message()
        head["content-type"] = content_type
        boundary = head.get_param("boundary", "")
        if not isinstance(boundary, str) or not boundary or not boundary.isascii():
            raise _invalid("the Content-Type names no boundary")
        self.filename: str | None = None  # of the file, None until there is one
        self.fields: dict[str, str] = {}
        self._write = write
        self._parts = self._head_bytes = 0
        self._header, self._value = b"", b""
        self._headers: dict[str, str] = {}
        self._field: str | None = None  # the name of the field that is being read; None in the file
        self._content = b""
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary.encode("ascii"),
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._add_header,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._start,
                    "on_part_data": self._add,
                    "on_part_end": self._end,
                    "on_end": self._finish,
                },
            )
        except FormParserError as error:
            raise _invalid(str(error)) from error

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from error

    def finish(self) -> None:
        """The body has ended."""
        if not self._ended:
            raise _invalid("the form ends before its last boundary")
        if self.filename is None:
            raise ApiError(400, "file: missing; send a form with a file in the field `file`", param="file")

    def _begin(self) -> None:
        self._parts += 1
        self._head_bytes = 0
        self._header, self._value, self._headers = b"", b"", {}
        if self._parts > MOST_PARTS:
            raise _invalid(f"the form has more than {MOST_PARTS} parts")

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += self._counted(data[start:end])

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._counted(data[start:end])

    def _counted(self, data: bytes) -> bytes:
        self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD:
            raise _invalid("the headers of a part are too long")
        return data

    def _end_header(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = self._value.decode("utf-8", "replace")
        self._header, self._value = b"", b""

    def _start(self) -> None:
        name, filename = _disposition(self._headers.get("content-disposition", ""))
        if name == "file":
            if self.filename is not None:
                raise ApiError(400, "file: give one file", code="invalid_value", param="file")
            self._field, self.filename = None, filename
        else:
            self._field, self._content = printable(name)[:LONGEST_NAME], b""

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._write(data[start:end])
            return
        self._content += data[start:end]
        if len(self._content) > MOST_FIELD:
            raise ApiError(400, f"{self._field}: too long", code="invalid_value", param=self._field)

    def _end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._content.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._ended = True


def _disposition(value: str) -> tuple[str, str]:
    """The name of a part's field and that of its file, from `form-data; name="file"; filename="a.jsonl"`."""
    parameters = dict(re.findall(r';\s*(\w+\*?)="((?:[^"\\]|\\.)*)"', value))
    parameters |= {key: text for key, text in re.findall(r';\s*(\w+\*?)=([^";\s]+)', value) if key not in parameters}
    filename = parameters.get("filename") or "file"
    for escape, character in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n"), ('\\"', '"'), ("\\\\", "\\")):
        filename = filename.replace(escape, character)
    return parameters.get("name", ""), printable(filename)[:LONGEST_NAME]


def _invalid(message: str) -> ApiError:
    return ApiError(400, f"the body is not a valid form: {message}", code="invalid_form")
