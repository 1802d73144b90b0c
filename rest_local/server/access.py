"""The log of requests: one line of JSON each, on the logger `rest_local.server`. Never a prompt, an answer or a key.

Everything a client can choose (method, path) is JSON-escaped, so that no line break or terminal code of its gets
through, and cut; query strings are left out.
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


class JsonLines(logging.Formatter):
    """A record as one line of JSON; ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        fields |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class AccessLog:
    """ASGI: writes a line when a request is over, however it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, sent = time.perf_counter(), 0, False

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            sent = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        finally:
            fields = {
                "event": "request",
                "method": scope["method"][:LONGEST],
                "path": scope["path"][:LONGEST],
                "status": status if sent else CLIENT_GONE,
                "milliseconds": round(1e3 * (time.perf_counter() - begun), 1),
                "client": (scope.get("client") or ("?",))[0],
                **scope.get(LOG, {}),
            }
            log.info("request", extra={"fields": fields})
