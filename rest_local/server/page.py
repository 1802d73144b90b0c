"""GET /: the page for chat and fill-in-the-middle, one static file.

Its security policy: it loads nothing, runs only its own script and style (the browser compares their hashes), turns no
text into markup, calls only this server and cannot be framed. Knows nothing about models.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


async def page(request: HttpRequest) -> Response:
    """The page."""
    html = _html()
    return Response(html, headers=_HEADERS | {"content-security-policy": _policy(html)}, media_type="text/html")


@cache
def _html() -> bytes:
    """The page with line feeds, into which a browser converts all line ends before it computes hashes."""
    return files("rest_local.server").joinpath("page.html").read_bytes().replace(b"\r\n", b"\n")


@cache
def _policy(html: bytes) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(html, b'script')}",
            f"style-src {_hashes(html, b'style')}",
            "img-src data:",
            "connect-src 'self'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(html: bytes, tag: bytes) -> str:
    """Hashes of all inline elements with this tag, in the policy's notation."""
    texts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)
