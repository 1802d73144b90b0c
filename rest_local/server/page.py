"""GET /: one static page. It may load nothing from anywhere else, and nobody may frame it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def _html() -> bytes:
    return files("rest_local.server").joinpath("page.html").read_bytes()


async def page(request: HttpRequest) -> Response:
    """The chat page."""
    return Response(_html(), headers=_HEADERS, media_type="text/html")
