"""The calls of `/v1/files` and `/v1/batches`, in OpenAI's shapes."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, BinaryIO, TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from rest_local.router.batch_bodies import BatchBody, ExpiresAfter, Form
from rest_local.router.batches import Batches
from rest_local.router.files import Limits, StoredFile, disk_error, owner_of
from rest_local.server.bodies import SLOW_BODY_SECONDS, parse
from rest_local.server.errors import ApiError
from rest_local.server.operations import Routes, delete, get, post
from rest_local.server.security import given_keys
from rest_local.server.streaming import json_response

FILES_PATH = "/v1/files"
FORM_BYTES = 64 << 10  # of an upload in addition to its file
_CHUNK = 1 << 18
T = TypeVar("T")


def upload_limits(limits: Limits) -> dict[str, int]:
    """What `Guard` needs: the paths that take forms, and their limits in bytes."""
    return {FILES_PATH: limits.file_bytes + FORM_BYTES}


def batches_of(request: HttpRequest) -> Batches:
    """The files and batches of the server: `app.state.batches`."""
    batches: Batches = request.app.state.batches
    return batches


def _owner(request: HttpRequest) -> str:
    """The owner that the request's key stands for. `Guard` has checked that it has a key."""
    given = given_keys(request.headers)
    keys = batches_of(request).keys
    return owner_of(next((key for key in keys for one in given if hmac.compare_digest(key, one)), None))


async def upload_file(request: HttpRequest) -> Response:
    """Keep a file. It is written as it arrives."""
    files = batches_of(request).files
    with files.upload() as upload:
        form = Form(request.headers.get("content-type", ""), upload.write)
        await _receive(request, form, upload.reserve)
        seconds = _checked(form.fields)
        await anyio.to_thread.run_sync(upload.complete)
        try:
            file = await files.add(upload.id, _owner(request), form.filename or "file", upload.bytes, "batch", seconds)
        except OSError as error:
            raise disk_error(error) from error
    return json_response(file.to_dict())


async def _receive(request: HttpRequest, form: Form, reserve: Callable[[int], None]) -> None:
    """Feed the body to the form. Raises ApiError."""
    chunks = request.stream().__aiter__()
    try:
        while True:
            with anyio.fail_after(SLOW_BODY_SECONDS):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            if chunk:
                reserve(len(chunk))
                await anyio.to_thread.run_sync(form.feed, chunk)
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client disconnected before its request was complete") from error
    form.finish()


def _checked(fields: dict[str, str]) -> int | None:
    """The seconds that a file is kept, None for the server's own. Raises ApiError for wrong fields of a form."""
    if fields.get("purpose") != "batch":
        raise ApiError(400, "purpose: give `batch`", code="invalid_value", param="purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    try:
        number = int(seconds or "")
    except ValueError as error:
        message = "expires_after[seconds]: give a whole number"
        raise ApiError(400, message, code="invalid_value", param="expires_after") from error
    try:
        return ExpiresAfter.model_validate({"anchor": anchor, "seconds": number}).seconds
    except ValueError as error:
        message = "expires_after: give the anchor `created_at`, and 3600 to 2592000 seconds"
        raise ApiError(400, message, code="invalid_value", param="expires_after") from error


async def list_files(request: HttpRequest) -> Response:
    """The files of this key, the newest first unless `order` is `asc`."""
    found = batches_of(request).files.of(_owner(request))
    if (purpose := request.query_params.get("purpose")) is not None:
        found = [file for file in found if file.purpose == purpose]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order: give asc or desc", code="invalid_value", param="order")
    ordered = found if order == "asc" else found[::-1]
    return _page(request, ordered, lambda file: file.id, StoredFile.to_dict, 10_000, 10_000)


async def file_info(request: HttpRequest) -> Response:
    """What is known of a file."""
    return json_response(_file(request).to_dict())


def _file(request: HttpRequest) -> StoredFile:
    return batches_of(request).files.get(_owner(request), request.path_params["file_id"])


async def file_content(request: HttpRequest) -> Response:
    """The bytes of a file. No browser takes them for a page."""
    file = _file(request)
    path = batches_of(request).files.content(file.id)
    try:
        content = await anyio.to_thread.run_sync(lambda: path.open("rb"))
    except OSError as error:
        raise disk_error(error) from error
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_chunks(content), headers=headers, media_type="application/octet-stream")


