"""llama-server as a side: each fault of a binary becomes SideFailed with the reason, and nothing of it remains.

The stand-ins are scripts that speak just enough HTTP. test_real_llama_server.py has tests with the real program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import gone

from rest_local.bench.comparing.llama_server import PLAIN, Binary, LlamaServer, Pace, sides_of
from rest_local.bench.comparing.program import ProgramFailed
from rest_local.bench.comparing.sides import SideFailed, Task

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a script is no program on Windows")

STAND_IN = """#!{python}
import os, signal, socket, sys, time

def answer(connection, content, status=200, length=None):
    head = "HTTP/1.1 %d X\\r\\nContent-Length: %d\\r\\n\\r\\n" % (status, len(content) if length is None else length)
    connection.sendall(head.encode() + content)

def asked(connection):
    text = b""
    while b"\\r\\n\\r\\n" not in text:
        text += connection.recv(65536)
    head, _, body = text.partition(b"\\r\\n\\r\\n")
    length = [int(line.split(b":")[1]) for line in head.split(b"\\r\\n") if line.lower().startswith(b"content-length")]
    while length and len(body) < length[0]:
        body += connection.recv(65536)
    return head.split()[1].decode()

GOOD = b'{{"tokens": [7, 8, 9, 10], "stop_type": "limit", "timings": ' \\
    b'{{"predicted_ms": 6.5, "predicted_n": 4, "draft_n": 5, "draft_n_accepted": 2}}}}'

def completed(connection):
    answer(connection, GOOD)

def health(connection):
    answer(connection, b"{{}}")

{fault}

def serve():
    with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                (health if asked(connection) == "/health" else completed)(connection)

serve()
"""
HELP = """
--model FNAME   the model
--port N        port
--ctx-size N    context
--offline       no network
--spec-type none,draft-simple,draft-mtp,ngram-simple,ngram-mod
                comma-separated list of types (default: none)

