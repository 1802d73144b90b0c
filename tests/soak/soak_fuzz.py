"""Requests that no client should send, over all routes of a server with a scripted model, on kept connections.

Not collected by `make test`; `make soak` runs it. REST_LOCAL_FUZZ_REQUESTS is how many are sent, and
REST_LOCAL_SOAK_SEED repeats them.

Valid requests, which the mutations begin with, are those that clients were
recorded with, and `EXAMPLES`, where a new route has its own.

What must hold: the server stays alive and answers every whole request, none with 500; memory and descriptors do not
grow; a valid request in between works.
"""

import asyncio
import copy
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "clients"))

from fake_service import scripted_server
from live import Live
from support.memory import resident_mb

from rest_local.server.app import ROUTES
from rest_local.server.routes import not_served

REQUESTS = int(os.environ.get("REST_LOCAL_FUZZ_REQUESTS", "20000"))
SEED = int(os.environ.get("REST_LOCAL_SOAK_SEED", str(time.time_ns() % 10**6)))
CONNECTIONS = 16
LONGEST_ANSWER = 240.0  # seconds; a whole request without an answer after that is a hang
PROBE_EVERY = 1000
CHAT = [{"role": "user", "content": "Hello"}]
EXAMPLES: dict[str, list[Any]] = {
    "/v1/chat/completions": [{"messages": CHAT}, {"messages": CHAT, "stream": True, "n": 2, "logprobs": True}],
    "/v1/completions": [{"prompt": ["a", "b"], "echo": True}, {"prompt": "x", "suffix": "y"}],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}, {"input": [1, 2]}],
    "/v1/responses": [
        {"input": "Hello"},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
        },
    ],
    "/v1/messages": [
        {"messages": CHAT, "max_tokens": 4, "system": [{"type": "text", "text": "s"}]},
        {
            "messages": [
                *CHAT,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
            ],
            "max_tokens": 4,
            "stream": True,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
    ],
    "/v1/messages/count_tokens": [{"messages": CHAT}],
    "/completion": [{"prompt": ["a", [1, 2]], "n_probs": 2}, {"prompt": "x", "grammar": 'root ::= "a" | "b"'}],
    "/infill": [{"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x", "filename": "y"}]}],
    "/tokenize": [{"content": "né 🙂", "with_pieces": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/apply-template": [{"messages": CHAT}],
    "/api/chat": [{"model": "demo", "messages": CHAT, "options": {"num_predict": 2}}],
    "/api/generate": [{"model": "demo", "prompt": "x", "stream": False, "format": {"type": "object"}}],
    "/api/embed": [{"model": "demo", "input": ["a"]}],
    "/api/embeddings": [{"model": "demo", "prompt": "a"}],
    "/api/show": [{"model": "demo", "verbose": True}],
    "/models/load": [{"model": "demo"}],
    "/models/unload": [{"model": "none"}],  # unloading the only model all the time would test nothing else
}
WRONG: list[Any] = [None, True, -1, 0, 1e308, 2**63, -(2**70), 10**400, "", "x", "\x00", "né \U0001f642", "\udcff"]
WRONG += [[], {}, [[]], {"type": "function"}, [None], ["a"] * 50, {"a": {"b": []}}, "<|im_start|>" * 20, 0.5]
WRONG += ["a" * 5000, list(range(300)), {str(n): n for n in range(300)}, "data:image/png;base64,AAAA", "..", "../" * 9]
NAMES = ["demo", "x", "..", "%2e%2e%2f", "a%00b", "%ff", "resp_0", "%F0%9F%99%82", "a/b", "*"]
NAMES += ["%0d%0a", "' OR 1=1", "x" * 3000, "-1", "~", "..%5c..%5c"]
QUERIES = ["", "", "", "?limit=1", "?limit=-1", "?after=x&order=asc", "?model=demo", "?model=%00", "?" + "a=b&" * 300]
QUERIES += ["?stream=true", "?starting_after=5", "?limit=%B2", "?purpose=batch&limit=99999999999999999999", "?%ff=%ff"]
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "FOO"]
METHODS += ["P\x7fST", "A" * 300]
HEADERS = [
    b"content-type: text/plain", b"content-type: multipart/form-data; boundary=", b"content-type: \xff",
    b"content-encoding: gzip", b"content-length: 5", b"transfer-encoding: identity", b"expect: 100-continue",
    b"origin: https://evil.example", b"origin: null", b"host: evil.example", b"x-forwarded-for: 1.2.3.4",
    b"x-api-key: \xff\xfe", b"authorization: Basic !!!", b"authorization: Bearer " + b"k" * 5000,
    b"cookie: " + b"a=b; " * 1000, b"range: bytes=0-1,2-", b"te: trailers", b"upgrade: websocket",
    b"connection: upgrade, close", b"accept-encoding: gzip;q=0", b"if-none-match: *", b"\xc3\xa9: x",
    b"a" * 70_000 + b": b",
]  # fmt: skip


