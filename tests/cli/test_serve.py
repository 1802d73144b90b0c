"""`rest-local serve` as a process: how it starts, stops, refuses, and what it may take of memory."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import Process, process

from rest_local.cli import serve as serve_module
from rest_local.cli.serve import MOST_SLOTS
from rest_local.errors import InputInvalid
from rest_local.llama.context import MOST_IDS, ContextSettings
from rest_local.server import http

BODY_CAP = 1 << 20


def chat(tokens: int) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "ignore_eos": True}
    return body | {"stream": True, "temperature": 0}


def test_loading_is_not_waited_for(tmp_path: Path) -> None:
    """With an empty cache it would measure for seconds and keep the result, and nothing of that is there."""
    with process(REST_LOCAL_CACHE=str(tmp_path)) as server:
        address = server.errors.readline().split()[1]
        assert httpx.get(f"{address}/health").status_code == 503, "it serves, and so has its signal handlers"
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, "")
    assert not list(tmp_path.rglob("tuning/*"))


def test_a_second_sigterm_ends_at_once() -> None:
    """After one, the answer would go on to its end."""
    with process("--ctx", "32768") as server, httpx.Client(base_url=server.url(), timeout=60) as client:
        seen: list[str] = []
        endless = chat(8000) | {"rest_local": {"policy": "off"}}
        with client.stream("POST", "/v1/chat/completions", json=endless) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            while True:
                try:
                    socket.create_connection(("127.0.0.1", client.base_url.port or 0)).close()
                except OSError:
                    break  # it has seen the first
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                seen += lines
        assert "data: [DONE]" not in seen
        assert server.end()[0] in (0, -signal.SIGTERM)


# Makes the terminal that it is given its controlling one, and becomes the server. Tests that run under `nohup` ignore
# hangups, and the server would inherit that.
AT_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "rest_local", "serve", "--port", "0", "--no-history", *sys.argv[1:]])
"""


