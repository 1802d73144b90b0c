"""The calls of the protocols: each reads a body, and answers with what `rest_local.api` translates. See ROUTES."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api import bodies, models, ollama, vectors
from rest_local.api.errors import ApiError, headers_of, loading, no_such_model
from rest_local.api.messages import CountBody, MessagesBody
from rest_local.api.messages_answer import MessagesCall
from rest_local.api.native import NativeCompletion
from rest_local.api.openai import ChatCall, Completion
from rest_local.api.requests import checked_ids, prompt_text
from rest_local.api.responses import ResponseBody
from rest_local.api.responses_answer import ResponseCall
from rest_local.llama.embedding import Embedder
from rest_local.server.answering import context_of, generate, parse
from rest_local.server.operations import Endpoint, Operation, Routes, delete, get, post
from rest_local.server.state import State, server_of, state_of
from rest_local.server.streaming import json_response

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service


def _generating(path: str, kind: Any, call: Any) -> tuple[Operation, Endpoint]:
    """Return the operation and endpoint that answer a body of this `kind` with a `Call`."""

    async def endpoint(request: HttpRequest) -> Response:
        body = await parse(request, kind)
        response = await generate(request, call(context_of(request, body.model), body))
        response.headers.update(headers_of(request.url.path))
        return response

    return post(path, streams=True), endpoint


async def count_tokens(request: HttpRequest) -> Response:
    body = await parse(request, CountBody)
    call = MessagesCall(context_of(request, body.model), body)
    tokens = await state_of(request).workers.run(request, call.count)
    response = json_response({"input_tokens": tokens})
    response.headers.update(headers_of(request.url.path))
    return response


async def embeddings(request: HttpRequest) -> Response:
    body, state = await parse(request, bodies.EmbeddingBody), state_of(request)
    service, engine = state.loaded()
    model, embed = state.check_model(body.model), _embed(state, service)
    return json_response(await state.workers.run(request, lambda: vectors.embeddings(engine, body, model, embed)))


def _embed(state: State, service: Service) -> Callable[[list[int]], NDArray[np.float32]]:
    """Return a function for any thread that computes the vector of a text. Other requests run between two texts."""

    def one(engine: Engine, prompt: list[int]) -> NDArray[np.float32]:
        state.embedder = state.embedder or Embedder(engine.model)  # takes memory, so only the first request makes it
        return state.embedder.embed(prompt)

    return lambda prompt: service.run(lambda engine: one(engine, prompt))


async def ollama_chat(request: HttpRequest) -> Response:
    body, began = await parse(request, ollama.OllamaChatBody), time.perf_counter()
    if not body.messages:
        return _only_loaded(request, body, of_chat=True)
    return await generate(request, ollama.OllamaCall(context_of(request, body.asked), body, began))


async def ollama_generate(request: HttpRequest) -> Response:
    body, began = await parse(request, ollama.GenerateBody), time.perf_counter()
    if not body.prompt and not body.suffix and not body.images:
        return _only_loaded(request, body, of_chat=False)
    return await generate(request, ollama.OllamaCall(context_of(request, body.asked), body, began))


def _only_loaded(request: HttpRequest, body: ollama.AnswerBody, *, of_chat: bool) -> Response:
    state = state_of(request)
    state.loaded()
    return json_response(ollama.loaded(state.check_model(body.asked), of_chat=of_chat))


async def ollama_embed(request: HttpRequest) -> Response:
    """Return vectors of length 1, one for each text. A text that is too long is cut, unless `truncate` is false."""
    body, began = await parse(request, ollama.EmbedBody), time.perf_counter()
    texts = [body.input] if isinstance(body.input, str) else body.input
    model, vectors, count = await _ollama_vectors(
        request, body, texts, dimensions=body.dimensions, cut=body.truncate is not False
    )
    found: dict[str, Any] = {"model": model, "embeddings": vectors, "load_duration": 0, "prompt_eval_count": count}
    return json_response(found | {"total_duration": round(1e9 * (time.perf_counter() - began))})


async def ollama_embeddings(request: HttpRequest) -> Response:
    body = await parse(request, ollama.OldEmbedBody)
    _, vectors, _ = await _ollama_vectors(request, body, [body.prompt])
    return json_response({"embedding": vectors[0] if vectors else []})


async def _ollama_vectors(
    request: HttpRequest, body: ollama.NamedBody, texts: list[str], *, dimensions: int | None = None, cut: bool = True
) -> tuple[str, list[Any], int]:
    """Return the name of the model, the vectors, and how many tokens the texts have."""
    state = state_of(request)
    service, engine = state.loaded()
    model, embed = state.check_model(body.asked), _embed(state, service)
    vectors, count = await state.workers.run(
        request, lambda: ollama.embedded(engine, model, texts, dimensions, embed, cut=cut)
    )
    return model, vectors, count


async def ollama_tags(request: HttpRequest) -> Response:
    return json_response(models.tags(server_of(request).ollama_rows()))


async def ollama_running(request: HttpRequest) -> Response:
    return json_response(models.running(server_of(request).ollama_rows()))


async def ollama_version(request: HttpRequest) -> Response:
    return json_response(models.version())


async def ollama_show(request: HttpRequest) -> Response:
    body, state = await parse(request, ollama.ShowBody), state_of(request)
    _, engine = state.loaded()
    name = state.check_model(body.asked)
    return json_response(await anyio.to_thread.run_sync(models.shown, engine, name))


async def not_served(request: HttpRequest) -> Response:
    """Refuse calls of Ollama's API that would change the set of models."""
    call = request.url.path.rpartition("/")[2]
    raise ApiError(
        501,
        f"{call} is not supported: the server has the models that it was started with; get others with "
        "`rest-local pull`, and name them with -m",
        code="not_supported",
    )


