"""Answers the jobs of a batch with one engine: the work of one machine, or of one replica of a cluster.

    with Engine.load("model.gguf", slots=8) as engine, Worker(engine) as worker:
        for answer in worker.answers(jobs):
            output.write(answer.record)

Contract:

- Every job gets exactly one answer, in the order in which they end. What is wrong with a job is its answer.
- A record is a line of OpenAI's batch output. It depends on the job, the model and the engine's settings. In exact mode
  nothing else changes a bit of it, `created` aside: not the other jobs, not their order, not what was drafted. So it
  contains no times, and no counts of cached or drafted tokens.
- A request without a seed draws with one that is made of the job's name.
- `model` of a body is not compared: the model answers that the engine has. `stream` has no effect.

The bodies mean what they mean in the server, whose code makes the requests and the answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rest_local import __version__
from rest_local.batch.jobs import CHAT, COMPLETION, EMBEDDING, LIMITS, Job
from rest_local.decoding.batch import Batch, Finished
from rest_local.decoding.results import Timings
from rest_local.decoding.sequence import error_of
from rest_local.llama.embedding import Embedder
from rest_local.llama.sampling import MAX_SEED
from rest_local.server.answering import Asked
from rest_local.server.bodies import ChatBody, CompletionBody, EmbeddingBody, check
from rest_local.server.chat import Chat
from rest_local.server.completions import Completion
from rest_local.server.errors import ApiError, at_field
from rest_local.server.vectors import Embedding

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.logprobs import Scorer, TokenLogprobs

_PREFIXES = {CHAT: "chatcmpl", COMPLETION: "cmpl"}


@dataclass(frozen=True)
class JobAnswer:
    """The answer to one job. `record`: the line to write; `timings`: tokens and times of all its choices."""

    job: Job
    record: dict[str, Any]
    timings: Timings = field(default_factory=Timings)

    @property
    def ok(self) -> bool:
        """Whether the record contains an answer, and not an error."""
        return self.job.error is None and self.record["response"]["status_code"] == 200


class Worker:
    """Answers with an engine, in the thread that owns it.

    model       the name to answer with; None: that of the file
    max_tokens  the most tokens of an answer, for bodies that do not say; None: as many as the context holds

    Close it before the engine; a context manager does.
    """

    def __init__(self, engine: Engine, model: str | None = None, *, max_tokens: int | None = None) -> None:
        self.engine, self._max_tokens = engine, max_tokens
        self.model = engine.model.path.stem if model is None else model
        self._embedder: Embedder | None = None
        self._scorer: Scorer | None = None

    def answers(self, jobs: Iterable[Job]) -> Iterator[JobAnswer]:
        """The answers to all jobs, each as it ends. What runs is cancelled where the iterator is closed.

        Raises only what belongs to no job: KeyboardInterrupt, a fault of this program.
        """
        batch = Batch(self.engine._core)
        waiting = iter(jobs)
        running: dict[int, _Running] = {}  # by number of the request
        left = True
        try:
            while left or batch.busy:
                while left and batch.has_room:
                    job = next(waiting, None)
                    if job is None:
                        left = False
                        break
                    begun = self._begin(job, batch)
                    if isinstance(begun, JobAnswer):
                        yield begun
                        continue
                    running |= dict.fromkeys(begun.numbers, begun)
                for finished in batch.step() if batch.busy else ():
                    ended = running.pop(finished.number)
                    if ended.take(finished):
                        yield self._end(ended)
        finally:
            batch.close()

    def _begin(self, job: Job, batch: Batch) -> JobAnswer | _Running:
        """Start the requests of a job; its answer where it needs none."""
        if job.error is not None:
            return failed_line(job)
        try:
            if job.url == EMBEDDING:
                body = Embedding(self.engine, check(job.body, EmbeddingBody), self.model).answer(self._embed)
                return JobAnswer(job, _record(job, 200, body))
            call = self._call(job)
            begun = _Running(job, call)
            try:
                for request in call.requests():
                    begun.numbers.append(batch.add(request))
            except BaseException:
                batch.cancel(begun.numbers)
                raise
            if isinstance(call, Completion) and call.echoes_logprobs:
                call.scores = self._scores(*call.to_score())
            return begun
        except Exception as error:  # a fault in one job is its answer: the others go on
            return failed(job, error)

    def _call(self, job: Job) -> Chat | Completion:
        if job.url == CHAT:
            return Chat(self._asked(check(job.body, ChatBody), job))
        return Completion(self._asked(check(job.body, CompletionBody), job))

    def _asked(self, body: Any, job: Job) -> Asked[Any]:
        if body.seed is None or body.seed == -1:
            body.seed = seed_of(job.custom_id)
        if all(getattr(body, name, None) is None for name in LIMITS):
            body.max_tokens = self._max_tokens
        return Asked(self.engine, body, self.model, shows_steps=False, fingerprint=f"rest-local-{__version__}")

    def _end(self, ended: _Running) -> JobAnswer:
        job = ended.job
        broken = [each.error for each in ended.finished.values() if each.error is not None]
        if broken:
            return failed(job, broken[0])
        results = [ended.finished[number] for number in ended.numbers]
        try:
            body = ended.call.answer(results).completed()
        except Exception as error:
            return failed(job, error)
        assert isinstance(body, dict)
        body["id"] = f"{_PREFIXES[job.url]}-{job.id.removeprefix('batch_req_')}"
        del body["timings"]
        body["usage"].pop("completion_tokens_details", None)
        return JobAnswer(job, _record(job, 200, body), Timings.total(each.result.timings for each in results))

    def _embed(self, prompt: list[int]) -> Any:
        if self._embedder is None:
            self._embedder = Embedder(self.engine.model)
        return self._embedder.embed(prompt)

    def _scores(self, prompts: list[list[int]], top: int) -> list[list[TokenLogprobs]]:
        from rest_local.decoding.logprobs import Scorer

        if self._scorer is None:
            self._scorer = Scorer(self.engine)
        return [self._scorer.score(prompt, top, lambda part: part()) for prompt in prompts]

    def close(self) -> None:
        """Free what was opened in addition to the engine; again does nothing."""
        for opened in (self._embedder, self._scorer):
            if opened is not None:
                opened.close()
        self._embedder = self._scorer = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Running:
    """A job whose requests are decoded. `numbers`: of its requests, in the order of its choices."""

    job: Job
    call: Chat | Completion
    numbers: list[int] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)

    def take(self, finished: Finished) -> bool:
        """One of the requests has ended; whether all have."""
        self.finished[finished.number] = finished
        return len(self.finished) == len(self.numbers)


def seed_of(name: str) -> int:
    """The seed of a job without one: the same in every run, and another one for another name."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") % (
        MAX_SEED + 1
    )


def failed_line(job: Job) -> JobAnswer:
    """The answer to a line that is no request."""
    return JobAnswer(job, {"id": job.id, "custom_id": job.custom_id, "response": None, "error": job.error})


def failed(job: Job, error: Exception) -> JobAnswer:
    """The answer to a job that ended with an error."""
    answer = error if isinstance(error, ApiError) else at_field(error_of(error), job.url, is_local=True)
    return JobAnswer(job, _record(job, answer.status, answer.body))


def _record(job: Job, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": job.id.replace("batch_req", "req", 1), "body": body}
    return {"id": job.id, "custom_id": job.custom_id, "response": response, "error": None}