@contextlib.contextmanager
def at_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """Run a server at a terminal of its own. Yield its process, the other end of the terminal, and its address."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    master, terminal = pty.openpty()
    try:
        server = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *arguments],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(terminal)
    try:
        shown = b""
        while b" loaded " not in shown:
            shown += os.read(master, 4096)
        yield server, master, shown.split()[1].decode()
    finally:
        server.kill()
        server.wait()


def test_it_ends_when_its_terminal_closes_after_the_answer_in_progress() -> None:
    with at_terminal() as (server, master, url), httpx.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", "/v1/chat/completions", json=chat(100)) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.close(master)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert server.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--host", "0.0.0.0"), 2, "--api-key-file"),
        (("--host", "127.0.0.1,0.0.0.0"), 2, "other machines can reach it; give --api-key-file"),
        (("--host", "127.0.0.1,"), 2, "give an address, or several with commas between them"),
        (("--chat-template-file", "/no/such/file"), 1, "/no/such/file"),
        (("--chat-template-kwargs", "[1]"), 2, "'[1]' is not a JSON object"),
        (("--api-key-file", "/dev/null"), 1, "API key file /dev/null: holds no key"),
        (("--api-key-file", "/no/such/file"), 1, "API key file /no/such/file: No such file"),
        (("--allow-origin", "*"), 2, "give a scheme and a host"),
        (("-m", "nothing.gguf"), 1, "no such file"),
        (("--port", "99999"), 2, "99999"),
        (("--slots", "33", "-m", "nothing.gguf"), 2, "--slots"),
        (("--cells", "500", "--ctx", "1000"), 2, "500 cells hold no context of 1000 tokens"),
        (
            ("--allow-host", "llm.example.org"),
            2,
            "llm.example.org: other machines reach it by that name; give --api-key-file",
        ),
        (("--idle", "soon"), 2, "give one like 90s, 10m or 2h"),
        (("--memory", "much"), 2, "give one like 2G"),
        (("--memory", "1K"), 1, "and --memory allows 1 kB"),
        (("--host", "no.such.host.invalid", "--api-key-file", "KEYS"), 1, "no.such.host.invalid"),
    ],
)
def test_wrong_starts_are_one_line(
    call: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(http, "log_to_stderr", lambda: None)  # it would go on to this test's stderr in later ones
    keys = tmp_path / "keys"
    keys.write_text("a key of mine\n")
    keys.chmod(0o600)
    given = [str(keys) if argument == "KEYS" else argument for argument in arguments]
    done = call("serve", "--port", "0", "--no-history", *given)
    assert done.code == code, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("rest-local: error: ")
    assert message in last
    assert "a key of mine" not in done.err


def test_a_port_in_use_is_one_line(call: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call("serve", "--no-history", "--port", str(port))
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert f"port {port} on 127.0.0.1: " in line


def resident(server: Process) -> int:
    """Return the peak bytes of memory of the child that serves, or 0 if no /proc tells it."""
    for child in server.children():
        for line in Path(f"/proc/{child}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def test_large_bodies_take_no_memory_and_sigterm_lets_an_answer_end() -> None:
    """Bodies of 50 times the cap, by length, in chunks and as a head, and the most JSON that a small one can hold."""
    with process("--max-body", str(BODY_CAP)) as server:
        url = server.url()
        port = int(url.rpartition(":")[2])
        httpx.post(f"{url}/completion", json={"prompt": "x" * 1000, "n_predict": 1}, timeout=60)
        before = resident(server)
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for opening, part in (
            (head + b"Content-Length: 52428800\r\n\r\n", b" " * 0x10000),
            (head + b"Transfer-Encoding: chunked\r\n\r\n", chunk),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: ", b"a" * 0x10000),
        ):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            with connection, contextlib.suppress(OSError):  # it closes on us
                connection.sendall(opening)
                for _ in range(50 * BODY_CAP // 0x10000):
                    connection.sendall(part)
        nested = b'{"prompt": ' + b"[" * (BODY_CAP // 2) + b"]" * (BODY_CAP // 2 - 20) + b"}"
        for body in (
            nested,
            b'{"prompt": [' + b"[]," * (BODY_CAP // 3 - 10) + b"[]]}",
            b'{"prompt": "' + b"a" * BODY_CAP + b'"}',
        ):
            answer = httpx.post(f"{url}/completion", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 413)
        assert resident(server) - before < 64 * BODY_CAP
        assert httpx.get(f"{url}/health").status_code == 200
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat(100), timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        code, errors = server.end()
        assert code == 0, errors
        assert "Traceback" not in errors


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP on this system")
def test_a_service_with_several_addresses_ignores_sighup_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    """It has a template of its own."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}<<{{ message.content }}>>{% endfor %}{{ name }}")
    hosts = ["127.0.0.1", "::1"] if has_ipv6() else ["127.0.0.1"]
    given = ("--chat-template-file", str(template), "--chat-template-kwargs", '{"name": "Ada"}')
    with process("--host", ", ".join(hosts), *given, session=True) as serving:
        port = serving.url().rstrip(",").rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]")[: len(hosts)]:
            made = httpx.post(f"http://{host}:{port}/apply-template", json=chat(1), timeout=60)
            assert made.json() == {"prompt": "<<hi>>Ada"}, host
            refused = httpx.get(f"http://{host}:{port}/health", headers={"host": "elsewhere.example"})
            assert refused.status_code == 403
        serving.process.send_signal(signal.SIGHUP)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        serving.process.send_signal(signal.SIGINT)
        code, errors = serving.end()
    assert code == 130, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-m a.gguf -c 8192 -np 4 --host 0.0.0.0 --port 8080",
         "-m a.gguf --ctx 8192 --slots 4 --host 0.0.0.0 --port 8080"),
        ("-hf user/repo:Q4_K_M --parallel 2 --jinja -fa -ngl 99",
         "-m user/repo:Q4_K_M --slots 2 -fa on --gpu-layers 99"),
        ("--hf-repo user/repo --flash-attn --no-mmap -cb", "-m user/repo -fa on --no-mmap"),
        ("-m a.gguf --model-draft b.gguf --gpu-layers-draft 9 -ctk q8_0 -ctv q8_0 -fa off",
         "-m a.gguf -md b.gguf -ngld 9 --cache-type-k q8_0 --cache-type-v q8_0 -fa off"),
        ("-m a.gguf -a gpt-4 -b 256 -ub 128 -t 3 -tb 4",
         "-m a.gguf --alias gpt-4 --batch-size 256 --ubatch-size 128 --threads 3 --threads-batch 4"),
        ("-m a.gguf --temperature 0.5 -s 7 --no-context-shift --embeddings", "-m a.gguf --temp 0.5 --seed 7"),
        ("-m a.gguf -mm p.gguf --sleep-idle-seconds 60", "-m a.gguf --mmproj p.gguf --idle 60s"),
    ],
)  # fmt: skip
def test_lines_of_llama_server_mean_the_same_here(theirs: str, ours: str) -> None:
    parsed = [serve_module.serve.make_context("serve", line.split()).params for line in (theirs, ours)]
    assert parsed[0] == parsed[1]


def test_as_many_slots_are_offered_as_llama_cpp_has_ids_for() -> None:
    assert MOST_IDS // ContextSettings().n_branches == MOST_SLOTS


@pytest.mark.parametrize(
    ("mode", "taken"), [(0o600, True), (0o440, True), (0o644, False), (0o620, False), (0o601, False)]
)
def test_a_key_file_that_other_users_can_use_is_refused(tmp_path: Path, mode: int, taken: bool) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a key of mine\n")
    keys.chmod(mode)
    if taken:
        assert serve_module._keys(keys) == (b"a key of mine",)
        return
    with pytest.raises(InputInvalid, match=f"mode {mode:04o}.*chmod 600") as caught:
        serve_module._keys(keys)
    assert "mine" not in str(caught.value)