async def list_models(request: HttpRequest) -> Response:
    return json_response(models.list_of(server_of(request).rows()))


async def one_model(request: HttpRequest) -> Response:
    """Describe one name of a model. Any other name is 404."""
    for row in server_of(request).rows():
        if row["id"] == request.path_params["name"]:
            return json_response(row)
    raise no_such_model()


async def health(request: HttpRequest) -> Response:
    """Answer 503 while the model loads, then `ok`."""
    if not server_of(request).ready:
        raise loading()
    return json_response({"status": "ok"})


async def props(request: HttpRequest) -> Response:
    state = state_of(request)
    service, engine = state.loaded()
    return json_response(
        await anyio.to_thread.run_sync(lambda: models.properties(engine, state.model_id, len(service.slots())))
    )


async def metrics(request: HttpRequest) -> Response:
    """Return the metrics, if the server was started with --metrics."""
    state = state_of(request)
    if not state.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="metrics_off")
    service, _ = state.loaded()
    text = await anyio.to_thread.run_sync(models.exposition, service, state.settings.shows_steps)
    headers = {
        "content-type": "text/plain; version=0.0.4; charset=utf-8",
        "process-start-time-unix": str(state.started),
    }
    return Response(text, headers=headers)


async def tokenize(request: HttpRequest) -> Response:
    body, state = await parse(request, bodies.TokenizeBody), state_of(request)
    vocabulary = state.loaded()[1].model.vocabulary

    def work() -> list[Any]:
        special, add = body.parse_special is not False, bool(body.add_special)
        tokens: list[int] = vocabulary.tokenize(body.content, special=special, add_special=add).tolist()
        if not body.with_pieces:
            return tokens
        return [{"id": token, "piece": _piece(vocabulary.piece(token))} for token in tokens]

    return json_response({"tokens": await state.workers.run(request, work)})


def _piece(piece: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if they are part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: HttpRequest) -> Response:
    body = await parse(request, bodies.DetokenizeBody)
    _, engine = state_of(request).loaded()
    tokens = checked_ids(engine, body.tokens)
    text = await anyio.to_thread.run_sync(prompt_text, engine.model.vocabulary, tokens)
    return json_response({"content": text})


async def apply_template(request: HttpRequest) -> Response:
    body = await parse(request, bodies.ChatBody)
    chat = ChatCall(context_of(request, body.model), body)
    return json_response({"prompt": await state_of(request).workers.run(request, chat.prompt)})


async def slots(request: HttpRequest) -> Response:
    """Return the state of each slot, but never its text. Its position is shown only where steps are."""
    state = state_of(request)
    service, engine = state.loaded()
    found = await anyio.to_thread.run_sync(service.slots)
    # A client that asks often could count the tokens of each step.
    hidden = () if state.settings.shows_steps else ("n_past",)
    shown = [{name: value for name, value in slot.items() if name not in hidden} for slot in found]
    return json_response([slot | {"n_ctx": engine.n_ctx, "is_processing": slot["state"] != "idle"} for slot in shown])


ROUTES: Routes = (
    _generating("/v1/chat/completions", bodies.ChatBody, ChatCall),
    _generating("/v1/completions", bodies.CompletionBody, Completion),
    (post("/v1/embeddings"), embeddings),
    (get("/v1/models", of_server=True), list_models),
    (get("/v1/models/{name}", of_server=True), one_model),
    _generating("/completion", bodies.NativeBody, NativeCompletion),
    _generating("/infill", bodies.InfillBody, NativeCompletion),
    (post("/tokenize"), tokenize),
    (post("/detokenize"), detokenize),
    (post("/apply-template"), apply_template),
    (get("/props"), props),
    (get("/health", of_server=True), health),
    (get("/metrics"), metrics),
    _generating("/v1/responses", ResponseBody, ResponseCall),
    _generating("/v1/messages", MessagesBody, MessagesCall),
    (post("/v1/messages/count_tokens"), count_tokens),
    (post("/api/chat", streams=True), ollama_chat),
    (post("/api/generate", streams=True), ollama_generate),
    (post("/api/embed"), ollama_embed),
    (post("/api/embeddings"), ollama_embeddings),
    (get("/api/tags", of_server=True), ollama_tags),
    (get("/api/ps", of_server=True), ollama_running),
    (get("/api/version", of_server=True), ollama_version),
    (post("/api/show"), ollama_show),
    *((post(f"/api/{name}", of_server=True), not_served) for name in ("pull", "push", "create", "copy")),
    (delete("/api/delete", of_server=True), not_served),
    (get("/slots"), slots),
)