@dataclass
class Sent:
    """Bytes of one request. `whole`: a server has to answer it; `keeps`: and the connection stays usable."""

    data: bytes
    route: str
    whole: bool = True
    keeps: bool = True
    head: bool = False


@dataclass
class Fuzzer:
    """Makes requests."""

    rng: random.Random
    routes: list[tuple[str, str]]  # method, path
    bodies: dict[str, list[Any]]

    def request(self) -> Sent:
        rng = self.rng
        method, path = rng.choice(self.routes)
        route = f"{method} {path}"
        target = self._target(path)
        if rng.random() < 0.03:
            method = rng.choice(METHODS)
        body = self._json(path) if path in self.bodies else b""
        return self._wire(method.encode("latin-1"), target, b"application/json", body, route)

    def _target(self, path: str) -> bytes:
        rng = self.rng
        parts = [self._name() if part.startswith("{") else part for part in path.split("/")]
        target = "/".join(parts) + (rng.choice(QUERIES) if rng.random() < 0.1 else "")
        if rng.random() < 0.02:
            target = rng.choice([target + "/", "/" + target, target.upper(), target.replace("/", "//"), "*", "/" * 200])
            target = rng.choice([target, target + "%", "http://localhost" + target, target + "é"])
        return target.encode("latin-1", "replace")

    def _name(self) -> str:
        return quote(self.rng.choice(NAMES), safe="%/*'~.")

    def _json(self, path: str) -> bytes:
        rng = self.rng
        value = copy.deepcopy(rng.choice(self.bodies[path]))
        if isinstance(value, dict):
            limits = {"n_predict": 3, "max_tokens": 3, "max_output_tokens": 3, "max_completion_tokens": 3}
            value |= {name: number for name, number in limits.items() if name in value or rng.random() < 0.5}
            value.pop("model", None) if rng.random() < 0.7 else None
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            value = self._damaged(value)
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        luck = rng.random()
        if luck < 0.02:
            depth = rng.choice((100, 300, 50_000))
            data = rng.choice((b"[" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth + b"]" * depth))
        elif luck < 0.03:
            data = b'{"messages": 1' + b"0" * rng.choice((400, 5000)) + b', "prompt": 1e999999}'
        elif luck < 0.1:
            data = self._damaged_bytes(data)
        return data

    def _damaged(self, value: Any) -> Any:
        """Replace, remove, rename or double one thing anywhere in the value."""
        rng = self.rng
        if isinstance(value, dict) and value and rng.random() < 0.9:
            name = rng.choice(sorted(value))
            if rng.random() < 0.15:
                rest = {key: each for key, each in value.items() if key != name}
                return rest if rng.random() < 0.5 else rest | {rng.choice(("x", "type", "é", "")): value[name]}
            return value | {name: self._damaged(value[name])}
        if isinstance(value, list) and value and rng.random() < 0.8:
            at = rng.randrange(len(value))
            return [*value[:at], self._damaged(value[at]), *value[at:] * rng.choice((0, 1))]
        return copy.deepcopy(rng.choice(WRONG))

    def _damaged_bytes(self, data: bytes) -> bytes:
        rng = self.rng
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(4)
        if how == 0:
            return data[:at]
        if how == 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        if how == 2:
            return data[:at] + data[at + rng.randrange(1, 9) :]
        return data[:at] + data[at:] * 2

    def _wire(self, method: bytes, target: bytes, kind: bytes, body: bytes, route: str) -> Sent:
        rng = self.rng
        lines = [b"host: localhost", b"content-type: " + kind]
        sent = Sent(b"", route, head=method == b"HEAD")
        luck = rng.random()
        if luck < 0.04:
            lines.insert(rng.randrange(3), rng.choice(HEADERS))
            sent.keeps = False
        if luck > 0.98:
            lines.append(b"content-length: " + rng.choice((b"-1", b"x", b"9" * 30, b"%d" % (len(body) + 9), b"")))
            sent.whole = sent.keeps = False
        elif luck > 0.94 and body:
            lines.append(b"transfer-encoding: chunked")
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in self._parts(body)) + b"0\r\n\r\n"
            if rng.random() < 0.3:
                body, sent.whole, sent.keeps = self._damaged_bytes(body), False, False
        else:
            lines.append(b"content-length: %d" % len(body))
        version = b"HTTP/1.1" if rng.random() < 0.99 else rng.choice((b"HTTP/1.0", b"HTTP/9.9", b"", b"ICY"))
        sent.keeps = sent.keeps and version == b"HTTP/1.1"
        data = b"%s %s %s\r\n%s\r\n\r\n" % (method, target, version, b"\r\n".join(lines)) + body
        if rng.random() < 0.02:
            data, sent.whole, sent.keeps = self._damaged_bytes(data), False, False
        sent.data = data
        return sent

    def _parts(self, body: bytes) -> Iterator[bytes]:
        while body:
            size = self.rng.randrange(1, max(len(body), 2) + 1)
            yield body[:size]
            body = body[size:]


