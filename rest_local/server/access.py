"""The log of requests: a line of JSON for each, on the logger `rest_local.server`. Never a prompt, an answer or a key.

What a client can choose (method, path) is cut and JSON-escaped, so that it cannot contain line breaks or terminal
codes. Query strings are left out.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import datetime, timezone
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rest_local.server.answering import LOG

log = logging.getLogger("rest_local.server")
LONGEST = 200
CLIENT_GONE = 499
POLLED = ("/health", "/v1/health", "/metrics", "/slots")  # some clients request these every few seconds


class JsonLines(logging.Formatter):
    """Formats a record as one line of ASCII JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        fields |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class AccessLog:
    """ASGI middleware: writes a line when a request ends, however it ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), CLIENT_GONE  # unless an answer is sent completely
        started = status

        async def watched(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                started = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
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
                **scope.get(LOG, {}),
            }
            level = logging.DEBUG if scope["path"] in POLLED else logging.INFO
            log.log(level, "request", extra={"fields": fields})
