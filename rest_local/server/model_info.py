"""Calls about the server and its model: models, props, health, slots, metrics; and tokenizing, detokenizing, templates.

`GET /metrics` gives the engine's totals under llama-server's names, in Prometheus' text format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local import __version__
from rest_local.chat.tools import tools_of
from rest_local.llama.options import Sampling
from rest_local.paths import is_demo_model
from rest_local.server.bodies import DetokenizeBody, TemplateBody, TokenizeBody, parse
from rest_local.server.errors import ApiError, loading, no_such_model
from rest_local.server.prompts import chat_text, checked_ids, prompt_text, special_text, template_of
from rest_local.server.requests import TEMPERATURE
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.service import Service
    from rest_local.llama.model import Model


_SAMPLING = Sampling()


async def models(request: HttpRequest) -> Response:
    """The names of the model; available while it loads."""
    state = state_of(request)
    return json_response(list_of([_model(state, name) for name in state.names]))


async def model(request: HttpRequest) -> Response:
    """One name of the model. Any other name is 404."""
    state, name = state_of(request), request.path_params["name"]
    if name not in state.names:
        raise no_such_model()
    return json_response(_model(state, name))


def _model(state: State, name: str) -> dict[str, Any]:
    fields = named_row(name, state.started)
    if state.engine is not None:
        fields["meta"] = meta(state.engine)
    return fields


def named_row(name: str, started: int) -> dict[str, Any]:
    """A name of a model in OpenAI's form and Anthropic's. `started`: when the server was, in seconds since 1970."""
    since = datetime.fromtimestamp(started, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    openai = {"id": name, "object": "model", "created": started, "owned_by": "rest-local"}
    return openai | {"type": "model", "display_name": name, "created_at": since}


def list_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The list of models, in both forms; all of them on one page."""
    ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {}
    return {"object": "list", "data": rows, "has_more": False, **ends}


def meta(engine: Engine) -> dict[str, Any]:
    """What lists of models say of one that is loaded: llama-server's fields, and those that Ollama's lists need."""
    model = engine.model
    return {
        "vocab_type": model.vocabulary.type,
        "n_vocab": model.n_vocab,
        "n_ctx": engine.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size_bytes,
        "size_vram": _on_gpu(model),
        "architecture": model.metadata.get("general.architecture", ""),
        "quantization": quantization(model.description),
    }


def _on_gpu(model: Model) -> int:
    """Bytes of the layers on a GPU, as if all layers had one size."""
    layers = model.n_layer + 1
    share = layers if model.n_gpu_layers < 0 else min(model.n_gpu_layers, layers)
    return model.size_bytes * share // layers


_SIZES = {"Small": "S", "Medium": "M", "Large": "L"}


def quantization(description: str) -> str:
    """Such as Q4_K_M, of llama.cpp's description of a model: `qwen2 7B Q4_K - Medium`."""
    found = re.search(r"\b(I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4)(?: - (Small|Medium|Large))?", description)
    return "" if found is None else "_".join(filter(None, (found[1], _SIZES.get(found[2] or ""))))


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
                    "seed": -1,
                },
            },
            "total_slots": slots,
            "model_alias": state.model_id,
            "model_path": of_model.path.name,
            "chat_template": of_model.chat_template or "",
            "chat_template_caps": caps,
            "is_demo": is_demo_model(of_model.path),  # no model to converse with, in spite of its template
            "modalities": {"vision": engine.projector is not None, "audio": False},
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


_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens evaluated."),
    "prompt_tokens_cached": ("cached_tokens", "Prompt tokens that were in memory."),
    "prompt_seconds": (
        "prompt_seconds",
        "Time to evaluate prompts; a pass shared by several requests is divided by tokens.",
    ),
    "tokens_predicted": ("predicted_tokens", "Tokens generated."),
    "tokens_predicted_seconds": ("predicted_seconds", "Time to generate tokens, divided likewise."),
    "n_decode": ("passes", "Calls of llama_decode that generated tokens."),
    "spec_decode_num_drafts": ("drafts", "Drafts submitted."),
    "spec_decode_num_draft_tokens": ("drafted", "Drafted tokens submitted."),
    "spec_decode_num_accepted_tokens": ("accepted", "Drafted tokens that the model accepted."),
    "spec_decode_num_lookups": ("lookups", "Steps with a lookup of draft tokens."),
    "spec_decode_num_lookups_skipped": ("lookups_skipped", "Steps in which the policy skipped the lookup."),
}
_GAUGES = {
    "requests_processing": ("running", "Requests that are running."),
    "requests_deferred": ("waiting", "Requests that wait for a slot."),
    "kv_cache_tokens": ("cells_used", "KV cache cells in use."),
}
_RATIOS = {
    "prompt_tokens_seconds": ("prompt_tokens", "prompt_seconds", "Prompt tokens per second so far."),
    "predicted_tokens_seconds": ("predicted_tokens", "predicted_seconds", "Generated tokens per second so far."),
    "n_busy_slots_per_decode": ("steps", "passes", "Requests in a call of llama_decode, on average."),
}
_OPEN = (  # the others are of steps, or tell how much of the prompts was in memory
    *("tokens_predicted", "tokens_predicted_seconds", "predicted_tokens_seconds"),
    *("requests_processing", "requests_deferred"),
)


def exposition(service: Service, shows_steps: bool) -> str:
    """The metrics in Prometheus' text format. `shows_steps`: all of them."""
    found = service.statistics() | {"cells_used": sum(slot["n_past"] for slot in service.slots())}
    rows = [(name, "_total", "counter", found[key], text) for name, (key, text) in _COUNTERS.items()]
    rows += [(name, "", "gauge", found[key], text) for name, (key, text) in _GAUGES.items()]
    # Of this name and type in llama-server, although it is the largest and not a sum.
    rows.append(("n_tokens_max", "", "counter", found["longest"], "Tokens of the longest prompt with its answer."))
    for name, (count, by, text) in _RATIOS.items():
        rows.append((name, "", "gauge", found[count] / found[by] if found[by] else 0.0, text))
    lines = []
    for name, ending, kind, value, text in rows:
        if shows_steps or name in _OPEN:
            full = f"llamacpp:{name}{ending}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {float(value)}"]
    return "\n".join(lines) + "\n"


async def metrics(request: HttpRequest) -> Response:
    """The metrics, if the server was started with --metrics."""
    state = state_of(request)
    if not state.settings.metrics:
        raise ApiError(501, "start the server with --metrics", code="metrics_off")
    service, _ = state.loaded()
    text = await anyio.to_thread.run_sync(exposition, service, state.settings.shows_steps)
    headers = {
        "content-type": "text/plain; version=0.0.4; charset=utf-8",
        "process-start-time-unix": str(state.started),
    }
    return Response(text, headers=headers)
