"""`GET /`: the page for chat and fill-in-the-middle.

Its files are in `web`: the markup, a style sheet and ES modules, which browsers fetch from `/page/` as they are. The
security policy allows the scripts and styles of this server, and nothing else: the page turns no text into markup, runs
no inline script, calls only this server and cannot be framed. No other call of this server answers with a script.
`highlight.js` is the library's unchanged build of ES modules, under `highlight.LICENSE`. The page needs no model.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.api.errors import ApiError

MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src data:",
            "connect-src 'self'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


async def page(request: HttpRequest) -> Response:
    """Serve a file of the page. A browser that has this version gets 304. Raises ApiError 404."""
    name = request.path_params.get("file", "page.html")
    if name not in _files():
        raise ApiError(404, f"the page has no file {name!r}", code="not_found")
    content, tag, media = _files()[name]
    headers = _HEADERS | {"etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media)


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Return the content, ETag and media type of each file of the page."""
    found = {}
    for file in (files("rest_local.server") / "web").iterdir():
        media = MEDIA.get(file.name[file.name.rfind(".") :])
        if media is not None:
            content = file.read_bytes()
            found[file.name] = (content, f'"{hashlib.sha256(content).hexdigest()[:32]}"', media)
    return found
