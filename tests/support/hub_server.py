"""A stand-in for a model hub on loopback: the part of its HTTP API that `huggingface_hub` uses to find and fetch files.

As the hub does, it answers for a repository and its files (`X-Repo-Commit`, `X-Linked-Etag`, `X-Linked-Size`) and
redirects to another host for the bytes, which serves ranges and must never see the token. Faults are set by the tests.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_token_of_the_tests"


@dataclass
class Request:
    """What came: method and path, the range that was asked for, and whether a token came with it."""

    method: str
    path: str
    range: str = ""
    token: str = ""


@dataclass
class HubServer:
    """What the stand-in holds, and how it misbehaves.

    repos      files of each `user/repo` by their names
    commit     of all of them
    gated      repositories whose files need TOKEN; their lists of files do not
    private    repositories that do not exist for a request without TOKEN
    refused    status that every request gets, with these headers; 0: none
    break_at   bytes after which a transfer ends, as many times as the list is long
    wrong      names of files whose bytes are not those of their sha256
    """

    port: int = 0
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = COMMIT
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    refused: int = 0
    refused_headers: dict[str, str] = field(default_factory=dict)
    break_at: list[int] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)
    at_break: threading.Event = field(default_factory=threading.Event)
    hold: threading.Event | None = None  # A transfer waits for it at its break, and then does not break.

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def transfers(self) -> list[Request]:
        """Return the requests for bytes of files."""
        return [request for request in self.requests if request.path.startswith("/bytes/") and request.method == "GET"]

    def sha256(self, repo: str, name: str) -> str:
        return hashlib.sha256(self.repos[repo][name]).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.requests.append(Request(self.command, path, self.headers.get("Range", ""), token))
        if self.hub.refused:
            self.answer(self.hub.refused, headers=self.hub.refused_headers)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            self.info(found[1], token)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(found[1], found[3], token)
        elif found := re.fullmatch(r"/bytes/([0-9a-f]{64})/(.+)", path):
            self.transfer(found[1], found[2])
        else:
            self.answer(404)

    def info(self, repo: str, token: str) -> None:
        if self.is_hidden(repo, token):
            return
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
                "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134},
            }
            for name, data in self.hub.repos[repo].items()
        ]
        about = {
            "id": repo, "modelId": repo, "sha": self.hub.commit, "siblings": siblings, "tags": [], "private": False,
        }  # fmt: skip
        self.answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def resolve(self, repo: str, name: str, token: str) -> None:
        if self.is_hidden(repo, token):
            return None
        if repo in self.hub.gated and token != TOKEN:
            return self.answer(403 if token else 401, headers={"X-Error-Code": "GatedRepo"})
        if name not in self.hub.repos[repo]:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        digest = self.hub.sha256(repo, name)
        headers = {
            "X-Repo-Commit": self.hub.commit,
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(self.hub.repos[repo][name])),
            "Location": f"http://localhost:{self.hub.port}/bytes/{digest}/{name}",
        }
        return self.answer(302, headers=headers)

    def transfer(self, digest: str, name: str) -> None:
        data = next(
            data
            for files in self.hub.repos.values()
            for data in files.values()
            if hashlib.sha256(data).hexdigest() == digest
        )
        if name in self.hub.wrong:
            data = bytes(byte ^ 1 for byte in data)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        if not self.hub.break_at:
            self.wfile.write(data[first:])
            return
        stop = self.hub.break_at.pop(0)
        self.wfile.write(data[first:stop])
        self.wfile.flush()
        self.hub.at_break.set()
        if self.hub.hold is not None:
            self.hub.hold.wait(60)
        self.close_connection = True  # before all bytes that Content-Length promised

    def is_hidden(self, repo: str, token: str) -> bool:
        """Return True, after an answer, if the repository is not there for this request."""
        if token not in ("", TOKEN):
            self.answer(401, headers={"X-Error-Message": "Invalid credentials in Authorization header"})
            return True
        if repo not in self.hub.repos or (repo in self.hub.private and token != TOKEN):
            self.answer(404 if token else 401, headers={"X-Error-Code": "RepoNotFound"})
            return True
        return False

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(**repos: dict[str, bytes]) -> Iterator[HubServer]:
    """Run a hub on a free port until the block ends. `repos` has files by name; `__` in a keyword is the slash."""
    hub = HubServer(repos={name.replace("__", "/"): files for name, files in repos.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
