"""One HTTP request that generates: read its body, make the engine's requests, send the answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api.answers import QUIET_SECONDS, Answer, Call, RequestContext
from rest_local.api.bodies import Checked, check
from rest_local.api.errors import ApiError
from rest_local.api.requests import check_generates
from rest_local.server.state import state_of
from rest_local.server.streaming import EventStream, Pulse, StreamGroup, json_response

if TYPE_CHECKING:
    from rest_local.decoding.request import Request
    from rest_local.decoding.streaming import Stream

LOG = "rest_local.log"
OWNER = "rest_local.owner"  # the scope of a request has its owner here (`server.settings.owner_of`)
SLOW_BODY_SECONDS = 60.0


async def parse(request: HttpRequest, kind: type[Checked]) -> Checked:
    """Return the body of a request. Raises ApiError 400, 408 (the client stopped sending), 413."""
    data = await read(request)
    return check(data, kind) if len(data) < 1 << 14 else await anyio.to_thread.run_sync(check, data, kind)


async def read(request: HttpRequest) -> bytes:
    """Return the bytes of a request's body. Raises ApiError 400, 408 (the client stopped sending), 413."""
    try:
        with anyio.fail_after(SLOW_BODY_SECONDS):
            return await request.body()
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client disconnected before its request was complete") from error


def context_of(request: HttpRequest, model: str | None) -> RequestContext:
    """Return the context of answers by `model`.

    Raises ApiError 503 while the model loads, 404 for an unknown one, and CannotGenerate.
    """
    state = state_of(request)
    _, engine = state.loaded()
    check_generates(engine)
    model, fingerprint = state.check_model(model), f"rest-local-{state.started}"
    return RequestContext(engine, model, state.settings.shows_steps, fingerprint, request.scope[OWNER])


async def generate(request: HttpRequest, call: Call) -> Response:
    """Respond to a call. Raises what `submit` raises."""
    streams = await submit(request, call.requests)
    return await respond(request, call.answer(streams.streams), streams)


async def submit(request: HttpRequest, prepare: Callable[[], Sequence[Request]]) -> StreamGroup:
    """Make the engine's requests and submit all of them or none.

    `prepare` runs in a worker thread, because templates, tokenizing and grammars take time and other requests have to
    go on. Raises what `prepare` and `Service.submit_all` raise, and ServiceClosed if the client disconnects or the
    server stops.
    """
    state = state_of(request)
    service, _ = state.loaded()
    pulse, entries, owner = Pulse(), 1, request.scope[OWNER]
    client = owner or str(request.client)

    def work() -> list[Stream]:
        nonlocal entries
        made = [replace(each, owner=owner, client=client) for each in prepare()]
        entries = max((1 + (each.logprobs or 0) for each in made), default=1)
        return service.submit_all(made, pulse)

    streams = await state.workers.run(request, work)
    return StreamGroup(streams, pulse, entries)


async def respond(request: HttpRequest, answer: Answer[Any], streams: StreamGroup) -> Response:
    """Return the response. The streams of the answer run until it is sent or the client disconnects."""
    request.scope[LOG] = answer.counts  # `AccessLog` calls it when the request ends in any way
    if answer.body.stream:
        streams.bound()
        return EventStream(streams, _events(request, answer, streams), answer.MEDIA_TYPE, answer.error_event)
    async with streams.attended(request.receive):
        async for news in streams.pieces(meanwhile=any(choice.can_end for choice in answer.choices)):
            for number, pieces in news:
                answer.add(number, pieces)
                if answer.choices[number].ended and pieces is not None:
                    streams.stop(number)
    return await anyio.to_thread.run_sync(lambda: json_response(answer.whole()))


async def _events(request: HttpRequest, answer: Answer[Any], streams: StreamGroup) -> AsyncIterator[bytes]:
    """Yield the events of a stream. Those of one moment are sent together, unless the protocol sends them apart."""
    if begin := answer.begin():
        yield b"".join(begin)
    sent = time.monotonic()
    async for news in streams.pieces(every=QUIET_SECONDS):
        events: list[bytes] = []
        for number, pieces in news:
            events += answer.events(number, pieces, streams.streams[number].timings if answer.sends_timings else None)
            if answer.choices[number].ended and pieces is not None:
                streams.stop(number)
        if not answer.remaining:
            # A thread counts the tokens of the reasoning, while the loop goes on.
            events += await anyio.to_thread.run_sync(answer.end)
        if not events and time.monotonic() - sent >= QUIET_SECONDS:
            events = answer.quiet()
        for data in events if answer.SENDS_APART or not events else [b"".join(events)]:
            yield data
            sent = time.monotonic()
