"""The calls of the Responses API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.request import Request
from rest_local.errors import OptionError
from rest_local.server.answering import Generating
from rest_local.server.bodies import parse
from rest_local.server.chat import Chat
from rest_local.server.errors import ApiError
from rest_local.server.operations import Routes, delete, get, post
from rest_local.server.responses.answer import ResponseAnswer
from rest_local.server.responses.bodies import ResponseBody
from rest_local.server.responses.fields import bad
from rest_local.server.responses.store import Kept, Store, items_of, owner_of
from rest_local.server.responses.turn import Turn
from rest_local.server.security import given_keys
from rest_local.server.state import state_of
from rest_local.server.streaming import json_response

MAX_LISTED = 100
T = TypeVar("T")


async def create(request: HttpRequest) -> Response:
    """A response, streamed or whole."""
    turn = await _turn(request)
    asked = Generating.of(request, turn.chat)
    chat = Chat(asked)
    streams = await asked.submit(request, lambda: _requests(chat, turn))
    answer = ResponseAnswer(asked, streams.streams, chat.parser(), turn, state_of(request).responses.keep)
    return await answer.respond(request, streams)


async def input_tokens(request: HttpRequest) -> Response:
    """How many tokens a request would give the model. Nothing is generated or kept."""
    turn = await _turn(request)
    chat = Chat(Generating.of(request, turn.chat))
    made = await state_of(request).workers.run(request, lambda: _requests(chat, turn))
    return json_response({"object": "response.input_tokens", "input_tokens": len(made[0].prompt)})


async def _turn(request: HttpRequest) -> Turn:
    """The request, translated. Raises ApiError."""
    body = await parse(request, ResponseBody)
    state = state_of(request)
    state.loaded()  # a server that is loading says so before it reads files
    state.check_model(body.model)
    store, owner = state.responses, _owner(request)

    def translated() -> Turn:
        store.sweep()
        return Turn.of(body, store, owner)

    return await state.workers.run(request, translated)


def _requests(chat: Chat, turn: Turn) -> list[Request]:
    try:
        return chat.requests()
    except OptionError as error:
        raise turn.told(error) from error


async def retrieve(request: HttpRequest) -> Response:
    """A kept response."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise bad("stream", "events of a kept response are not kept")
    return json_response((await _kept(request)).response)


async def remove(request: HttpRequest) -> Response:
    """Forget a kept response."""
    kept = await _kept(request)
    await _in_thread(lambda: _store(request).remove(kept.id))
    return json_response({"id": kept.id, "object": "response", "deleted": True})


async def input_items(request: HttpRequest) -> Response:
    """What a kept response was asked: the items before it and its own, the newest first."""
    kept = await _kept(request)
    store, owner = _store(request), kept.owner
    before = await _in_thread(lambda: store.conversation(kept.previous, owner) if kept.previous else [])
    items = [*items_of(before or []), *kept.added]
    return json_response(_listed(request, items))


def _listed(request: HttpRequest, items: list[dict[str, Any]]) -> dict[str, Any]:
    """One page of items. Raises ApiError 400 for a parameter that is wrong."""
    asked = request.query_params
    limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_LISTED):
        raise bad("limit", f"give a number from 1 to {MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise bad("order", 'give "asc" or "desc"')
    ordered = items if order == "asc" else items[::-1]
    if after:
        place = next((number for number, item in enumerate(ordered) if item.get("id") == after), None)
        if place is None:
            raise bad("after", "no item has this id")
        ordered = ordered[place + 1 :]
    page = [_complete(item) for item in ordered[: int(limit)]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(ordered) > len(page)}


def _complete(item: dict[str, Any]) -> dict[str, Any]:
    """An item with its status, and the text of a message as a part."""
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        item = item | {"content": [{"type": kind, "text": item["content"]} | more]}
    return {"status": "completed"} | item


async def _kept(request: HttpRequest) -> Kept:
    """The response that the path names. Raises ApiError 404."""
    wanted, owner = str(request.path_params["id"]), _owner(request)
    store = _store(request)
    kept = await _in_thread(lambda: store.get(wanted, owner))
    if kept is None:
        raise ApiError(404, f"no response {wanted[:80]!r} is kept", code="response_not_found", param="id")
    return kept


def _store(request: HttpRequest) -> Store:
    """The store of the server of one model, or of the process in front of several."""
    store: Store = request.app.state.server.responses
    return store


def _owner(request: HttpRequest) -> str:
    """What tells this client's responses from those of other keys; the same for all where the server has no keys."""
    keys: tuple[bytes, ...] = request.app.state.server.settings.keys
    return owner_of(set(keys).intersection(given_keys(request.headers)))


async def _in_thread(call: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(call)


ROUTES: Routes = (
    (post("/v1/responses", "Make a response", ResponseBody, streams=True), create),
    (post("/v1/responses/input_tokens", "Count the tokens of a request", ResponseBody), input_tokens),
    (get("/v1/responses/{id}", "A kept response", of_server=True), retrieve),
    (delete("/v1/responses/{id}", "Forget a response", of_server=True), remove),
    (get("/v1/responses/{id}/input_items", "What a response was asked", of_server=True), input_items),
)
