"""`rest-local doctor` on installations that lack something: what is named, the way out, and the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from fake_cli_engine import FakeEngine

from rest_local.cli import doctor
from rest_local.errors import LibraryUnfit
from rest_local.llama import needed

Call = Callable[..., Any]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIRES = [
    "numpy>=1.26",
    "click>=8.1",
    'tomli>=2; python_version < "3"',
    "ray[data]>=2.40,<2.64; extra == 'ray'",
    "pyarrow>=14; extra == 'parquet'",
    "pytest>=8; extra == 'test'",
    "rest-local[ray]; extra == 'test'",
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the versions that are installed."""

    def install(requires: list[str] = REQUIRES, **versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "requires", lambda name: requires)
        monkeypatch.setattr(metadata, "version", version)

    return install


def project() -> dict[str, Any]:
    whole: dict[str, Any] = tomlkit.parse(PYPROJECT.read_text("utf-8")).unwrap()
    return whole["project"]  # type: ignore[no-any-return]


def test_the_oldest_version_that_may_be_installed_was_tested() -> None:
    (bound,) = [text for text in project()["dependencies"] if text.startswith("llama-cpp-python")]
    assert bound == f"llama-cpp-python>={needed.TESTED[0]}"


def test_what_is_there_is_said_and_what_an_extra_lacks_has_its_command(installed: Callable[..., None]) -> None:
    installed(numpy="2.4", click="8.1", ray="2.50")
    state = doctor.installation()
    assert dict(doctor.installation_rows(state)) == {
        "required": "all there",
        "ray": "all there",
        "parquet": "pyarrow is not installed: pip install 'rest-local[parquet]' (Parquet files as sources of a "
        "datastore)",
    }
    assert doctor.faults(state) == []


def test_doctor_names_required_libraries_and_exits_with_1(installed: Callable[..., None], call: Call) -> None:
    installed(click="7.0")
    done = call("doctor")
    assert done.code == 1
    cause = "numpy is not installed, click 7.0 does not fit (click>=8.1): pip install rest-local"
    assert cause in done.out
    assert done.err == f"rest-local: error: the installation is incomplete: {cause}\n"
    done = call("doctor", "--json")
    assert done.code == 1
    assert json.loads(done.out)["installation"]["missing"][0] == "numpy is not installed"


def test_a_library_that_cannot_be_used_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "rest_local.llama.loaded":
                raise LibraryUnfit("llama-cpp-python 0.3.34 lacks a, b; install one", ["a", "b"])

    monkeypatch.delitem(sys.modules, "rest_local.llama.loaded", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    state = doctor.installation()
    assert (state["llama_cpp"], state["lacks"]) == ("llama-cpp-python 0.3.34 lacks a, b; install one", ["a", "b"])


def test_a_folder_that_is_not_installed_has_no_versions_to_compare(
    call: Call, fake_engine: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    fake_engine()
    done = call("doctor")
    assert done.code == 0
    assert "is not installed, so no versions were compared" in done.out


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        (None, "pip install 'rest-local[ray]'"),
        ("pipx_metadata.json", "pipx install --force 'rest-local[ray]'"),
        ("uv-receipt.toml", "uv tool install --force 'rest-local[ray]'"),
    ],
)
def test_the_command_is_that_of_the_tool_that_installed_it(
    marker: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if marker:
        (tmp_path / marker).touch()
    assert doctor.command("ray") == expected


def test_a_library_that_is_missing_in_use_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rest_local.decoding.engine", None)
    done = call("generate", "x")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert done.err.endswith("; `rest-local doctor` names what this installation lacks\n")