--spec-ngram-mod-n-min N   of ngram-mod
"""
TASK = Task("one", "completion", [1, 2, 3], 4)
QUICK = Pace(least=0.5, first_start=20.0, first_answer=20.0)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    def write(fault: str = "", *, text: str = STAND_IN) -> Path:
        path = tmp_path / "llama-server"
        path.write_text(text.format(python=sys.executable, fault=fault) if text is STAND_IN else text)
        path.chmod(0o755)
        return path

    return write


def side(path: Path, kind: str = PLAIN, pace: Pace = QUICK) -> LlamaServer:
    kinds = (PLAIN, "draft-simple", "ngram-simple", "ngram-mod")
    return LlamaServer(Binary(str(path), "9.9", kinds, frozenset()), Path("m.gguf"), (), pace, kind)


def server_of(opened: LlamaServer) -> tuple[int, int]:
    """Process and port."""
    assert opened._server is not None
    return opened._server.pid, opened._server.port


def test_an_answer_becomes_a_run(script: Callable[..., Path]) -> None:
    opened = side(script())
    opened.open()
    started = server_of(opened)
    run = opened.run(TASK)
    assert (run.tokens, run.ms, run.steps, run.drafted, run.accepted) == ([7, 8, 9, 10], 6.5, 1, 5, 2)
    opened.run(TASK)
    assert server_of(opened) == started
    opened.close()
    opened.close()
    with pytest.raises(ProcessLookupError):  # it was waited for
        os.kill(started[0], 0)
    assert gone(*started)


def test_an_end_token_is_no_part_of_the_answer(script: Callable[..., Path]) -> None:
    opened = side(script('GOOD = GOOD.replace(b"limit", b"eos")'))
    opened.open()
    run = opened.run(TASK)
    opened.close()
    assert (run.tokens, run.steps) == ([7, 8, 9], 1)


@pytest.mark.parametrize(("kind", "again"), [("ngram-simple", False), ("draft-simple", False), ("ngram-mod", True)])
def test_a_type_that_remembers_gets_a_new_server_for_each_task(
    kind: str, again: bool, script: Callable[..., Path]
) -> None:
    opened = side(script(), kind)
    assert opened.options["new_server_for_each_task"] is again
    opened.open()
    first = server_of(opened)
    opened.run(TASK)
    assert server_of(opened) == first
    opened.run(TASK)
    assert (server_of(opened) != first) is again
    opened.close()


DIES = "import ctypes\nos.kill(os.getpid(), signal.SIGKILL)"
HANGS = "time.sleep(600)"
START = {
    "an unknown option": (
        'print("error: invalid argument: --spec-type"); sys.exit(1)',
        "exit code 1.*invalid argument",
    ),
    "a crash": (DIES, r"ends at its start with signal 9 \(SIGKILL\); it wrote nothing"),
    "no port": (HANGS, "not ready after 0.5 s"),
    "always loading": ('def health(c): answer(c, b"{}", 503)', "not ready after 0.5 s"),
    "no answer": (f"def health(c): {HANGS}", "not ready after 0.5 s"),
    "no HTTP": ('def health(c): c.sendall(b"\\0\\1garbage\\r\\n" * 99)', "not ready after 0.5 s"),
    "an exception": ("raise OSError('no \\033[31mmodel')", "exit code 1.*no .*model"),
}


@pytest.mark.parametrize("fault", START)
def test_a_fault_at_the_start(fault: str, script: Callable[..., Path]) -> None:
    code, message = START[fault]
    seconds = 0.5 if "0.5" in message else 20.0
    opened = side(script(code), pace=Pace(first_start=seconds))
    with pytest.raises(SideFailed, match=message) as failed:
        opened.open()
    assert failed.value.side == "llama-server"
    assert str(failed.value).isprintable()
    opened.close()


ANSWER = {
    "a crash": (DIES.splitlines()[1], r"ends in the middle of an answer with signal 9 \(SIGKILL\)"),
    "a crash after half": (
        f"answer(c, GOOD[:20], length=99); {DIES.splitlines()[1]}",
        "ends in the middle of an answer",
    ),
    "a hang": (HANGS, "does not answer within 0.5 s"),
    "a byte from time to time": ("[(c.sendall(b'HTTP'[:1]), time.sleep(0.05)) for _ in range(9999)]", "within 0.5 s"),
    "a closed connection": ("pass", "breaks off an answer"),
    "half an answer": ("answer(c, GOOD[:20], length=99)", "breaks off an answer"),
    "no JSON": ("answer(c, b'<html>\\0\\xff')", "something else than a JSON object: '<html>"),
    "a list": ("answer(c, b'[1]')", r"something else than a JSON object: '\[1\]'"),
    "deep nesting": ("answer(c, b'[' * 99999)", "something else than a JSON object"),
    "an error": ('answer(c, b\'{"error": "too long"}\', 400)', "status 400.*too long"),
    "no tokens": ("answer(c, GOOD.replace(b'tokens', b'words'))", "not an answer of llama-server.*tokens"),
    "texts for tokens": ("answer(c, GOOD.replace(b'[7', b'[\"a\"'))", "not token ids"),
    "no timings": ("answer(c, GOOD.replace(b'6.5', b'null'))", "not numbers"),
    "impossible counts": ("answer(c, GOOD.replace(b'5, \"draft', b'1, \"draft'))", "2 of 1 drafted"),
    "endless time": ("answer(c, GOOD.replace(b'6.5', b'Infinity'))", "inf ms"),
}


@pytest.mark.parametrize("fault", ANSWER)
def test_a_fault_in_an_answer(fault: str, script: Callable[..., Path]) -> None:
    code, message = ANSWER[fault]
    limit = 0.5 if "0.5" in message else 20.0
    opened = side(script(f"def completed(c): {code}"), pace=Pace(first_answer=limit))
    opened.open()
    started = server_of(opened)
    with pytest.raises(SideFailed, match=message) as failed:
        opened.run(TASK)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 2000
    assert gone(*started)
    with pytest.raises(SideFailed, match="not open"):
        opened.run(TASK)
    opened.close()


def test_megabytes_of_output_do_not_block_and_the_last_lines_are_told(script: Callable[..., Path]) -> None:
    code = "def completed(c):\n    print('x' * 5_000_000); print('the last words', flush=True); answer(c, b'no')"
    opened = side(script(code))
    opened.open()
    with pytest.raises(SideFailed, match="the last words") as failed:
        opened.run(TASK)
    assert len(str(failed.value)) < 1000


def test_children_of_a_server_end_with_it(script: Callable[..., Path], tmp_path: Path) -> None:
    note = tmp_path / "child"
    code = f"""
