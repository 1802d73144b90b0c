"""The settings of a server, its API keys, and the owner of a request.

Knows nothing about HTTP libraries or the engine.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rest_local.errors import OptionError

DEFAULT_PORT = 8012  # llama.vim and llama.vscode look for this port
MAX_BODY = 8 << 20  # bytes. A prompt of a million tokens is about 4 MB of text

ANY_MODEL = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one server.

    A Host header may contain `allowed_hosts` besides the loopback names and the bound address. Names that are not this
    machine's own mean that other machines reach the server, for example through a proxy.

    Raises OptionError for a wrong value, and for a server that other machines reach without a key.
    """

    host: str = "127.0.0.1"  # one address, or several with commas between them
    port: int = DEFAULT_PORT
    aliases: tuple[str, ...] = ()  # further names of the model; `*` accepts any name
    keys: tuple[bytes, ...] = ()  # every route except /health requires one of these, if there are any
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # other web pages that may call, such as `http://localhost:3000`
    metrics: bool = False  # serves /metrics
    max_body: int = MAX_BODY  # maximum bytes of a request
    statistics: bool = False  # other users may see draft statistics and the text of each step, too

    def __post_init__(self) -> None:
        if not all(self.hosts):
            raise OptionError(f"host {self.host!r}: give an address, or several with commas between them")
        if not self.keys:
            self._check_local_only()
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise OptionError(f"origin {origin!r}: give a scheme and a host, for example http://localhost:3000")
        if any(not alias or len(alias) > 256 or not alias.isprintable() for alias in self.aliases):
            raise OptionError("alias: give a name of 1 to 256 printable characters")

    def check_address(self, address: str) -> None:
        """Raise OptionError for an address that other machines reach if there is no key."""
        if not self.keys and not is_loopback(address):
            raise OptionError(f"host {self.host}: other machines can reach it; give --api-key-file, or bind 127.0.0.1")

    def _check_local_only(self) -> None:
        for host in self.hosts:
            self.check_address(host)
        for name in self.allowed_hosts:
            if not is_loopback(name):
                raise OptionError(f"allowed host {name}: other machines reach it by that name; give --api-key-file")

    @property
    def is_local(self) -> bool:
        """Return True if the only user is at this machine, as far as the settings tell.

        Several keys are several users, wherever they call from: a proxy on this machine forwards what others send to
        it.
        """
        return len(self.keys) < 2 and all(map(is_loopback, (*self.hosts, *self.allowed_hosts)))

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host.strip() for host in self.host.split(","))

    @property
    def shows_steps(self) -> bool:
        """Return True if clients may see the tokens of each step and the counts of accepted draft tokens.

        Both reveal what datastores and history contain (arXiv 2411.01076), so other users see neither by default.
        """
        return self.is_local or self.statistics


def is_loopback(host: str) -> bool:
    """Return True if an address or a name belongs to the loopback interface."""
    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_keys(data: bytes) -> tuple[bytes, ...]:
    """Read the keys of a key file: one per line, `#` begins a comment line. Raises OptionError if there is none."""
    lines = [line.strip() for line in data.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not keys:
        raise OptionError("API key file: holds no key; write one on a line of its own")
    return keys


def given_keys(headers: Mapping[str, str]) -> list[bytes]:
    """Return the keys in a request: a bearer token, `x-api-key`, `api-key`, or the password of a browser's login."""
    found = [headers[name].encode("latin-1") for name in ("x-api-key", "api-key") if name in headers]
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        found.append(value.strip().encode("latin-1"))
    elif scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):
            found.append(base64.b64decode(value, validate=True).partition(b":")[2])
    return found


NOBODY = "none"  # the owner of a request without a right key


def owner_of(headers: Mapping[str, str], settings: ServerSettings) -> str:
    """Return the owner of a request, which may find only texts of that owner in memory or on disk.

    The owner is a digest of the key, empty if the server has no keys, or NOBODY without a right one. Every comparison
    takes constant time, so that timing reveals nothing.
    """
    if not settings.keys:
        return ""
    offered = given_keys(headers)
    found = [key for key in settings.keys for one in offered if hmac.compare_digest(key, one)]
    return hashlib.sha256(b"owner\n" + found[0]).hexdigest() if found else NOBODY
