"""Answer the jobs of a batch with one engine, on one machine or in one replica of a cluster.

    with Engine(fitted(config, jobs)) as engine, Worker(engine) as worker:
        for answer in worker.answers(jobs):
            output.write(answer.record)

Contract:

- Every job gets exactly one answer, in the order in which they end. An error in a job is its answer.
- A record is a line of OpenAI's batch output. It depends on the job, the model and the engine's settings. In exact mode
  nothing else changes a bit of it, except `created`: not the other jobs, not their order, not what was drafted. So it
  contains no times, and no counts of cached or drafted tokens.
- A request without a seed draws with one that is derived from the job's name.
- `model` of a body is not compared: the engine's model answers. `stream` has no effect.

`fitted` decides how many requests to decode at a time, and how many cells they get. This is an upper bound by the
available memory; the cost curve decides how much of it is used (`rest_local.decoding.batch`). An estimate that is too
low costs time, never an answer, because requests then wait until others have ended. On a CPU flash attention is on,
unless the user fixed it: it skips the cells of other sequences. On one thread, 16 sequences of the toy model with 150
tokens each give 1.7 to 1.9 times the tokens of one with it, and 1.1 to 1.2 times without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rest_local import __version__
from rest_local.api.answers import RequestContext
from rest_local.api.bodies import ChatBody, CompletionBody, EmbeddingBody, check
from rest_local.api.errors import ApiError, at_field
from rest_local.api.openai import ChatCall, Completion
from rest_local.api.vectors import embeddings
from rest_local.batch.jobs import CHAT, COMPLETION, EMBEDDING, LIMITS, Job
from rest_local.catalog.describe import header_of
from rest_local.catalog.quantization import stem_of
from rest_local.catalog.stores import model_file
from rest_local.decoding.batch import Finished, RunningBatch
from rest_local.decoding.config import EngineConfig
from rest_local.decoding.core import error_of
from rest_local.decoding.opening import free_memory, uses_gpu, with_context
from rest_local.decoding.results import Timings
from rest_local.llama.context import MOST_IDS, ContextSettings
from rest_local.llama.embedding import Embedder
from rest_local.llama.gguf import check_headers, read_gguf, trained_context
from rest_local.llama.options import LEAST_DEFAULT, MAX_SEED
from rest_local.stop import Closing

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine

MOST_SLOTS = MOST_IDS // ContextSettings().n_branches
MOST_ON_CPU = 16  # the shipped curves of CPUs give 3.3 and 5.9 times the tokens of one request, and for 32 3.6 and 6.0
BYTES_PER_TOKEN = 3.0  # code has 3 to 4 bytes per token
TEMPLATE_TOKENS = 64  # added by a chat template
_SHARE = 0.5  # other programs and buffers need some of the free memory as well


def fitted(config: EngineConfig, jobs: Sequence[Job], max_tokens: int | None = None) -> EngineConfig:
    """Return the config with slots and cells for these jobs. Raises ModelError, OptionError.

    `max_tokens` is as for `Worker`. An engine of exact settings decodes one request at a time, so its config is
    unchanged.
    """
    generating = [job for job in jobs if job.error is None and job.url != EMBEDDING]
    if config.exact or len(generating) < 2:
        return config
    path = model_file(config.model)
    config = with_context(config)
    header = header_of(read_gguf(path), path)
    n_ctx = config.context_length(trained_context(path, config.options))
    needs = sorted((cells_of(job, n_ctx, max_tokens) for job in generating), reverse=True)
    size = sum(status.st_size for _, status in check_headers(path))
    memory = int(_SHARE * (free_memory(config) - size))
    on_cpu = not uses_gpu(config)
    needs = needs[: MOST_ON_CPU if on_cpu else MOST_SLOTS]
    slots, cells = room_for(needs, n_ctx, header.kv_bytes, memory, header.state_bytes)
    options = config.options
    if on_cpu and slots > 1 and options.flash_attention == "auto":
        options = replace(options, flash_attention="on")
    return replace(config, slots=slots, cells=cells, options=options)


def room_for(needs: Sequence[int], n_ctx: int, cell_bytes: int, memory: int, state_bytes: int = 0) -> tuple[int, int]:
    """Return how many slots and cells fit into `memory` bytes: at least one slot, with a whole context.

    `needs` has the cells of each request that a slot may be for, the largest first. Each slot also takes `state_bytes`.
    """
    cells, slots = n_ctx, 1
    for count in range(2, len(needs) + 1):
        wanted = max(n_ctx, sum(needs[:count]))
        if wanted * cell_bytes + count * state_bytes > memory:
            break
        cells, slots = wanted, count
    return slots, -(-cells // 256) * 256


def cells_of(job: Job, n_ctx: int, max_tokens: int | None = None) -> int:
    """Estimate the tokens of a request and one answer."""
    body = json.loads(job.body)
    given = next((body[name] for name in LIMITS if body.get(name) is not None), max_tokens)
    most = given if isinstance(given, int) and given >= 0 else LEAST_DEFAULT
    prompt = len(job.body) / BYTES_PER_TOKEN + TEMPLATE_TOKENS
    return min(round(prompt) + most, n_ctx)


_PREFIXES = {CHAT: "chatcmpl", COMPLETION: "cmpl"}


@dataclass(frozen=True)
class JobAnswer:
    """The answer to one job: the line to write, and the tokens and times of all its choices."""

    job: Job
    record: dict[str, Any]
    timings: Timings = field(default_factory=Timings)

    @property
    def ok(self) -> bool:
        return self.job.error is None and self.record["response"]["status_code"] == 200


class Worker(Closing):
    """Answers jobs with an engine, in the thread that owns it. Close it before the engine; a context manager does.

    Args:
        model: name to answer with; None: the file's, as `stem_of` returns it
        max_tokens: maximum tokens of an answer, for bodies that do not say; None: as many as the context holds
    """

    def __init__(self, engine: Engine, model: str | None = None, *, max_tokens: int | None = None) -> None:
        self.engine, self._max_tokens = engine, max_tokens
        self.model = model or stem_of(engine.model.path.name)
        self._context = RequestContext(engine, self.model, False, f"rest-local-{__version__}")
        self._embedder: Embedder | None = None

    def answers(self, jobs: Iterable[Job]) -> Generator[JobAnswer, None, None]:
        """Yield the answers to all jobs, each as it ends. Closing the iterator cancels what still runs.

        Raises only what belongs to no job: KeyboardInterrupt, a fault of this program.
        """
        batch = RunningBatch(self.engine.decoder)
        waiting = iter(jobs)
        running: dict[int, _Running] = {}  # request number -> job
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

    def _begin(self, job: Job, batch: RunningBatch) -> JobAnswer | _Running:
        """Start the requests of a job, or return its answer if it needs none."""
        if job.error is not None:
            return failed_line(job)
        try:
            if job.url == EMBEDDING:
                body = embeddings(self.engine, check(job.body, EmbeddingBody), self.model, self._embed)
                return JobAnswer(job, _record(job, 200, body))
            call = self._call(job)
            begun = _Running(job, call)
            try:
                for request in call.requests():
                    begun.numbers.append(batch.add(request))
            except BaseException:
                batch.cancel(begun.numbers)
                raise
            return begun
        except Exception as error:  # a fault in one job is its answer, and the others go on
            return failed(job, error)

    def _call(self, job: Job) -> ChatCall | Completion:
        if job.url == CHAT:
            return ChatCall(self._context, self._filled(check(job.body, ChatBody), job))
        return Completion(self._context, self._filled(check(job.body, CompletionBody), job))

    def _filled(self, body: Any, job: Job) -> Any:
        """Return the body with a seed and a limit of tokens if it lacks them."""
        if body.seed is None or body.seed == -1:
            body.seed = seed_of(job.custom_id)
        if all(getattr(body, name, None) is None for name in LIMITS):
            body.max_tokens = self._max_tokens
        return body

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

    def close(self) -> None:
        """Free what was opened besides the engine. Idempotent."""
        if self._embedder is not None:
            self._embedder.close()
        self._embedder = None


@dataclass
class _Running:
    """A job whose requests are being decoded. `numbers` are those of its requests, in the order of its choices."""

    job: Job
    call: ChatCall | Completion
    numbers: list[int] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)

    def take(self, finished: Finished) -> bool:
        """Add a request that has ended, and return True if all have."""
        self.finished[finished.number] = finished
        return len(self.finished) == len(self.numbers)


def seed_of(name: str) -> int:
    """Return the seed of a job without one. It is the same in every run, and differs with the name."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") % (
        MAX_SEED + 1
    )


def failed_line(job: Job) -> JobAnswer:
    return JobAnswer(job, {"id": job.id, "custom_id": job.custom_id, "response": None, "error": job.error})


def failed(job: Job, error: Exception) -> JobAnswer:
    """Return the answer to a job that ended with an error."""
    answer = error if isinstance(error, ApiError) else at_field(error_of(error), job.url, is_local=True)
    return JobAnswer(job, _record(job, answer.status, answer.body))


def _record(job: Job, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": job.id.replace("batch_req", "req", 1), "body": body}
    return {"id": job.id, "custom_id": job.custom_id, "response": response, "error": None}