child = os.fork()
if not child:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
open({str(note)!r}, "w").write(str(child))
"""
    opened = side(script(code))
    opened.open()
    opened.close()
    assert gone(int(note.read_text()))


def test_a_server_that_ignores_the_request_to_end_is_killed(script: Callable[..., Path]) -> None:
    opened = side(script("signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    opened.open()
    started = server_of(opened)
    opened.close()
    assert gone(*started)


def test_an_interrupt_ends_the_server(script: Callable[..., Path]) -> None:
    opened = side(script(f"def completed(c): os.kill({os.getpid()}, signal.SIGINT); time.sleep(600)"))
    opened.open()
    started = server_of(opened)
    with pytest.raises(KeyboardInterrupt):
        opened.run(TASK)
    assert gone(*started)


def test_the_server_ends_when_this_process_is_killed(script: Callable[..., Path]) -> None:
    code = f"""
import time
from test_llama_server_side import *
opened = side(Path({str(script())!r}))
opened.open()
print(*server_of(opened), flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid, port = map(int, parent.stdout.readline().split())
        parent.kill()
    assert gone(pid, port)


def test_limits_are_in_proportion_to_the_plain_server() -> None:
    pace = Pace(factor=10.0, least=2.0, first_start=99.0, first_answer=98.0)
    assert (pace.start_limit(), pace.answer_limit(TASK)) == (99.0, 98.0)
    pace.started(0.1)
    pace.answered(TASK, 0.1)
    assert (pace.start_limit(), pace.answer_limit(TASK)) == (2.0, 2.0)
    pace.started(3.0)
    pace.answered(TASK, 7.0)  # 1 s for each token of prompt and answer
    longer = Task("two", "completion", [1] * 10, 10)
    assert (pace.start_limit(), pace.answer_limit(TASK), pace.answer_limit(longer)) == (30.0, 70.0, 200.0)


def told(version: str = "version: 1.2 (abc)", described: str = HELP) -> str:
    return f"#!{sys.executable}\nimport sys\nprint({version!r} if sys.argv[1] == '--version' else {described!r})\n"


def test_the_sides_of_a_binary_are_those_that_its_help_names(script: Callable[..., Path], tmp_path: Path) -> None:
    heads = {"draft-simple": tmp_path / "small.gguf", "draft-mtp": None, "draft-eagle3": tmp_path / "head.gguf"}
    sides = sides_of(script(text=told()), tmp_path / "m.gguf", heads, 2, 512, arguments=("-ngl", "0"))
    names = ["llama-server", *(f"llama-server {kind}" for kind in ("ngram-simple", "ngram-mod", *heads))]
    assert [side.name for side in sides] == names
    assert sides[0].options["version"] == "1.2 (abc)"
    assert sides[0].options["arguments"] == ["-c", "512", "-np", "1", "-t", "2", "--offline", "-ngl", "0"]
    assert sides[3].options["head"] == "small.gguf"
    with pytest.raises(SideFailed, match=r"1\.2 .* no --spec-type draft-eagle3, only: none, draft-simple"):
        sides[-1].open()


NOT_SERVERS = {
    "nothing": "#!/bin/sh\n",
    "garbage": "#!/bin/sh\nhead -c 3000000 /dev/urandom\n",
    "no version": told(version="hello"),
    "another program": told(described="--port and --model, but a web server"),
    "no program": "\0\1\2",
    "no interpreter": "#!/no/such/interpreter\n",
}


@pytest.mark.parametrize("what", NOT_SERVERS)
def test_another_program_is_told(what: str, script: Callable[..., Path]) -> None:
    (absent,) = sides_of(script(text=NOT_SERVERS[what]), Path("m.gguf"), {}, 1, 512)
    with pytest.raises(SideFailed, match=r"not a llama-server|cannot be started") as failed:
        absent.open()
    assert str(failed.value).isprintable()
    absent.close()


def test_no_binary_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, cause in (("none", "no such program"), ("file", "not an executable"), ("", "not an executable")):
        (absent,) = sides_of(tmp_path / name, Path("m.gguf"), {}, 1, 512)
        with pytest.raises(SideFailed, match=cause):
            absent.open()


def test_a_binary_that_hangs_when_asked_for_its_version_is_told(script: Callable[..., Path]) -> None:
    with pytest.raises(ProgramFailed, match=r"does not end within 0\.3 s when it is called with --version"):
        Binary.of(script(text="#!/bin/sh\nwhile true; do echo y; done\n"), 0.3)


def test_options_of_the_environment_do_not_reach_the_server(
    script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_THREADS", "7")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    opened = side(script('assert not [name for name in os.environ if name.startswith("LLAMA_ARG")]'))
    opened.open()
    opened.close()