async def _chunks(content: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while data := await anyio.to_thread.run_sync(content.read, _CHUNK):
            yield data
    finally:
        content.close()


async def delete_file(request: HttpRequest) -> Response:
    """Remove a file, unless a batch needs it."""
    file, batches = _file(request), batches_of(request)
    if (batch := batches.user_of(file.id)) is not None:
        message = f"the file is the input of {batch.id}, which is not done; cancel that first"
        raise ApiError(409, message, code="file_in_use", param="file_id")
    try:
        await batches.files.delete(file)
    except OSError as error:
        raise disk_error(error) from error
    return json_response({"id": file.id, "object": "file", "deleted": True})


async def create_batch(request: HttpRequest) -> Response:
    """Make a batch of an uploaded file."""
    body = await parse(request, BatchBody)
    return json_response((await batches_of(request).create(_owner(request), body)).to_dict())


async def list_batches(request: HttpRequest) -> Response:
    """The batches of this key, the newest first."""
    found = batches_of(request).of(_owner(request))
    return _page(request, found[::-1], lambda batch: batch.id, lambda batch: batch.to_dict(), 20, 100)


async def batch_info(request: HttpRequest) -> Response:
    """One batch."""
    batch = batches_of(request).get(_owner(request), request.path_params["batch_id"])
    return json_response(batch.to_dict())


async def cancel_batch(request: HttpRequest) -> Response:
    """Cancel a batch; what was answered is in its output."""
    batches = batches_of(request)
    batch = batches.get(_owner(request), request.path_params["batch_id"])
    await batches.cancel(batch)
    return json_response(batch.to_dict())


def _page(
    request: HttpRequest,
    found: Sequence[T],
    id_of: Callable[[T], str],
    shown: Callable[[T], dict[str, Any]],
    limit: int,
    most: int,
) -> Response:
    """A page of a list: at most `limit` items after the one that the client names."""
    query = request.query_params
    if "limit" in query:
        if not query["limit"].isdecimal() or len(query["limit"]) > 9 or not 1 <= int(query["limit"]) <= most:
            raise ApiError(400, f"limit: give a number from 1 to {most}", code="invalid_value", param="limit")
        limit = int(query["limit"])
    if "after" in query:
        place = next((number for number, each in enumerate(found) if id_of(each) == query["after"]), None)
        if place is None:
            raise ApiError(400, "after: no such item in the list", code="invalid_value", param="after")
        found = found[place + 1 :]
    data = [shown(each) for each in found[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return json_response({"object": "list", "data": data, **ends, "has_more": len(found) > limit})


ROUTES: Routes = (
    (post(FILES_PATH, "Keep a file for batches", form=True, of_server=True), upload_file),
    (get(FILES_PATH, "List files", of_server=True), list_files),
    (get("/v1/files/{file_id}", "One file", of_server=True), file_info),
    (get("/v1/files/{file_id}/content", "Its bytes", media="application/octet-stream", of_server=True), file_content),
    (delete("/v1/files/{file_id}", "Delete a file", of_server=True), delete_file),
    (post("/v1/batches", "Run the requests of a file when there is time", BatchBody, of_server=True), create_batch),
    (get("/v1/batches", "List batches", of_server=True), list_batches),
    (get("/v1/batches/{batch_id}", "One batch", of_server=True), batch_info),
    (post("/v1/batches/{batch_id}/cancel", "Cancel a batch", of_server=True), cancel_batch),
)
