"""The lines of a batch: checked as a whole before the first is run, then read one by one; and the records of answers.

Contract: of a file only its names, ids and places are in memory, about 400 bytes a line. A file with a wrong line is no
batch: `Wrong` has the errors with their lines, as OpenAI has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from rest_local.batch.jobs import GZIP, Job, job_of, numbered
from rest_local.batch.output import Output
from rest_local.errors import OutputInvalid, OutputUnwritable

MOST_ERRORS = 100  # that are told of a file
_UNSTREAMED = ("stream", "stream_options", "background")
_TIERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Wrong(Exception):
    """The input is no batch. `errors`: OpenAI's objects."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("the input of a batch is wrong")
        self.errors = errors


@dataclass(frozen=True)
class Line:
    """A request of a batch. `job`: without its body, which is at `offset` of the file; `model`: that it names."""

    job: Job
    offset: int
    size: int
    model: str


def read_lines(path: Path, endpoint: str, most: int) -> list[Line]:
    """All lines, those of one model together, so that models change as seldom as possible. Raises Wrong, OSError."""
    lines: list[Line] = []
    errors: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}  # by custom_id
    with path.open("rb") as file:
        if file.read(2) == GZIP:
            raise Wrong([batch_error("invalid_file", "the file is compressed; upload the lines as they are")])
        file.seek(0)
        for number, data in numbered(file):
            if len(lines) + len(errors) >= most:
                raise Wrong([batch_error("too_many_requests", f"a batch has at most {most} requests", number)])
            job = job_of(number, data, (endpoint,), complete=True)
            if job.error is not None:
                errors.append(
                    batch_error(job.error["code"] or "invalid_value", job.error["message"], number, job.error["param"])
                )
            elif (before := numbers.setdefault(job.custom_id, number)) != number:
                message = f"custom_id {job.custom_id!r} is also that of line {before}; give every request its own"
                errors.append(batch_error("duplicate_custom_id", message, number, "custom_id"))
            elif not errors:
                model = from_json(job.body).get("model")
                lines.append(
                    Line(
                        replace(job, body=b""),
                        file.tell() - len(data),
                        len(data),
                        model if isinstance(model, str) else "",
                    )
                )
            if len(errors) >= MOST_ERRORS:
                break
    if not lines and not errors:
        errors = [batch_error("empty_file", "the file contains no request; write one JSON object a line")]
    if errors:
        raise Wrong(errors)
    first = {line.model: number for number, line in reversed([*enumerate(lines)])}
    return sorted(lines, key=lambda line: first[line.model])


def body_of(path: Path, line: Line) -> bytes:
    """The request's body, with lower priority than requests of people. Raises OSError, ValueError if it has changed."""
    with path.open("rb") as file:
        file.seek(line.offset)
        job = job_of(line.job.number, file.read(line.size), (line.job.url,), complete=True)
    if job.id != line.job.id:
        raise ValueError("the input has changed")
    body = {name: value for name, value in from_json(job.body).items() if name not in _UNSTREAMED}
    return to_json(body | {"service_tier": "flex"} if line.job.url in _TIERED else body)


def batch_error(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's object of an error of a batch."""
    return {"code": code, "line": line, "message": message, "param": param}


def answered(job: Job, status: int, body: Any) -> dict[str, Any]:
    """The record of an answer, or of a request that was refused."""
    response = {"status_code": status, "request_id": job.id.replace("batch_req", "req", 1), "body": body}
    return {"id": job.id, "custom_id": job.custom_id, "response": response, "error": None}


def not_run(job: Job, code: str, message: str) -> dict[str, Any]:
    """The record of a request without an answer."""
    return {"id": job.id, "custom_id": job.custom_id, "response": None, "error": {"code": code, "message": message}}


def is_answer(record: Mapping[str, Any]) -> bool:
    """Whether a record belongs into the output, and not among the errors."""
    return bool(record["response"] and record["response"]["status_code"] == 200)


class Results:
    """The two files of a batch, answers and errors, each line in one of them, exactly once wherever a process is killed
    (`rest_local.batch.output`).

    Blocks on the disk. Raises OutputInvalid for files that are damaged, OutputUnwritable.
    """

    def __init__(self, output: Path, errors: Path, lines: list[Line]) -> None:
        jobs = [line.job for line in lines]
        self._outputs: list[Output] = []
        try:
            for path in (output, errors):
                self._outputs.append(Output(path, jobs, None, locked=False))
            self._good, self._bad = self._outputs
            if self._good.done.names & self._bad.done.names:
                raise OutputInvalid(output, "answers requests that are errors as well")
            for each in self._outputs:
                each.start()
        except BaseException:
            self.close()
            raise
        self.names = self._good.done.names | self._bad.done.names
        self.completed, self.failed = len(self._good.done.names), len(self._bad.done.names)

    @property
    def size(self) -> int:
        """Bytes of both files."""
        return sum(each.size for each in self._outputs)

    def write(self, *records: Mapping[str, Any]) -> None:
        """Add a line for each."""
        for record in records:
            if is_answer(record):
                self._good.write(record)
                self.completed += 1
            else:
                self._bad.write(record)
                self.failed += 1
            self.names.add(record["custom_id"])

    def close(self) -> None:
        """All lines are on the disk; again does nothing."""
        failure: OutputUnwritable | None = None
        for each in self._outputs:
            try:
                each.close()
            except OutputUnwritable as error:
                failure = error
        if failure is not None:
            raise failure
