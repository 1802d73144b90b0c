"""The routes of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.request import Request
from rest_local.llama.embedding import longest_text
from rest_local.server.answering import Generating
from rest_local.server.bodies import EmbeddingBody, GenerationBody, Message, parse
from rest_local.server.chat import Chat
from rest_local.server.errors import ApiError
from rest_local.server.ollama.answers import LINES, ChatLines, GenerateLines, loaded
from rest_local.server.ollama.bodies import (
    AnswerBody,
    EmbedBody,
    GenerateBody,
    OldEmbedBody,
    OllamaChatBody,
    ShowBody,
)
from rest_local.server.ollama.listing import rows_of, running, shown, tags, version
from rest_local.server.ollama.translation import chat_body, chat_messages, ignored, plain_body, prompt_messages
from rest_local.server.operations import Operation, Routes, delete, get, post
from rest_local.server.prompts import checked_ids, infill_tokens
from rest_local.server.requests import grammar_of, longest_prompt, request_of
from rest_local.server.state import state_of
from rest_local.server.streaming import json_response
from rest_local.server.vectors import Embedding, check_embeds, embedder


async def chat(request: HttpRequest) -> Response:
    """The next message of a conversation."""
    body, began = await parse(request, OllamaChatBody), time.perf_counter()
    if not body.messages:
        return _only_loaded(request, body, of_chat=True)
    asked, conversation = await _conversation(request, body, lambda: chat_messages(body), body.tools)
    streams = await asked.submit(request, conversation.requests)
    answer = ChatLines(asked, streams.streams, conversation.parser(), ignored(body), began)
    return await answer.respond(request, streams)


async def generate(request: HttpRequest) -> Response:
    """The continuation of a prompt: of a question in the model's template, of plain text, or of a gap."""
    body, began = await parse(request, GenerateBody), time.perf_counter()
    if not body.prompt and not body.suffix and not body.images:
        return _only_loaded(request, body, of_chat=False)
    _, engine = state_of(request).loaded()
    if body.raw or body.suffix or not engine.model.chat_template:
        return await _continued(request, body, began)
    asked, conversation = await _conversation(request, body, lambda: prompt_messages(body))
    made: list[Request] = []

    def prepare() -> list[Request]:
        made.extend(_after(each, body.context, engine) for each in conversation.requests())
        return made

    streams = await asked.submit(request, prepare)
    context = None if body.images else made[0].prompt  # images have no ids that a client could send back
    answer = GenerateLines(asked, streams.streams, conversation.parser(), ignored(body), began, context)
    return await answer.respond(request, streams)


async def _conversation(
    request: HttpRequest,
    body: AnswerBody,
    messages: Callable[[], Sequence[Message]],
    tools: Sequence[dict[str, Any]] | None = None,
) -> tuple[Generating[Any], Chat]:
    _bound(request, body)
    # In a thread, because images may have megabytes.
    translated = await anyio.to_thread.run_sync(lambda: chat_body(body, messages(), tools))
    asked = Generating.of(request, translated)
    return asked, Chat(asked)


async def _continued(request: HttpRequest, body: GenerateBody, began: float) -> Response:
    """The continuation of text that no template changes."""
    if body.images:
        raise ApiError(400, "images: they need a chat template; leave out raw and suffix", param="images")
    _bound(request, body)
    asked: Generating[GenerationBody] = Generating.of(request, plain_body(body))
    engine, made = asked.engine, []

    def prepare() -> list[Request]:
        if body.suffix:
            tokens = infill_tokens(engine, body.prompt, body.suffix, answer=max(body.options.num_predict or 0, 0))
        else:
            text = body.prompt if body.raw or not body.system else f"{body.system}\n\n{body.prompt}"
            tokens = engine.tokenize(text, most=longest_prompt(engine, asked.body))
        one = request_of(engine, asked.body, tokens, logprobs=_top(body), grammar=grammar_of(asked.body))
        made.append(_after(one, body.context, engine))
        return made

    streams = await asked.submit(request, prepare)
    context = None if body.raw or body.suffix else made[0].prompt
    answer = GenerateLines(asked, streams.streams, None, ignored(body), began, context)
    return await answer.respond(request, streams)


CONTEXTS = 10  # that an answer without a limit may fill, as in Ollama, where old text is dropped


def _bound(request: HttpRequest, body: AnswerBody) -> None:
    """Limit an answer that would otherwise go on until the model ends it. Raises ApiError 503 while the model loads."""
    if body.shift and (body.options.num_predict is None or body.options.num_predict < 0):
        _, engine = state_of(request).loaded()
        body.options.num_predict = CONTEXTS * engine.n_ctx


