"""Checks of origin, key and body (RELIABILITY 29 to 32), over raw sockets where a client library would interfere."""

import base64
import socket
from typing import Any
from urllib.parse import quote

import pytest
from live import Live, Scripted
from starlette.datastructures import Headers

from rest_local.api.errors import from_error
from rest_local.errors import (
    DatastoreCorrupt,
    DecodeFailed,
    GenerationError,
    HistoryNotFound,
    InputInvalid,
    ModelError,
    ModelNotFound,
    OptionError,
    PromptEmpty,
    RestLocalError,
    Unexpected,
)
from rest_local.server import http, security
from rest_local.server.http import listen
from rest_local.server.settings import ServerSettings, owner_of, parse_keys

BODY = b'{"prompt": "x"}'


def talk(live: Live, data: bytes) -> bytes:
    """Send these bytes, and return the server's response when it closes the connection."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def asked(live: Live, head: bytes, body: bytes = b"") -> int:
    """Return the status of one request. `head` lacks the line of its length."""
    length = b"content-length: %d\r\n" % len(body) if b"content-length" not in head.lower() else b""
    answer = talk(live, head + length + b"connection: close\r\n\r\n" + body)
    return int(answer.split(b" ", 2)[1])


def post(host: str, *headers: str, path: str = "/completion") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", *headers]
    if not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    return "".join(f"{line}\r\n" for line in lines).encode()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only shortly for a client that sends no more."""
    monkeypatch.setattr(security, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(security, "DRAINED_SECONDS", 3600.0)


OWN_HOSTS = [
    "localhost", "LOCALHOST:8012", "127.0.0.1:1", "[::1]:8012", "localhost:", "localhost.", "[::1]", "::1",
    "extra.example",
]  # fmt: skip
OTHER_HOSTS = [
    "[::1]evil.example", "[::1]:80@evil.example", "[::1", "localhost:80evil.example", "localhost]", "evil.example",
    "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80@localhost", "evil-extra.example",
    "evil.extra.example", "evillocalhost", "evil.localhost", "extra.exampl", "xtra.example", "0.0.0.0", "",
]  # fmt: skip
HOSTS = dict.fromkeys(OWN_HOSTS, 200) | dict.fromkeys(OTHER_HOSTS, 403)


def test_the_host_is_on_the_list(scripted: Scripted) -> None:
    live = scripted(allowed_hosts=("extra.example",), keys=(b"k",))
    assert {host: asked(live, post(host, "Authorization: Bearer k"), BODY) for host in HOSTS} == HOSTS


def test_forwarded_headers_mean_nothing(hello: Live) -> None:
    more = ("X-Forwarded-Host: localhost", "X-Forwarded-For: 127.0.0.1", "Forwarded: host=localhost")
    assert asked(hello, post("evil.example", *more), BODY) == 403


OWN_ORIGINS = ("http://localhost:8012", "https://localhost:8012", "http://friend.example")
OTHER_ORIGINS = [
    "http://evil.example", "http://localhost:8013", "http://localhost:80123", "http://localhost:8012.evil.example",
    "http://localhost:8012@evil.example", "http://evil.example/http://localhost:8012", "ftp://localhost:8012",
    "localhost:8012", "null", "file://",
]  # fmt: skip
ORIGINS = dict.fromkeys(OWN_ORIGINS, 200) | dict.fromkeys(OTHER_ORIGINS, 403)


def test_pages_of_other_origins_may_not_call(scripted: Scripted) -> None:
    live = scripted(allowed_origins=("http://friend.example",))
    found = {origin: asked(live, post("localhost:8012", f"Origin: {origin}"), BODY) for origin in ORIGINS}
    assert found == ORIGINS


def test_images_and_links_of_other_sites_reach_the_page_alone(hello: Live) -> None:
    """A browser names no origin for them, but the kind of its site."""
    calls = ("/props", "/v1/models", "/slots", "/page/page.js", "/nothing")
    found = {path: hello.get(path, headers={"sec-fetch-site": "cross-site"}).status_code for path in (*calls, "/")}
    assert found == dict.fromkeys(calls, 403) | {"/": 200}
    assert hello.get("/props", headers={"sec-fetch-site": "same-site"}).status_code == 403
    assert hello.get("/props", headers={"sec-fetch-site": "same-origin"}).status_code == 200


OPENAI_HEADERS = (  # what browsers ask for in the name of the packages
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)
ANTHROPIC_HEADERS = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,x-stainless-lang"
)


