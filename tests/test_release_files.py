"""The files of a release: the container image, the services, the templates of the repository."""

import ast
import configparser
import contextlib
import ctypes
import fnmatch
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rest_local.cli.main import cli
from rest_local.server.http import DRAIN_SECONDS

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
SYSTEM = ROOT / "packaging" / "systemd" / "rest-local.service"
USER = ROOT / "packaging" / "systemd" / "user" / "rest-local.service"
ANALYZE = shutil.which("systemd-analyze")
SAVING_SECONDS = 10  # docs/SERVER.md: what writing conversations may take at the end
PR_SET_MDWE = 65


def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the Dockerfile and its arguments, with continued lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, arguments.strip()) for name, _, arguments in pairs]


def arguments_of(name: str) -> list[str]:
    return [arguments for each, arguments in instructions() if each == name]


def variables() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(" ".join(arguments_of("ENV"))))


def serve() -> click.Command:
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    return command


def keys_of_serve() -> set[str]:
    return {str(parameter.envvar) for parameter in serve().params if parameter.envvar}


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def in_context(path: str) -> bool:
    """Return True if .dockerignore lets a tracked file through: the last pattern that matches decides."""
    let = True
    for pattern in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        bare = pattern.removeprefix("!").rstrip("/")
        if bare and not pattern.startswith("#") and (fnmatch.fnmatch(path, bare) or path.startswith(bare + "/")):
            let = pattern.startswith("!")
    return let


def test_what_the_image_copies_is_in_its_context() -> None:
    files = [path for path in tracked() if in_context(path)]
    for arguments in arguments_of("COPY"):
        if not arguments.startswith("--from"):
            *sources, _ = shlex.split(arguments)
            assert all(source == "." or source in files for source in sources)
    wheel = (ROOT / "pyproject.toml").read_text("utf-8").partition("force-include]")[2].partition("[tool.hatch")[0]
    included = re.findall(r'^"([^"]+)" =', wheel, re.MULTILINE)
    assert len(included) > 5
    assert {"README.md", "LICENSE", "rest_local/cli/main.py", *included} <= {*files}
    assert not [path for path in files if path.startswith(("tests/", "benchmarks/", ".git"))]


def test_the_image_serves_as_a_user_of_its_own_and_with_keys_only() -> None:
    environment = variables()
    assert arguments_of("USER") == ["10001:10001"]
    assert [json.loads(each) for each in arguments_of("ENTRYPOINT")] == [["rest-local"]]
    assert [json.loads(each) for each in arguments_of("CMD")] == [["serve"]]
    options = {name for name in environment if name.startswith("REST_LOCAL_")}
    folders = {"REST_LOCAL_MODELS", "REST_LOCAL_DATA", "REST_LOCAL_CACHE", "REST_LOCAL_CONFIG"}
    assert options - folders <= keys_of_serve(), "options that serve has"
    assert environment["REST_LOCAL_HOST"] == "0.0.0.0"
    volumes = json.loads(arguments_of("VOLUME")[0])
    assert all(Path(environment[name]).parts[1] in {each.strip("/") for each in volumes} for name in folders)
    assert environment["REST_LOCAL_API_KEY_FILE"].startswith("/data/"), "on a volume, never in the image"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def forbid_code_in_data() -> None:
    """Forbid it in this process and its children, as MemoryDenyWriteExecute= does. Linux 6.3 and later."""
    ctypes.CDLL(None).prctl(PR_SET_MDWE, 1, 0, 0, 0)


