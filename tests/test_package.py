"""The package itself: its table of contents, what an import costs, and which room may know which."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import hypothesis
import pytest

import rest_local
import rest_local.errors
from rest_local.cli.main import cli

PACKAGE = Path(rest_local.__file__).parent
LIBRARIES = ("numpy", "llama_cpp", "llguidance", "rich", "jinja2", "pydivsufsort", "pathspec", "platformdirs")
HEAVY = (
    *LIBRARIES, "ray", "pyarrow", "pydantic", "starlette", "uvicorn", "filelock", "tomlkit", "prompt_toolkit",
    "watchfiles",
)  # fmt: skip
SLOW = ("logging", "tempfile", "difflib", "hashlib", "asyncio", "tomllib")  # some milliseconds each

# Which room may import which, DESIGN.md section 3: downwards only. Modules outside a room (errors, paths) serve all.
BELOW: dict[str, set[str]] = {
    "grammar": set(),
    "chat": {"grammar"},
    "llama": {"grammar"},
    "retrieval": set(),
    "drafting": {"retrieval", "llama"},
    "kv_cache": {"drafting", "llama"},
    "calibration": {"kv_cache", "drafting", "retrieval", "llama"},
    "catalog": {"calibration", "retrieval", "llama"},
    "planning": {"calibration", "drafting", "retrieval", "llama"},
    "decoding": {"catalog", "calibration", "kv_cache", "planning", "drafting", "retrieval", "llama", "grammar", "chat"},
    "editing": {"decoding"},
    "api": {"decoding", "llama", "chat", "grammar"},
    "server": {"api", "decoding", "kv_cache", "retrieval", "llama", "chat"},
    "batch": {"api", "decoding", "catalog", "llama"},
    "router": {"batch", "server", "api", "catalog", "decoding", "llama"},
    "cli": {
        "router", "editing", "batch", "server", "api", "decoding", "calibration", "kv_cache", "planning",
        "drafting", "retrieval", "llama", "chat", "grammar", "catalog",
    },
}  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[str]:
    """Yield the full name of every module that `path` imports, inside functions and TYPE_CHECKING too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def commands_of(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every command and subcommand by its words, the group itself first."""
    yield path
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands_of(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = tuple(commands_of(cli))


def test_table_of_contents_is_sorted_and_complete() -> None:
    assert rest_local.__all__ == sorted(rest_local.__all__)
    assert set(rest_local.__all__) == {*rest_local._HOME, "__version__"}


def test_every_name_loads() -> None:
    assert [getattr(rest_local, name).__name__ for name in rest_local._HOME] == [*rest_local._HOME]


def test_every_error_is_in_the_table_of_contents() -> None:
    values = vars(rest_local.errors).items()
    errors = {name for name, value in values if isinstance(value, type) and value.__module__ == "rest_local.errors"}
    assert errors <= set(rest_local.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = rest_local.Enigne


def test_subcommands_are_among_the_commands() -> None:
    assert {("generate",), ("index",), ("index", "build"), ("history", "forget")} < {*COMMANDS}


HELP = """
import contextlib, io, json, sys
from rest_local.cli.main import run
heavy, told = {names!r}, {{}}
for command in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = run([*command, "--help"])
    loaded = [name for name in heavy if name in sys.modules]
    told[" ".join(command)] = (code, shown.getvalue().startswith("Usage: rest-local"), loaded)
json.dump(told, sys.stdout)
"""


def test_help_imports_nothing_heavy() -> None:
    """The reason why --help answers in well under 150 ms; a time would be a flaky test. All in one process: the first
    command in this list that imports something is the one that does it."""
    code = HELP.format(names=(*HEAVY, *SLOW), commands=COMMANDS[::-1])  # groups load their commands
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert len(told) == len(COMMANDS) > 20
    assert [name for name, said in told.items() if said != [0, True, []]] == []


def test_only_the_llama_room_imports_the_library() -> None:
    outside = [path for path in modules() if path.relative_to(PACKAGE).parts[0] != "llama"]
    offenders = [str(path) for path in outside if any(name.split(".")[0] == "llama_cpp" for name in imports_of(path))]
    assert offenders == []


def test_imports_point_downwards() -> None:
    offenders = []
    for room, below in BELOW.items():
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for name in imports_of(path):
                parts = name.split(".")
                if parts[0] == "rest_local" and len(parts) > 1 and parts[1] in BELOW.keys() - below - {room}:
                    offenders.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert offenders == []


def imports_at_once(path: Path) -> Iterator[str]:
    """Yield the names that `path` imports when it is loaded itself: not in functions, not for types alone."""
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))


def test_no_file_imports_itself_by_way_of_others() -> None:
    paths = [path for path in modules() if path.name != "__init__.py"]
    files = {".".join(("rest_local", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in paths}
    below = {name: {other for other in imports_at_once(path) if other in files} for name, path in files.items()}
    while below:  # take away what needs nothing that is left
        lowest = {name for name, needed in below.items() if not needed & below.keys()}
        assert lowest, f"these import each other, or need files that do: {sorted(below)}"
        below = {name: needed for name, needed in below.items() if name not in lowest}


def test_every_room_is_known() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ("__pycache__", "data")}
    assert rooms == set(BELOW)


def test_no_generated_example_has_a_time_limit() -> None:
    assert hypothesis.settings().deadline is None