def _top(body: AnswerBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def _after(made: Request, context: Sequence[int] | None, engine: Any) -> Request:
    """The request with the tokens of an earlier conversation in front. Raises OptionError for an unknown id."""
    if not context:
        return made
    prompt, bos = list(made.prompt), engine.model.vocabulary.bos
    if prompt[:1] == [bos]:
        del prompt[0]
    return replace(made, prompt=[*checked_ids(engine, context), *prompt])


def _only_loaded(request: HttpRequest, body: AnswerBody, *, of_chat: bool) -> Response:
    state = state_of(request)
    state.loaded()
    return json_response(loaded(state.check_model(body.asked), of_chat=of_chat))


async def embed(request: HttpRequest) -> Response:
    """Vectors of length 1, one for each text. A text that is too long is cut, unless `truncate` is false."""
    body, began = await parse(request, EmbedBody), time.perf_counter()
    texts = [body.input] if isinstance(body.input, str) else body.input
    model, vectors, count = await _embedded(request, body.asked, texts, body.dimensions, cut=body.truncate is not False)
    found: dict[str, Any] = {"model": model, "embeddings": vectors, "load_duration": 0, "prompt_eval_count": count}
    return json_response(found | {"total_duration": round(1e9 * (time.perf_counter() - began))})


async def embeddings(request: HttpRequest) -> Response:
    """The vector of one text: Ollama's older call."""
    body = await parse(request, OldEmbedBody)
    _, vectors, _ = await _embedded(request, body.asked, [body.prompt], None, cut=True)
    return json_response({"embedding": vectors[0] if vectors else []})


async def _embedded(
    request: HttpRequest, name: str | None, texts: Sequence[str], dimensions: int | None, *, cut: bool
) -> tuple[str, list[Any], int]:
    """The name of the model, the vectors, and how many tokens the texts have. Without any text there are no vectors.
    Raises ApiError 501 if the model makes none.
    """
    state = state_of(request)
    service, engine = state.loaded()
    model = state.check_model(name)
    check_embeds(engine)
    most = longest_text(engine.model) if cut else None

    def work() -> dict[str, Any]:
        ids: list[Any] = [_cut(engine.tokenize(text), most) for text in texts]
        body = EmbeddingBody(input=ids, dimensions=dimensions)
        return Embedding(engine, body, model).answer(embedder(state, service))

    if not any(texts):
        return model, [], 0
    answer = await state.workers.run(request, work)
    return model, [entry["embedding"] for entry in answer["data"]], answer["usage"]["prompt_tokens"]


def _cut(tokens: list[int], most: int | None) -> list[int]:
    """At most so many tokens, the last one among them: it ends the text for the model."""
    return tokens if most is None or len(tokens) <= most else [*tokens[: most - 1], tokens[-1]]


async def list_models(request: HttpRequest) -> Response:
    """The models; available while they load."""
    return json_response(tags(rows_of(state_of(request))))


async def list_running(request: HttpRequest) -> Response:
    """The models in memory."""
    return json_response(running(rows_of(state_of(request))))


async def tell_version(request: HttpRequest) -> Response:
    """The version of the API."""
    return json_response(version())


async def show(request: HttpRequest) -> Response:
    """What is known of a model."""
    body = await parse(request, ShowBody)
    state = state_of(request)
    _, engine = state.loaded()
    name = state.check_model(body.asked)
    row = replace(rows_of(state)[0], name=name)
    return json_response(await anyio.to_thread.run_sync(shown, engine, row))


async def not_served(request: HttpRequest) -> Response:
    """The answer to calls that change what models there are."""
    call = request.url.path.rpartition("/")[2]
    raise ApiError(
        501,
        f"{call} is not supported: the server has the models that it was started with; get others with "
        "`rest-local pull`, and name them with -m",
        code="not_supported",
    )


def _lines(path: str, summary: str, body: type[AnswerBody]) -> Operation:
    return post(path, summary, body, streams=True, stream_media=LINES)


ROUTES: Routes = (
    (_lines("/api/chat", "Ollama's chat", OllamaChatBody), chat),
    (_lines("/api/generate", "Ollama's completion", GenerateBody), generate),
    (post("/api/embed", "Ollama's embeddings", EmbedBody), embed),
    (post("/api/embeddings", "The vector of one text", OldEmbedBody), embeddings),
    (get("/api/tags", "Ollama's list of models", of_server=True), list_models),
    (get("/api/ps", "Models in memory", of_server=True), list_running),
    (get("/api/version", "The version of Ollama's API", of_server=True), tell_version),
    (post("/api/show", "What is known of a model", ShowBody), show),
    *(
        (make(f"/api/{name}", "Not served: 501", of_server=True), not_served)
        for make, name in ((post, "pull"), (post, "push"), (post, "create"), (post, "copy"), (delete, "delete"))
    ),
)