def test_cors_names_the_origin_and_never_all(scripted: Scripted) -> None:
    live = scripted(allowed_origins=("http://friend.example",), keys=(b"k",))
    ask = {"origin": "http://friend.example", "access-control-request-method": "POST"}
    with live.client() as client:
        asks = ask | {"access-control-request-method": "GET"}
        assert client.options("/datastores", headers=asks).status_code == 200
        allowed = client.options("/v1/chat/completions", headers=ask)
        refused = client.options("/v1/chat/completions", headers=ask | {"origin": "http://evil.example"})
    assert allowed.status_code == 200, "a preflight carries no key"
    assert allowed.headers["access-control-allow-origin"] == "http://friend.example"
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    for headers in (OPENAI_HEADERS, ANTHROPIC_HEADERS):
        with live.client() as client:
            sdk = client.options("/v1/messages", headers=ask | {"access-control-request-headers": headers})
        assert sdk.status_code == 200
        assert set(headers.split(",")) <= set(sdk.headers["access-control-allow-headers"].replace(" ", "").split(","))
    without = scripted()
    assert "access-control-allow-origin" not in without.get("/health").headers


OTHER_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
KINDS = {f"Content-Type: {kind}": 415 for kind in OTHER_TYPES}
KINDS |= {
    "Content-Encoding: gzip": 415,
    "Content-Encoding: br": 415,
    "Content-Type: Application/JSON; charset=utf-8": 200,
}


def test_other_kinds_of_bodies_are_415(hello: Live) -> None:
    assert {header: asked(hello, post("localhost", header), BODY) for header in KINDS} == KINDS


@pytest.mark.usefixtures("soon")
def test_a_body_over_the_cap_is_refused_before_it_is_read(scripted: Scripted) -> None:
    live = scripted(max_body=2000)
    assert asked(live, post("localhost", "Content-Length: 2001")) == 413, "not one byte of it was sent"
    assert asked(live, post("localhost", "Content-Length: 99999999999999999999"), BODY) in (400, 413)
    assert asked(live, post("localhost"), BODY.ljust(2000)) == 200


