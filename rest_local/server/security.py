"""Checks on every request before its body is read: origin, key, type and size.

Three layers of plain ASGI middleware:

- `Drained` closes a connection only when the client has sent its body, or enough of it: a socket that is closed with
  unread bytes resets the connection, and the client may not see the answer.
- `AccessMiddleware` checks the size of the head and where a request comes from: its Host (a page that rebinds a DNS
  name to this machine sends that name) and its Origin (a page of another site).
- `BodyMiddleware` checks the key, and the type and size of the body.

All calls are HTTP: the server (`http.HttpServer`) serves no web sockets, and sends applications no lifespan events.

The CORS middleware is between them, because a preflight request has no key. Forwarded headers are ignored.

`AccessLog` writes a line for each request to the logger `rest_local.server`: JSON, or at a terminal a short one. It
never writes a prompt, an answer or a key. What a client can choose (method, path) is cut and escaped, so that it cannot
contain line breaks or terminal codes. Query strings are left out.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from datetime import datetime, timezone
from typing import Any

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rest_local.api.errors import ApiError
from rest_local.server.answering import LOG, OWNER
from rest_local.server.settings import NOBODY, ServerSettings, owner_of
from rest_local.server.streaming import CONNECTION, ClientConnection, response_of

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
OPEN = ("/health", "/v1/health")
_DEFAULT_TYPES = ("", "text/plain", "application/x-www-form-urlencoded")  # fetch and curl send these by default
MAX_HEAD = 1 << 16  # bytes of a request's line and headers
OWN_HEAD = 1 << 10  # reserved for the headers that the router adds
DRAINED_BYTES = 64 << 20
DRAINED_SECONDS = 30.0
SILENT_SECONDS = 2.0  # a client that sends nothing for so long gets no more time


class Drained:
    """Sends an answer that ends the connection at once, but reads on before closing it.

    It reads at most DRAINED_BYTES, for at most DRAINED_SECONDS.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        closes = "close" in headers.get("connection", "").lower()
        unread = "expect" not in headers  # a client that expects 100 sends no body after another answer

        async def reading() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body", False))
            return message

        async def sending(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = closes or Headers(raw=message.get("headers", [])).get("connection") == "close"
            elif closes and unread and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await drain()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        async def drain() -> None:
            left = DRAINED_BYTES
            with anyio.move_on_after(DRAINED_SECONDS):
                while unread and left > 0:
                    with anyio.move_on_after(SILENT_SECONDS) as silent:
                        left -= len((await reading()).get("body", b""))
                    if silent.cancelled_caught:
                        return

        await self._app(scope, reading, sending)


class AccessMiddleware:
    """Refuses heads that are too large, hosts that are not allowed, and pages of other origins."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._hosts = frozenset(name.lower() for name in (*LOCAL_NAMES, *settings.hosts, *settings.allowed_hosts))
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        error = _large_head(scope) or self._wrong(headers, scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await response_of(error, scope["path"])(scope, receive, send)

    def _wrong(self, headers: Headers, scope: Scope) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        name = host_name(host)
        here = (scope.get("server") or ("", 0))[0]  # a DNS name cannot have been rebound to this address
        if name not in self._hosts and name != here:
            return ApiError(403, "the Host header names another server; see --allow-host", code="host_not_allowed")
        if origin is None:
            # A browser gets an image, a script or a link for a page without naming the page's origin. The page cannot
            # read the answer, but the call would load a model.
            is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            if not is_foreign or scope["path"] in ("/", *OPEN):
                return None
            return ApiError(403, "pages of other sites may not call this", code="origin_not_allowed")
        if origin.lower() in self._origins or _same_origin(origin, host):
            return None
        return ApiError(403, "pages of this origin may not call; see --allow-origin", code="origin_not_allowed")


def _large_head(scope: Scope) -> ApiError | None:
    """Refuse a large head, because the parser limits only heads that arrive in several parts."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"])
    most = MAX_HEAD - OWN_HEAD
    if size <= most:
        return None
    return _closing_error(431, f"the head of the request is larger than {most} bytes", "head_too_large")


SECRET, CLIENT = "x-rest-local-secret", "x-rest-local-client"
FORWARDED = "rest_local.forwarded"  # the scope has this if another process answers the request, and logs it


class Inner:
    """Admits only the router to the process of one model.

    The router knows the `secret`, has checked where a request comes from, and names the client's address and port.
    """

    def __init__(self, app: ASGIApp, secret: bytes) -> None:
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if hmac.compare_digest(headers.get(SECRET, "").encode("latin-1"), self._secret):
            address, _, port = headers.get(CLIENT, "?:0").rpartition(":")
            scope["client"] = (address, int(port))
            await self._app(scope, receive, send)
        else:
            error = _closing_error(403, "only the server itself may use this port", "internal")
            await response_of(error)(scope, receive, send)


