"""GET /slots, and POST /slots/ID?action=save|restore|erase, as llama-server has it.

A file has a plain name, never a path.

Other machines may not act on slots: how much a slot holds tells what another client has sent, and so does restoring it.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api.bodies import SlotBody
from rest_local.api.errors import ApiError
from rest_local.errors import RestLocalError
from rest_local.kv_cache.saved import NamedSlots
from rest_local.server.answering import parse
from rest_local.server.keys import owner_of
from rest_local.server.operations import Routes, get, post
from rest_local.server.state import State, state_of
from rest_local.server.streaming import json_response

log = logging.getLogger("rest_local.server")
T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


async def list_all(request: HttpRequest) -> Response:
    """The state of each slot, never its text; how far it is only where steps are shown."""
    state = state_of(request)
    service, engine = state.loaded()
    found = await anyio.to_thread.run_sync(service.slots)
    hidden = () if state.settings.shows_steps else ("n_past",)  # frequent requests would reveal the tokens of each step
    shown = [{name: value for name, value in slot.items() if name not in hidden} for slot in found]
    return json_response([slot | {"n_ctx": engine.n_ctx, "is_processing": slot["state"] != "idle"} for slot in shown])


async def act(request: HttpRequest) -> Response:
    """Save, restore or erase a slot."""
    state, number = state_of(request), request.path_params["id"]
    action = request.query_params.get("action", "")
    found = _ACTIONS.get(action)
    if found is None:
        raise ApiError(400, "action: give save, restore or erase", code="invalid_value", param="action")
    if not number.isascii() or not number.isdigit() or len(number) > 6:
        raise ApiError(400, "id_slot: give the number of a slot", code="invalid_value", param="id_slot")
    if not state.settings.shows_steps:
        raise ApiError(403, "slots are not shown to other machines; see --share-statistics", code="withheld")
    body = await parse(request, SlotBody)
    if action != "erase" and body.filename is None:
        raise ApiError(400, "filename: Field required", code="missing", param="filename")
    files = _files(state, owner_of(request.headers, state.settings))

    def work() -> dict[str, Any]:
        begun = time.perf_counter()
        fields = found(files, int(number), body.filename or "")
        milliseconds = round(1e3 * (time.perf_counter() - begun), 3)
        timings = {} if action == "erase" else {"timings": {f"{action}_ms": milliseconds}}
        return {"id_slot": int(number)} | fields | timings

    try:
        return json_response(await state.workers.run(request, work))
    except FileNotFoundError as error:
        raise ApiError(404, "no slot was saved under this name", code="not_found", param="filename") from error
    except OSError as error:
        cause = error.strerror or str(error)
        log.warning("slot %s: %s: %s", number, action, cause)
        status, code = (507, "disk_full") if error.errno in _FULL else (500, "failed")
        raise ApiError(status, f"the slot could not be {action}d: {cause}", code=code) from error


def _files(state: State, user: str) -> NamedSlots:
    service, engine = state.loaded()

    def run(call: Callable[[], T], /) -> T:
        return service.run(lambda engine: call())

    if (files := engine.context.named_slots(run, user)) is None:
        raise ApiError(501, "start the server with --sessions SIZE", code="sessions_off")
    return files


def _save(files: NamedSlots, number: int, name: str) -> dict[str, Any]:
    moved = files.save(number, name)
    return {"filename": name, "n_saved": moved.tokens, "n_written": moved.size}


def _restore(files: NamedSlots, number: int, name: str) -> dict[str, Any]:
    try:
        moved = files.restore(number, name)
    except RestLocalError as error:
        log.warning("slot %d: %s", number, error)
        raise
    return {"filename": name, "n_restored": moved.tokens, "n_read": moved.size}


def _erase(files: NamedSlots, number: int, name: str) -> dict[str, Any]:
    return {"n_erased": files.erase(number)}


_ACTIONS: dict[str, Callable[[NamedSlots, int, str], dict[str, Any]]] = {
    "save": _save,
    "restore": _restore,
    "erase": _erase,
}

ROUTES: Routes = (
    (get("/slots", "State of the slots"), list_all),
    (post("/slots/{id}", "Save, restore or erase a slot (?action=)", SlotBody), act),
)