@pytest.mark.usefixtures("soon")
def test_a_body_in_chunks_is_cut_off_at_the_cap(scripted: Scripted) -> None:
    live = scripted(max_body=2000)
    head = post("localhost", "Transfer-Encoding: chunked", "Connection: close") + b"\r\n"
    chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    assert talk(live, head + chunk * 3).startswith(b"HTTP/1.1 413 ")
    assert talk(live, head + chunk + b"f\r\n" + BODY + b"\r\n0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_head_is_limited_however_it_arrives(hello: Live) -> None:
    for size, status in ((60_000, 200), (70_000, 431), (200_000, 431)):
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Large: " + b"a" * size
        assert talk(hello, head + b"\r\n\r\n").startswith(b"HTTP/1.1 %d " % status), size


MUCH = 20 << 20
CHUNK = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
REFUSED = {
    "too long": (413, post("localhost", f"Content-Length: {MUCH}") + b"\r\n" + b" " * MUCH),
    "in chunks": (413, post("localhost", "Transfer-Encoding: chunked") + b"\r\n" + CHUNK * 20 + b"0\r\n\r\n"),
    "of another type": (415, post("localhost", "Content-Type: x/y", f"Content-Length: {MUCH}") + b"\r\n" + b" " * MUCH),
    "no key": (401, post("localhost", f"Content-Length: {MUCH}") + b"\r\n" + b" " * MUCH),
    "a wrong host": (403, post("x", "Connection: close", f"Content-Length: {MUCH}") + b"\r\n" + b" " * MUCH),
    "no HTTP": (400, b"x\r\n\r\n" + b" " * MUCH),
    "an endless head": (431, b"GET /health HTTP/1.1\r\nx: " + b"a" * MUCH),
}


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_client_that_is_refused_while_it_sends_sees_the_answer_and_no_reset(scripted: Scripted, kind: str) -> None:
    status, data = REFUSED[kind]
    live = scripted(max_body=2000, keys=(b"k",) if kind == "no key" else ())
    answer = talk(live, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'"error"' in answer
    assert live.get("/health").status_code == 200


def test_not_more_than_a_bounded_part_of_a_refused_body_is_read(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "DRAINED_BYTES", 1 << 20)
    live = scripted(max_body=2000)
    with pytest.raises(ConnectionError):
        talk(live, post("localhost", f"Content-Length: {MUCH}") + b"\r\n" + b" " * MUCH)
    assert live.get("/health").status_code == 200


def test_a_client_that_waits_for_100_is_not_waited_for(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "SILENT_SECONDS", 3600.0)
    answer = talk(scripted(max_body=2000), post("localhost", "Content-Length: 2001", "Expect: 100-continue") + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


KEYED = (
    "/", "/page/page.js", "/v1/models", "/slots", "/props", "/metrics", "/datastores", "/nothing",
)  # fmt: skip


def test_every_route_but_health_asks_for_the_key(scripted: Scripted) -> None:
    live = scripted(keys=(b"right", b"other \xc3\xa9"), metrics=True)
    for health in ("/health", "/v1/health"):
        assert live.get(health).status_code == 200
    basic = base64.b64encode(b"anyone:right").decode()
    closed: list[Any] = [{}, {"authorization": "right"}, {"x-api-key": ""}]
    for wrong in ("wrong", "r", "righ", "rightly", "ight", "Right", "right other", "other"):
        password = base64.b64encode(f"anyone:{wrong}".encode()).decode()
        closed += [{"authorization": f"Bearer {wrong}"}, {"x-api-key": wrong}, {"authorization": f"Basic {password}"}]
    opens: list[Any] = [{"authorization": each} for each in ("Bearer right", "bearer  right", f"Basic {basic}")]
    opens += [{"x-api-key": "right"}, [(b"authorization", b"Bearer other \xc3\xa9")]]
    for path in KEYED:
        for headers in closed:
            answer = live.get(path, headers=headers)
            assert answer.status_code == 401, (path, headers)
            assert "right" not in answer.text
            assert "www-authenticate" in answer.headers
        for headers in opens:
            assert live.get(path, headers=headers).status_code != 401, (path, headers)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "192.168.1.5", "example.org", "0", "127.1", "::ffff:127.0.0.1", "fe80::1", "2130706433", "*"],
)
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(OptionError, match="--api-key-file"):
        ServerSettings(host=host)
    assert not ServerSettings(host=host, keys=(b"k",)).shows_steps
    assert ServerSettings(host=host, keys=(b"k",), statistics=True).shows_steps


@pytest.mark.parametrize("name", ["llm.example.org", "host.docker.internal", "192.168.1.5", "localhost.example.org"])
def test_an_allowed_host_of_other_machines_needs_a_key(name: str) -> None:
    """A proxy lets other machines reach a server on the loopback interface."""
    with pytest.raises(OptionError, match=f"{name}.*--api-key-file"):
        ServerSettings(allowed_hosts=("localhost", name))
    reached = ServerSettings(allowed_hosts=(name,), keys=(b"k",))
    assert not reached.is_local
    assert not reached.shows_steps
    assert ServerSettings(allowed_hosts=(name,), keys=(b"k",), statistics=True).shows_steps


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LocalHost", "llm.localhost"])
def test_the_loopback_needs_no_key(host: str) -> None:
    assert ServerSettings(host=host).shows_steps
    assert ServerSettings(allowed_hosts=(host,)).shows_steps


def test_several_keys_are_several_users_wherever_they_call_from() -> None:
    assert ServerSettings(keys=(b"one",)).shows_steps
    assert not ServerSettings(keys=(b"one", b"two")).shows_steps
    assert not ServerSettings(keys=(b"one", b"two")).is_local
    assert ServerSettings(keys=(b"one", b"two"), statistics=True).shows_steps


def test_the_owner_of_a_request_is_its_key() -> None:
    """A wrong header before it does not count, and the owner does not show the key. Without keys there is one user."""
    settings = ServerSettings(keys=(b"one", b"two"))

    def owner(*headers: tuple[str, str], settings: ServerSettings = settings) -> str:
        return owner_of(Headers(raw=[(name.encode(), value.encode()) for name, value in headers]), settings)

    one, two = owner(("x-api-key", "one")), owner(("x-api-key", "two"))
    assert len({one, two, owner(("x-api-key", "three")), owner()}) == 3, "a wrong key and none are nobody's"
    assert "" not in (one, two, owner())
    assert owner(("authorization", "Bearer one")) == one
    assert owner(("x-api-key", "wrong"), ("authorization", "Bearer two")) == two
    assert "one" not in one
    assert owner(("x-api-key", "one"), settings=ServerSettings()) == ""
    assert owner(("x-api-key", "one"), settings=ServerSettings(keys=(b"one",))) == one
    assert owner(("x-api-key", "one"), settings=ServerSettings(keys=(b"one", b"two"), statistics=True)) == one


@pytest.mark.parametrize("wrong", [{"allowed_origins": ("*",)}, {"aliases": ("",)}, {"aliases": ("a\nb",)}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ServerSettings(**wrong)


def test_key_files() -> None:
    assert parse_keys(b"# mine\n\n one \r\ntwo\n") == (b"one", b"two")
    with pytest.raises(OptionError, match="no key"):
        parse_keys(b"# nothing\n\n")


SECRET = "/home/somebody/secret"
PATHS = [
    ModelNotFound(SECRET), ModelError(f"model {SECRET}: is closed"), DatastoreCorrupt(SECRET, "x"),
    HistoryNotFound(SECRET), InputInvalid("file", SECRET, "x"), Unexpected(ValueError(SECRET)), RestLocalError(SECRET),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_errors_for_other_machines_contain_no_paths(scripted: Scripted, others: bool, stream: bool) -> None:
    """Neither an answer nor its last event has them. This machine sees them."""
    live = scripted(allowed_hosts=("llm.example.org",), keys=(b"k",)) if others else scripted()
    live.service.answer = None
    body, headers = {"prompt": "x", "stream": stream}, {"authorization": "Bearer k"}
    for number, error in enumerate(PATHS):
        asking = live.later("/completion", body, headers=headers)
        live.service.stream(number).end("error", error=error)
        answer = asking.result(60)
        assert '"error"' in answer.text
        assert (SECRET in answer.text) != others, error


def test_errors_for_other_machines_say_what_is_wrong_with_the_request() -> None:
    for error in (OptionError("too many"), PromptEmpty(), DecodeFailed(-3, 4), GenerationError("the grammar")):
        assert from_error(error, is_local=False).message == str(error)


def test_a_name_that_is_no_models_is_404_whatever_it_spells(hello: Live) -> None:
    """A name is never joined to a path: missing and forbidden files get the same answer."""
    unknown = hello.post("/v1/completions", {"prompt": "x", "model": "nothing"})
    for name in ("other", "../demo", "/etc/passwd", "demo/../demo", "demo.gguf", "Demo", "demo\u0000"):
        answer = hello.post("/v1/completions", {"prompt": "x", "model": name})
        assert (answer.status_code, answer.json()) == (404, unknown.json())
        assert hello.get(f"/v1/models/{quote(name, safe='')}").status_code == 404


# ---- Servers on other addresses than 127.0.0.1 ---------------------------------------------------------------------


HAS_IPV6 = True
try:
    socket.create_server(("::1", 0), family=socket.AF_INET6).close()
except OSError:
    HAS_IPV6 = False
ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="the machine has no IPv6")


def ask(address: str, port: int, host: str, *headers: str) -> int:
    """Return the status of `GET /slots` at an address, or 0 if nothing listens there."""
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
    """The machine's list of names may say anything."""

    def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(http.socket, "getaddrinfo", resolve)
    with pytest.raises(OptionError, match=r"llm\.localhost.*--api-key-file"):
        listen(ServerSettings(host="llm.localhost", port=0))
