"""Calls about the server and its model: models, props, health, slots; and tokenizing, detokenizing, templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local import __version__
from rest_local.chat.tools import tools_of
from rest_local.llama.sampling import Sampling
from rest_local.server.bodies import DetokenizeBody, TemplateBody, TokenizeBody
from rest_local.server.errors import ApiError, loading
from rest_local.server.parsing import parse
from rest_local.server.prompts import chat_text, checked_ids, prompt_text, special_text, template_of
from rest_local.server.requests import TEMPERATURE
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response

_SAMPLING = Sampling()

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


async def models(request: HttpRequest) -> Response:
    """The names of the model; available while it loads."""
    state = state_of(request)
    return json_response({"object": "list", "data": [_model(state, name) for name in state.names]})


async def model(request: HttpRequest) -> Response:
    """One name of the model. Any other name is 404."""
    state, name = state_of(request), request.path_params["name"]
    if name not in state.names:
        raise ApiError(404, "no such model; GET /v1/models lists the names", code="model_not_found", param="model")
    return json_response(_model(state, name))


def _model(state: State, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": name, "object": "model", "created": state.started, "owned_by": "rest-local"}
    if state.engine is not None:
        of_model = state.engine.model
        fields["meta"] = {
            "vocab_type": of_model.vocabulary.type,
            "n_vocab": of_model.n_vocab,
            "n_ctx": state.engine.n_ctx,
            "n_ctx_train": of_model.n_ctx_train,
            "n_embd": of_model.n_embd,
            "n_params": of_model.n_params,
            "size": of_model.size_bytes,
        }
    return fields


async def health(request: HttpRequest) -> Response:
    """503 while the model loads."""
    if state_of(request).service is None:
        raise loading()
    return json_response({"status": "ok"})


async def props(request: HttpRequest) -> Response:
    """The context size, the template and its capabilities, which Zed and llama.vscode read."""
    state = state_of(request)
    service, engine = state.loaded()
    of_model, vocabulary = engine.model, engine.model.vocabulary
    caps = await anyio.to_thread.run_sync(_template_caps, engine)
    slots = len(await anyio.to_thread.run_sync(service.slots))
    return json_response(
        {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": engine.n_ctx,
                "params": {
                    "temperature": TEMPERATURE,
                    **{name: getattr(_SAMPLING, name) for name in ("top_k", "top_p", "min_p")},
                    "n_predict": -1,
                },
            },
            "total_slots": slots,
            "model_alias": state.model_id,
            "model_path": of_model.path.name,
            "chat_template": of_model.chat_template or "",
            "chat_template_caps": caps,
            "modalities": {"vision": False, "audio": False},
            "bos_token": special_text(vocabulary, vocabulary.bos) or "",
            "eos_token": special_text(vocabulary, vocabulary.eos) or "",
            "build_info": f"rest-local {__version__}",
        }
    )


def _template_caps(engine: Engine) -> dict[str, bool]:
    return template_of(engine).capabilities.to_dict() if engine.model.chat_template else {}


async def slots(request: HttpRequest) -> Response:
    """The state of each slot, never its text; how far it is only where steps are shown."""
    state = state_of(request)
    service, engine = state.loaded()
    found = await anyio.to_thread.run_sync(service.slots)
    hidden = () if state.settings.shows_steps else ("n_past",)  # frequent requests would reveal the tokens of each step
    shown = [{name: value for name, value in slot.items() if name not in hidden} for slot in found]
    return json_response([slot | {"n_ctx": engine.n_ctx, "is_processing": slot["state"] != "idle"} for slot in shown])


async def tokenize(request: HttpRequest) -> Response:
    """Text to token ids."""
    body = await parse(request, TokenizeBody)
    state = state_of(request)
    _, engine = state.loaded()
    vocabulary = engine.model.vocabulary

    def work() -> list[Any]:
        special, add = body.parse_special is not False, bool(body.add_special)
        tokens: list[int] = vocabulary.tokenize(body.content, special=special, add_special=add).tolist()
        if not body.with_pieces:
            return tokens
        return [{"id": token, "piece": _piece(vocabulary.piece(token))} for token in tokens]

    return json_response({"tokens": await state.workers.run(request, work)})


def _piece(piece: bytes) -> str | list[int]:
    """The text of a token, or its bytes if they are part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: HttpRequest) -> Response:
    """Token ids to text."""
    body = await parse(request, DetokenizeBody)
    _, engine = state_of(request).loaded()
    tokens = checked_ids(engine, body.tokens)
    text = await anyio.to_thread.run_sync(prompt_text, engine.model.vocabulary, tokens)
    return json_response({"content": text})


async def apply_template(request: HttpRequest) -> Response:
    """The prompt of a conversation, as text."""
    body = await parse(request, TemplateBody)
    state = state_of(request)
    _, engine = state.loaded()

    def work() -> str:
        add = body.add_generation_prompt is not False
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        return chat_text(engine, messages, tools_of(body.tools), body.chat_template_kwargs, add)

    return json_response({"prompt": await state.workers.run(request, work)})