@contextlib.contextmanager
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
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def check(port: int) -> bool:
    """Run the image's own health check, as it stands there."""
    command = json.loads(arguments_of("HEALTHCHECK")[0].partition("CMD ")[2])
    assert command[:2] == ["python3", "-c"]
    ast.parse(command[2])
    done = subprocess.run(
        [sys.executable, *command[1:]], env={**os.environ, "REST_LOCAL_PORT": str(port)}, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.returncode == 0


def health(port: int) -> int:
    """Return the status of /health, or 0 if nothing listens."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request("GET", "/health")
        return client.getresponse().status
    except ConnectionError:
        return 0
    finally:
        client.close()


def becomes_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 120
    while health(port) != 200:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < end, "not healthy after two minutes"
        time.sleep(0.05)
    assert check(port)


def unit_variables(unit: Path, state: Path, cache: Path) -> dict[str, str]:
    words = re.findall(r"^Environment=(.*)$", unit.read_text("utf-8"), re.MULTILINE)
    filled = " ".join(words).replace("%S", str(state)).replace("%C", str(cache))
    return dict(word.split("=", 1) for word in filled.split())


def test_a_service_loads_answers_and_ends_in_the_environment_of_its_unit(free_port: int, tmp_path: Path) -> None:
    """It has only the unit's variables, no home directory, and no writable memory that can be executed.

    The health check is the image's.
    """
    environment = unit_variables(SYSTEM, tmp_path / "lib", tmp_path / "cache")
    assert environment["HOME"] == str(tmp_path / "lib" / "rest-local"), "what StateDirectory= makes"
    environment |= {"REST_LOCAL_CONFIG": str(tmp_path / "none.toml"), "REST_LOCAL_PORT": str(free_port)}
    assert not check(free_port)
    restrict = forbid_code_in_data if sys.platform == "linux" else None
    with served(environment, preexec_fn=restrict) as process:
        becomes_healthy(process, free_port)
        client = http.client.HTTPConnection("127.0.0.1", free_port, timeout=60)
        body = json.dumps({"prompt": "def area(", "max_tokens": 4})
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert json.loads(client.getresponse().read())["usage"]["completion_tokens"] == 4
        client.close()
        process.terminate()
        assert process.wait(stop_seconds(SYSTEM)) == 0


def test_the_image_refuses_to_serve_without_keys(free_port: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in variables().items() if name.startswith("REST_LOCAL_")}
    environment = {name: value.replace("/data", str(tmp_path)) for name, value in environment.items()}
    environment |= {"REST_LOCAL_CACHE": str(tmp_path / "c"), "REST_LOCAL_PORT": str(free_port), "HOME": str(tmp_path)}
    with served(environment) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"keys" in said


def unit_of(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text("utf-8"))
    return parser["Service"]


def stop_seconds(unit: Path) -> int:
    return int(unit_of(unit)["TimeoutStopSec"])


@pytest.mark.parametrize("unit", [SYSTEM, USER], ids=["system", "user"])
def test_units_of_systemd(unit: Path) -> None:
    service = unit_of(unit)
    command = shlex.split(service["ExecStart"])
    assert (Path(command[0]).name, command[1]) == ("rest-local", "serve")
    serve().make_context("serve", command[2:])
    assert stop_seconds(unit) > DRAIN_SECONDS + SAVING_SECONDS
    assert service["KillMode"] == "mixed", "the server ends the processes of its models itself"
    assert service["Type"] == "exec"
    assert service["UMask"] == "0077"


def verified(folder: Path, *units: Path) -> str:
    """Return what `systemd-analyze verify` says of units and drop-ins whose programs are there."""
    for unit in units:
        target = folder / unit.name
        if unit.suffix == ".conf":
            target = folder / "rest-local.service.d" / unit.name
            target.parent.mkdir(exist_ok=True)
        text = unit.read_text("utf-8").replace("/usr/local/bin/rest-local", "/bin/true")
        target.write_text(text.replace("%h/.local/bin/rest-local", "/bin/true"))
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", "--recursive-errors=no", str(folder / "rest-local.service")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("system", "user", "wrong")]
    for folder in folders:
        folder.mkdir()
    said = verified(folders[0], SYSTEM, *(SYSTEM.parent / name for name in ("gpu.conf", "network.conf")))
    if "Failed to" in said:
        pytest.skip(said.strip())
    assert said == ""
    assert verified(folders[1], USER) == ""
    wrong = tmp_path / SYSTEM.name
    wrong.write_text(SYSTEM.read_text("utf-8").replace("ProtectSystem", "ProtectSysem"))
    assert "ProtectSysem" in verified(folders[2], wrong), "it does look"