class BodyMiddleware:
    """Requires the key on every route except /health, and limits the body."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings, self._max_body = app, settings, settings.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scope[OWNER] = owner_of(headers, self._settings)
        error = self._wrong(scope, headers)
        if error is not None:
            await response_of(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _wrong(self, scope: Scope, headers: Headers) -> ApiError | None:
        if scope[OWNER] == NOBODY and scope["path"] not in OPEN:
            scheme = 'Basic realm="rest-local: the key is the password"' if _is_page(scope["path"]) else "Bearer"
            message = "give the server's API key as `Authorization: Bearer KEY`"
            return _closing_error(401, message, "invalid_api_key", {"www-authenticate": scheme})
        if headers.get("content-encoding", "identity").lower() != "identity":
            return _closing_error(415, "compressed bodies are not supported", "unsupported_encoding")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            # Clients of Ollama name no type. A page of any site could send these without asking the server, but the
            # browser names its origin or the kind of its site, which `AccessMiddleware` has checked.
            unnamed = scope["path"].startswith("/api/") and kind in _DEFAULT_TYPES
            if kind != "application/json" and not unnamed:
                return _closing_error(415, "send the body as application/json", "unsupported_media_type")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self._max_body:
            return _too_large(self._max_body)
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Limit a body in chunks, whose length is not known in advance."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise _too_large(self._max_body)
            return message

        return bounded


def _is_page(path: str) -> bool:
    return path == "/" or path.startswith("/page/")


def _too_large(most: int) -> ApiError:
    return _closing_error(413, f"the body is larger than {most} bytes", "body_too_large")


def _closing_error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> ApiError:
    """Make an error that closes the connection: the body is not read, so no further request can follow it."""
    return ApiError(status, message, code=code, headers={"connection": "close", **(headers or {})})


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?")


def host_name(host: str) -> str:
    """Return the name in a Host header in lower case, without port and brackets. Invalid ones stay as they are."""
    host = host.strip().lower()
    found = _HOST.fullmatch(host)
    return host if found is None else found[1] or found[2].rstrip(".")


def _same_origin(origin: str, host: str) -> bool:
    """Return True if a page came from this server. Both http and https count, because a proxy may do TLS."""
    scheme, _, place = origin.lower().partition("://")
    return scheme in ("http", "https") and place == host.strip().lower()


log = logging.getLogger("rest_local.server")
LONGEST = 200
CLIENT_GONE = 499
POLLED = ("/health", "/v1/health", "/metrics", "/slots")  # some clients request them every few seconds


class JsonLines(logging.Formatter):
    """Formats a record as one line of ASCII JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        fields |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TerminalLines(logging.Formatter):
    """Formats a record as a short line of ASCII for people, with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {"message": record.getMessage()}
        if fields.get("event") == "request":
            text = "{method} {path}: {status}, {milliseconds:.0f} ms".format_map(fields)
            text += f", {fields['completion_tokens']} tokens" if "completion_tokens" in fields else ""
            text += ", repeats itself" if fields.get("loop") else ""
        else:
            text = " ".join(map(str, fields.values()))
        when = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        lines = [text, *(self.formatException(record.exc_info).splitlines() if record.exc_info else ())]
        return "\n".join(f"{when} {line.encode('unicode_escape').decode('ascii')}" for line in lines)


class AccessLog:
    """ASGI middleware that writes a line when a request ends in any way."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status = time.perf_counter(), CLIENT_GONE
        started = status
        connection: ClientConnection | None = scope.get("state", {}).get(CONNECTION)
        # When the request ends, the connection may already serve the next one.
        cycle = None if connection is None else connection.cycle

        async def watched(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                started = message["status"]
            await send(message)
            gone = cycle is not None and cycle.disconnected
            if message["type"] == "http.response.body" and not message.get("more_body", False) and not gone:
                status = started

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            fields = {
                "event": "request",
                "method": scope["method"][:LONGEST],
                "path": scope["path"][:LONGEST],
                "status": status,
                "milliseconds": round(1e3 * (time.perf_counter() - begun), 1),
                "client": (scope.get("client") or ("?",))[0],
                **(scope[LOG]() if LOG in scope else {}),
            }
            is_quiet = scope["path"] in POLLED or scope["path"].startswith("/page/")  # The page has twenty files.
            level = logging.DEBUG if is_quiet else logging.INFO
            if not scope.get(FORWARDED):
                log.log(level, "request", extra={"fields": fields})
