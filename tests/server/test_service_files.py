"""The units for systemd and launchd in docs/SERVER.md are well-formed, and the command has their options."""

from __future__ import annotations

import plistlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from rest_local.cli.main import cli
from rest_local.server.http import DRAIN_SECONDS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "SERVER.md").read_text("utf-8")
ANALYZE = shutil.which("systemd-analyze")
LAUNCHD = {"Label", "ProgramArguments", "RunAtLoad", "KeepAlive", "ExitTimeOut", "StandardErrorPath"}


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    return str(found)


def check_command(arguments: list[str]) -> None:
    """Raises click.UsageError for what `rest-local` does not know."""
    assert arguments[0].endswith("/rest-local")
    assert arguments[1] == "serve"
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    command.make_context("serve", arguments[2:])


def test_the_unit_of_launchd() -> None:
    unit = plistlib.loads(block("xml").encode())
    assert unit.keys() == LAUNCHD
    check_command(unit["ProgramArguments"])
    assert unit["ExitTimeOut"] > DRAIN_SECONDS
    assert unit["KeepAlive"] == {"SuccessfulExit": False}


def test_the_unit_of_systemd() -> None:
    lines = dict(line.split("=", 1) for line in block("ini").splitlines() if "=" in line)
    check_command(shlex.split(lines["ExecStart"]))
    assert int(lines["TimeoutStopSec"]) > DRAIN_SECONDS
    for folder in lines["ReadWritePaths"].split():
        assert folder.replace("%h", "~") in DOCUMENT.partition("mkdir -p ")[2].partition("#")[0]


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """For a user with the command where pip installs it."""
    command = tmp_path / ".local" / "bin" / "rest-local"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    unit = tmp_path / "rest-local.service"

    def verified(text: str) -> str:
        unit.write_text(text)
        environment = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [str(ANALYZE), "verify", "--user", str(unit)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    good = block("ini")
    said = verified(good)
    if "Failed to initialize manager" in said:
        pytest.skip(said.strip())
    assert said == ""
    assert "ProtectSysem" in verified(good.replace("ProtectSystem", "ProtectSysem")), "it does look"
