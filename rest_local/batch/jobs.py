"""Read the requests of a batch file: OpenAI's batch lines, or plain lines with a prompt.

Contract:

- One JSON object a line: `{"custom_id", "method", "url", "body"}`, or the body alone: `{"prompt": ...}` for a
  completion, `{"messages": ...}` for a chat, with a `custom_id` in it if there is one. Lines without text are skipped.
- Every other line becomes a job, too. A line that cannot be used is a job with an `error`, which is its answer.
- A job without a `custom_id` is called `line-N`, by its line in the file.
- The id of a job is a digest of its name, its URL and its body. So an answer identifies its request, and a resumed run
  finds out whether an output belongs to its input.

The fields of a body are checked when it is answered (`rest_local.batch.worker`). Knows no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import to_json

from rest_local.api.bodies import load
from rest_local.api.errors import ApiError
from rest_local.errors import InputInvalid

CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
URLS = (CHAT, COMPLETION, EMBEDDING)
LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")  # the fields of a body that limit an answer
MOST_BYTES = 64 << 20  # a prompt of 10 million tokens is a line of about 40 MB
LONGEST_ID = 512
GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
# These fields, which a prompt begins with, come first in a stored body. So sorting the bodies puts prompts that begin
# alike next to each other.
_FIRST = ("tools", "messages", "prompt", "input")


@dataclass(frozen=True)
class Job:
    """One request. `body` is its JSON with fields in a fixed order, empty if there is an `error`, OpenAI's object."""

    number: int  # line number, from 1
    custom_id: str
    id: str
    url: str = ""
    body: bytes = b""
    error: dict[str, Any] | None = None


def read_jobs(path: Path) -> list[Job]:
    """Read the jobs of a file, in its order. All of them are held in memory, about as large as the file.

    Raises InputInvalid for a file that cannot be read, a compressed file, and a file without requests.
    """
    try:
        with path.open("rb") as file:
            return read_stream(file, path)
    except OSError as error:
        raise InputInvalid("input", path, error.strerror or str(error)) from error


def read_stream(file: BinaryIO, name: Path | str) -> list[Job]:
    """Read jobs from an open file as `read_jobs` does, for example from stdin. Messages contain its `name`."""
    jobs: list[Job] = []
    lines: dict[str, int] = {}  # custom_id -> line number
    for number, data in numbered(file):
        if number == 1 and data.startswith(GZIP):
            raise InputInvalid("input", name, "is compressed; unpack it: `gunzip -c FILE | rest-local batch -`")
        job = job_of(number, data)
        if job.custom_id in lines:
            job = _duplicate(job, lines)
        lines[job.custom_id] = number
        jobs.append(job)
    if not jobs:
        raise InputInvalid("input", name, "contains no request; write one JSON object a line")
    return jobs


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Sort the jobs for a run: prompts that begin alike come together, so that their beginning is computed once."""
    return sorted(jobs, key=lambda job: (job.url, job.body))


def numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with text, and their numbers. Only the beginning of a line that is too long is read."""
    number = 0
    while data := file.readline(MOST_BYTES):
        number += 1
        rest = data
        while len(rest) == MOST_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MOST_BYTES)
        data = data.removeprefix(BOM) if number == 1 else data
        if data.strip():
            yield number, data


def job_of(number: int, data: bytes) -> Job:
    name = f"line-{number}"
    try:
        if len(data) >= MOST_BYTES:
            raise ApiError(400, f"the line is longer than {MOST_BYTES >> 20} MB", code="invalid_json_line")
        line = _object(data)
        name = _name(line, name)
        url, body = _parts(line)
    except ApiError as error:
        return _failed(number, name, data.strip(), error)
    ordered = {key: body[key] for key in _FIRST if key in body} | dict(sorted(body.items()))
    content = to_json(ordered)
    return Job(number, name, _digest(name, url, content), url, content)


def _object(data: bytes) -> dict[str, Any]:
    try:
        line = load(data.strip())
    except ApiError as error:
        raise ApiError(400, error.message.replace("the body", "the line", 1), code="invalid_json_line") from error
    if not isinstance(line, dict):
        raise ApiError(400, "the line is not a JSON object", code="invalid_json_line")
    return line


def _name(line: dict[str, Any], default: str) -> str:
    """Return the line's `custom_id`, which also an error is answered under. Raises ApiError."""
    name = line.get("custom_id")
    if name is None:
        return default
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_ID:
        raise ApiError(400, f"custom_id: give a text of 1 to {LONGEST_ID} characters", param="custom_id")
    return name


def _parts(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL and the body of a line. Raises ApiError."""
    if "url" not in line and "body" not in line:
        url = CHAT if "messages" in line else COMPLETION
        if url == COMPLETION and "prompt" not in line:
            raise ApiError(400, "give custom_id, url and body, or a prompt, or messages", code="missing_field")
        return url, {key: value for key, value in line.items() if key not in ("custom_id", "method")}
    if line.get("method", "POST") != "POST":
        raise ApiError(400, "method: give POST", param="method")
    given, body = line.get("url"), line.get("body")
    known = next((url for url in URLS if given in (url, url.removeprefix("/v1"))), None)
    if known is None:
        raise ApiError(400, f"url: give one of {', '.join(URLS)}", code="invalid_url", param="url")
    if not isinstance(body, dict):
        raise ApiError(400, "body: give the JSON object of the request", code="missing_field", param="body")
    return known, body


def _duplicate(job: Job, lines: Mapping[str, int]) -> Job:
    """Make a job with an error and a new name, because an earlier line has its name. `lines` has those by name."""
    text = f"custom_id {job.custom_id!r} is also that of line {lines[job.custom_id]}; give every request its own"
    name = f"line-{job.number}"
    while name in lines:
        name += "-again"
    error = ApiError(400, text, code="duplicate_custom_id", param="custom_id")
    return _failed(job.number, name, job.custom_id.encode("utf-8", "surrogatepass") + job.body, error)


def _failed(number: int, name: str, data: bytes, error: ApiError) -> Job:
    content: dict[str, Any] = error.body["error"]
    return Job(number, name, _digest(name, "", data), error=content | {"line": number})


def _digest(name: str, url: str, body: bytes) -> str:
    """Return an id in OpenAI's form, with 96 bits, so that two requests of one file do not share one."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (name.encode("utf-8", "surrogatepass"), url.encode("utf-8", "surrogatepass"), body):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"batch_req_{digest.hexdigest()}"
