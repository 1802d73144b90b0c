"""`GET /`: the page for chat and fill-in-the-middle.

Its source is in `web`: the markup, a style sheet and scripts, which are sent as one document. So the security policy
can name the hash of every style and script, and the page loads nothing else: it turns no text into markup, calls only
this server and cannot be framed. `highlight.js` is the library's unchanged build for browsers, under
`highlight.LICENSE`. The scripts are classic ones that share one scope, in the order of `page.html`. The page needs no
model.
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
_STYLE = re.compile(rb'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT = re.compile(rb'<script src="([a-z]+\.js)"></script>')


async def page(request: HttpRequest) -> Response:
    """Serve the page. A browser that has this version gets 304."""
    html, tag, policy = _built()
    headers = _HEADERS | {"content-security-policy": policy, "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(html, headers=headers, media_type="text/html")


@cache
def _built() -> tuple[bytes, str, str]:
    """Return the document, its ETag and its policy."""
    html = document()
    return html, f'"{hashlib.sha256(html).hexdigest()[:32]}"', _policy(html)


def document() -> bytes:
    """Return the page with its style and scripts in place."""
    html = _STYLE.sub(lambda found: b"<style>\n%b</style>" % _file(found[1].decode()), _file("page.html"))
    return _SCRIPT.sub(lambda found: b"<script>\n%b</script>" % _file(found[1].decode()), html)


def _file(name: str) -> bytes:
    """Return a file of `web`, escaped so that it can be inlined.

    Browsers convert all line ends to line feeds before they compute hashes. A script must not contain what would end it
    or begin another one.
    """
    text = (files("rest_local.server") / "web" / name).read_bytes().replace(b"\r\n", b"\n")
    return re.sub(rb"<(?=!--|/?script)", rb"\\x3c", text) if name.endswith(".js") else text


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
    """Return the hashes of all inline elements with this tag, in the policy's notation."""
    texts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)
