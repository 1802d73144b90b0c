"""API keys in the headers of a request: whether one of them opens the server, and whose request it is."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers

from rest_local.server.settings import Settings


def given_keys(headers: Headers) -> list[bytes]:
    """The keys in a request: a bearer token, `x-api-key`, `api-key`, or the password of a browser's login."""
    found = [headers[name].encode("latin-1") for name in ("x-api-key", "api-key") if name in headers]
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        found.append(value.strip().encode("latin-1"))
    elif scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):  # not base64, so not a key
            found.append(base64.b64decode(value, validate=True).partition(b":")[2])
    return found


def opens(keys: Iterable[bytes], given: Iterable[bytes]) -> bool:
    """Whether any given key is right. Makes every comparison in constant time, so that timing reveals nothing."""
    offered = list(given)
    matches = [hmac.compare_digest(key, one) for key in keys for one in offered]
    return any(matches)


def owner_of(headers: Headers, settings: Settings) -> str:
    """Whose texts a request may find in memory or have restored from disk: a digest of its key; empty, the same for all
    requests, where the server has no keys.
    """
    if not settings.keys:
        return ""
    offered = given_keys(headers)
    found = [key for key in settings.keys if opens((key,), offered)]
    return hashlib.sha256(b"owner\n" + found[0]).hexdigest() if found else "none"
