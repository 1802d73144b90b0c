"""What of the installation is there and what is missing: the libraries, those of the extras, and llama-cpp-python.

It reads the metadata that pip, pipx or uv have installed, so the names and versions are those of pyproject.toml. Of the
libraries only llama-cpp-python is loaded, because having it does not mean that it can be used (`llama.loaded`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local.errors import LibraryUnfit

if TYPE_CHECKING:
    from packaging.requirements import Requirement

NAME = "rest-local"
THERE = "all there"
EXTRAS = {
    "ray": "`batch` and `index build` on a Ray cluster",
    "parquet": "Parquet files as sources of a datastore",
    "images": "images in requests",
    "models": "training and export of the demo model, in a checkout",
}


def examine() -> dict[str, Any]:
    """The state of the installation, JSON-ready. Loads llama.cpp.

    `missing`: in words, each required library that is missing or does not fit. `llama_cpp`: why it cannot be used, or
    None; `lacks`: what it lacks. `extras`: by name, `for`, `missing` and `install`, the command that adds them. `note`:
    why there is nothing to compare with, or None.
    """
    from importlib import metadata

    required: list[str] = []
    extras: dict[str, dict[str, Any]] = {}
    note = None
    try:
        required, extras = _compared(metadata.requires(NAME) or [])
    except metadata.PackageNotFoundError:
        note = "rest-local runs from a folder and is not installed, so no versions were compared"
    except ImportError as error:  # of `packaging`, without which no version can be compared
        required = [f"{(error.name or 'packaging').split('.')[0]} is not installed"]
    unfit, lacks = _unfit()
    return {"missing": required, "llama_cpp": unfit, "lacks": lacks, "extras": extras, "note": note}


def problems(state: Mapping[str, Any]) -> list[str]:
    """What keeps rest-local from working, each with the way out."""
    missing = [f"{', '.join(state['missing'])}: {command()}"] if state["missing"] else []
    return [*missing, *([state["llama_cpp"]] if state["llama_cpp"] else [])]


def rows(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and words of each line of the report."""
    yield "required", state["note"] or "; ".join(problems(state)) or THERE
    if state["lacks"]:
        yield "lacking", ", ".join(state["lacks"])
    for name, extra in state["extras"].items():
        missing = ", ".join(extra["missing"])
        yield name, f"{missing}: {extra['install']} ({extra['for']})" if missing else THERE


def command(extra: str = "") -> str:
    """The command that installs what is missing, for the tool that installed this."""
    what = f"'{NAME}[{extra}]'" if extra else NAME
    if (Path(sys.prefix) / "pipx_metadata.json").exists():
        return f"pipx install --force {what}"
    if (Path(sys.prefix) / "uv-receipt.toml").exists():
        return f"uv tool install --force {what}"
    return f"pip install {what}"


def _compared(requirements: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """What is missing of the required libraries, and the state of each extra."""
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in requirements]
    extras = {}
    for name in EXTRAS:
        wanted = [requirement for requirement in parsed if _added(requirement, name)]
        if wanted:
            extras[name] = {"for": EXTRAS[name], "missing": list(_missing(wanted)), "install": command(name)}
    return list(_missing(r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""}))), extras


def _added(requirement: Requirement, extra: str) -> bool:
    """Whether `extra` asks for it, and rest-local alone does not."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _missing(requirements: Iterable[Requirement]) -> Iterator[str]:
    from importlib import metadata

    for requirement in requirements:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} does not fit ({requirement.name}{requirement.specifier})"


def _unfit() -> tuple[str | None, list[str]]:
    """Why llama-cpp-python cannot be used, and what it lacks."""
    try:
        import rest_local.llama.loaded  # noqa: F401
    except LibraryUnfit as error:
        return error.problems[0], list(error.lacks)
    return None, []