@dataclass
class Counts:
    """What came of the requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, bytes] = field(default_factory=dict)  # the first request of each route with a 500
    hangs: list[bytes] = field(default_factory=list)
    left: int = 0


class Closed(Exception):
    """The server closed the connection."""


async def answer(reader: asyncio.StreamReader, head_only: bool) -> tuple[int, bytes, bool]:
    """Return status, body and whether the connection stays. Raises Closed."""
    try:
        status = 100
        while status == 100:
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
        lower = head.lower()
        body = b""
        if head_only or status in (204, 304):
            pass
        elif b"transfer-encoding: chunked" in lower:
            while size := int((await reader.readuntil(b"\r\n")), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readuntil(b"\r\n")
        elif b"content-length: " in lower:
            body = await reader.readexactly(int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        else:
            body = await reader.read()
        return status, body, b"connection: close" not in lower
    except (asyncio.IncompleteReadError, ConnectionError, ValueError, asyncio.LimitOverrunError) as error:
        raise Closed from error


async def work(port: int, fuzzer: Fuzzer, counts: Counts) -> None:
    """Use one connection after another, until enough was sent."""
    rng, stream = fuzzer.rng, None
    while counts.left > 0:
        counts.left -= 1
        sent = fuzzer.request()
        counts.routes[sent.route] += 1
        if stream is None:
            stream = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        reader, writer = stream
        luck = rng.random()
        try:
            if luck < 0.01:  # cut in the middle of the request
                writer.write(sent.data[: rng.randrange(len(sent.data))])
                raise Closed
            writer.write(sent.data)
            if luck < 0.03:  # cut in the middle of the answer
                await asyncio.wait_for(reader.read(rng.choice((0, 1, 40))), 0.3)
                raise Closed
            limit = LONGEST_ANSWER if sent.whole else 0.05
            status, _, stays = await asyncio.wait_for(answer(reader, sent.head), limit)
            counts.statuses[str(status)] += 1
            if status in (500, 502):
                counts.faults.setdefault(f"{status} {sent.route}", sent.data)
            if not stays or not sent.keeps:
                raise Closed
        except asyncio.TimeoutError:
            if sent.whole and luck >= 0.03:
                counts.hangs.append(sent.data)
            counts.statuses["no answer"] += 1
            writer.transport.abort()
            stream = None
        except (Closed, ConnectionError):
            counts.statuses["closed"] += 1
            writer.transport.abort()
            stream = None
    if stream is not None:
        stream[1].transport.abort()


def valid_bodies() -> dict[str, list[Any]]:
    """Return `EXAMPLES` and recorded requests by path."""
    import recorded

    bodies = {path: list(some) for path, some in EXAMPLES.items()}
    for each in (*recorded.OPENAI.values(), *recorded.OLLAMA.values()):
        bodies.setdefault(each.path, []).append(each.body)
    paths = {operation.path for operation, _ in ROUTES}
    return {path: some for path, some in bodies.items() if path in paths}


def routes(bodies: Container[str]) -> list[tuple[str, str]]:
    """Return method and path, of calls with a body four times, as there is more to them."""
    found = []
    for operation, _ in ROUTES:
        found += [(operation.method, operation.path)] * (4 if operation.path in bodies else 1)
    return found


def probe(live: Live) -> None:
    """Check that a valid request works. A full server says so, and then does."""
    for _ in range(100):
        made = live.post("/completion", {"prompt": "def add(", "n_predict": 4})
        if made.status_code != 503:
            break
        time.sleep(0.1)
    assert made.status_code == 200, made.text
    assert made.json()["content"]
    assert live.get("/health").json() == {"status": "ok"}


def used() -> tuple[float, int]:
    """Return resident megabytes and open descriptors."""
    return resident_mb(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the kernel does not tell memory and descriptors")
@pytest.mark.filterwarnings("ignore")
def test_no_request_is_a_fault() -> None:
    print(f"REST_LOCAL_SOAK_SEED={SEED}")
    with scripted_server(metrics=True, aliases=("*",), max_body=1 << 20) as live:
        bodies = valid_bodies()
        fuzzer = Fuzzer(random.Random(SEED), routes(bodies), bodies)
        posts = {each.path for each, endpoint in ROUTES if each.method == "POST" and endpoint is not not_served}
        without = posts - set(bodies)
        assert not without, f"EXAMPLES has no request for {without}"
        counts, begun, before = Counts(), time.monotonic(), (0.0, 0)

        async def batch(number: int) -> None:
            counts.left = number
            await asyncio.gather(*(work(live.port, fuzzer, counts) for _ in range(CONNECTIONS)))

        for done in range(0, REQUESTS, PROBE_EVERY):
            asyncio.run(batch(min(PROBE_EVERY, REQUESTS - done)))
            live.service.streams = [stream for stream in live.service.streams if not stream.done]
            probe(live)
            if not before[1] and done + PROBE_EVERY >= min(REQUESTS // 3, 20_000):  # what is made once is there
                before = used()
        after = used()
    faults = {name: data[:2000].decode("latin-1") for name, data in counts.faults.items()}
    print(f"{REQUESTS / (time.monotonic() - begun):.0f}/s, {dict(counts.statuses)}", before, after)
    print(json.dumps(faults, indent=1))
    assert not counts.hangs, counts.hangs[:3]
    assert not faults, "these are faults of the server"
    assert set(counts.routes) >= {f"{method} {path}" for method, path in fuzzer.routes} or REQUESTS < 5000
    assert {"200", "400", "404", "405"} <= set(counts.statuses)
    assert after[0] < 1.25 * before[0] + 48, "memory grows"
    assert after[1] <= before[1] + 40, "descriptors are left open"
