"""The files of a release: the container image and the units of systemd."""

import configparser
import ctypes
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from support.toy import demo_model

from rest_local.cli.main import cli
from rest_local.cli.sections import options_of
from rest_local.server.http import DRAIN_SECONDS

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
SYSTEM = ROOT / "packaging" / "systemd" / "rest-local.service"
USER = ROOT / "packaging" / "systemd" / "user" / "rest-local.service"
ANALYZE = shutil.which("systemd-analyze")
SAVING_SECONDS = 10  # docs/SERVER.md: what writing conversations may take at the end
PR_SET_MDWE = 65


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def served(environment: dict[str, str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process with nothing else in its environment, and kill it at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rest_local", "serve"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def is_healthy(port: int) -> bool:
    """Run the image's own health check."""
    found = re.search(r"^HEALTHCHECK(?:.*\\\n)*.*CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found
    _, *arguments = json.loads(found[1])
    environment = {**os.environ, "REST_LOCAL_PORT": str(port)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True).returncode == 0


def test_the_image_has_options_of_serve_and_refuses_to_serve_without_keys(free_port: int, tmp_path: Path) -> None:
    variables = dict(re.findall(r"\b(REST_LOCAL_\w+)=(\S+)", DOCKERFILE))
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    folders = {f"REST_LOCAL_{name}" for name in ("MODELS", "DATA", "CACHE", "CONFIG")}
    assert folders < variables.keys() <= folders | {str(option.envvar) for option in options_of(command)}
    assert variables["REST_LOCAL_HOST"] == "0.0.0.0"
    environment = {name: re.sub("^/", f"{tmp_path}/", value) for name, value in variables.items()}
    with served({**environment, "REST_LOCAL_PORT": str(free_port), "HOME": str(tmp_path)}) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"keys" in said


def forbid_code_in_data() -> None:
    """Forbid it in this process and its children, as MemoryDenyWriteExecute= does. Linux 6.3 and later."""
    ctypes.CDLL(None).prctl(PR_SET_MDWE, 1, 0, 0, 0)


def service_of(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text("utf-8"))
    return parser["Service"]


def test_a_service_loads_answers_and_ends_in_the_environment_of_its_unit(free_port: int, tmp_path: Path) -> None:
    """It has only the unit's variables, no home directory, and no writable memory that can be executed."""
    words = " ".join(re.findall(r"^Environment=(.*)$", SYSTEM.read_text("utf-8"), re.MULTILINE))
    filled = words.replace("%S", str(tmp_path / "lib")).replace("%C", str(tmp_path / "cache"))
    environment = dict(word.split("=", 1) for word in filled.split())
    assert environment["HOME"] == str(tmp_path / "lib" / "rest-local"), "what StateDirectory= makes"
    environment |= {"REST_LOCAL_CONFIG": str(tmp_path / "none.toml"), "REST_LOCAL_PORT": str(free_port)}
    environment |= {"REST_LOCAL_MODEL": str(demo_model())}
    assert not is_healthy(free_port)
    restrict = forbid_code_in_data if sys.platform == "linux" else None
    with served(environment, preexec_fn=restrict) as process:
        assert process.stderr is not None
        assert any(b'"event": "loaded"' in line for line in process.stderr), "its log says so"
        assert is_healthy(free_port)
        client = http.client.HTTPConnection("127.0.0.1", free_port, timeout=60)
        body = json.dumps({"prompt": "def area(", "max_tokens": 4})
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert json.loads(client.getresponse().read())["usage"]["completion_tokens"] == 4
        client.close()
        process.terminate()
        assert process.wait(int(service_of(SYSTEM)["TimeoutStopSec"])) == 0


@pytest.mark.parametrize("unit", [SYSTEM, USER], ids=["system", "user"])
def test_units_of_systemd(unit: Path, tmp_path: Path) -> None:
    service = service_of(unit)
    program, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, arguments) == ("rest-local", ["serve"])
    assert int(service["TimeoutStopSec"]) > DRAIN_SECONDS + SAVING_SECONDS
    assert service["KillMode"] == "mixed", "the server ends the processes of its models itself"
    assert service["UMask"] == "0077"


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", [SYSTEM, USER], ids=["system", "user"])
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    (tmp_path / "rest-local.service").write_text(re.sub(r"(?<=ExecStart=)\S+", "/bin/true", unit.read_text("utf-8")))
    (tmp_path / "rest-local.service.d").mkdir()
    for more in unit.parent.glob("*.conf"):
        shutil.copy(more, tmp_path / "rest-local.service.d")
    command = [str(ANALYZE), "verify", "--man=no", "--recursive-errors=no", str(tmp_path / "rest-local.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "Failed to" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.stdout, done.stderr) == ("", "")
