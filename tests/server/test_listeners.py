"""Servers on other addresses than 127.0.0.1: who reaches them, under which names, and with what."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from live import Scripted

from rest_local.errors import OptionError
from rest_local.server import http
from rest_local.server.http import listen
from rest_local.server.settings import Settings

HAS_IPV6 = True
try:
    socket.create_server(("::1", 0), family=socket.AF_INET6).close()
except OSError:
    HAS_IPV6 = False
ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="the machine has no IPv6")


def ask(address: str, port: int, host: str, *headers: str) -> int:
    """The status of `GET /slots` at an address; 0 if nothing listens there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(60)
        if connection.connect_ex((address, port)):
            return 0
        lines = ["GET /slots HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        said = b""
        while part := connection.recv(1 << 16):
            said += part
    return int(said.split(b" ", 2)[1])


KEY = "Authorization: Bearer k"


@pytest.mark.parametrize("address", ["127.0.0.2", pytest.param("::1", marks=ipv6)])
def test_another_address_of_the_loopback_needs_no_key_and_is_the_only_one(scripted: Scripted, address: str) -> None:
    live = scripted(host=address)
    name = f"[{address}]" if ":" in address else address
    assert ask(address, live.port, f"{name}:{live.port}") == 200
    assert ask(address, live.port, "localhost") == 200
    assert ask("127.0.0.1", live.port, "127.0.0.1") == 0, "nothing listens there"
    assert ask(address, live.port, "evil.example") == 403
    assert ask(address, live.port, "127.0.0.9") == 403
    assert ask(address, live.port, name, "Origin: http://evil.example") == 403
    assert live.serving.settings.shows_steps


def test_on_all_addresses_each_of_them_asks_for_the_key_and_withholds(scripted: Scripted) -> None:
    live = scripted(host="0.0.0.0", keys=(b"k",))
    assert not live.serving.settings.shows_steps
    for address in ("127.0.0.1", "127.0.0.2"):
        assert ask(address, live.port, address) == 401
        assert ask(address, live.port, address, "Authorization: Bearer x") == 401
        assert ask(address, live.port, address, KEY) == 200
        for host in ("127.0.0.9", "0.0.0.0.evil.example", "evil.example"):
            assert ask(address, live.port, host, KEY) == 403, host
        assert ask(address, live.port, address, KEY, "Origin: http://evil.example") == 403


@ipv6
def test_on_all_addresses_of_ipv6_each_of_them_asks_for_the_key(scripted: Scripted) -> None:
    live = scripted(host="::", keys=(b"k",))
    assert ask("::1", live.port, "[::1]") == 401
    assert ask("::1", live.port, "[::1]", KEY) == 200
    assert ask("::1", live.port, "[::2]", KEY) == 403


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1"])
def test_a_name_of_the_loopback_that_is_another_address_needs_a_key(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Whatever the machine's list of names says."""

    def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(http.socket, "getaddrinfo", resolve)
    with pytest.raises(OptionError, match=r"llm\.localhost.*--api-key-file"):
        listen(Settings(host="llm.localhost", port=0))
