"""The tables of what is used of llama-cpp-python equal what the code uses, and a version that lacks it is refused."""

import ast
import ctypes
import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rest_local.llama import loaded, needed
from rest_local.llama.library import LogLines

ROOM = Path(needed.__file__).parent
# By the name under which a structure's fields are set in this room.
STRUCTURES = {
    "params": "llama_context_params", "context_parameters": "llama_context_params", "struct": "llama_model_params",
    "parameters.struct": "llama_model_params", "parameters": "mtmd_context_params",
}  # fmt: skip


def nodes() -> Iterator[ast.AST]:
    for path in sorted(ROOM.glob("*.py")):
        if path.name not in ("needed.py", "loaded.py"):
            yield from ast.walk(ast.parse(path.read_text("utf-8")))


def attributes(*modules: str) -> set[str]:
    found = {n.attr for n in nodes() if isinstance(n, ast.Attribute) and ast.unparse(n.value) in modules}
    return found - {"_lib", "__version__"}


def test_the_names_are_those_that_the_code_uses() -> None:
    assert " ".join(needed.BINDINGS) == " ".join(sorted(attributes("bindings", "llama_cpp")))
    used = {name for name in attributes("mtmd", "mtmd_cpp", "self._mtmd") if "mtmd" in name.lower()}
    assert " ".join(needed.IMAGES) == " ".join(sorted(used))


def test_the_symbols_are_those_that_the_code_uses() -> None:
    calls = [n for n in nodes() if isinstance(n, ast.Call) and ast.unparse(n.func) in ("ggml", "_text")]
    used = {n.args[0].value for n in calls if isinstance(n.args[0], ast.Constant)}
    assert list(needed.SYMBOLS) == sorted(map(str, used))


def test_the_fields_are_those_that_the_code_sets() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for node in nodes():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            structure = STRUCTURES.get(ast.unparse(node.value))
            if structure:
                used[structure].add(node.attr)
    assert {name: list(fields) for name, fields in needed.FIELDS.items()} == {
        name: sorted(fields) for name, fields in sorted(used.items())
    }


def test_the_installed_version_lacks_nothing() -> None:
    from llama_cpp import mtmd_cpp

    assert needed.lacking(loaded.bindings) == []
    assert needed.lacking_for_images(mtmd_cpp) == []


class OldParameters(ctypes.Structure):
    _fields_ = (("use_mmap", ctypes.c_bool),)


class Without:
    """The bindings without some names, and with structures of an older version."""

    def __init__(self, *names: str, **replaced: Any) -> None:
        self._names, self._replaced = names, replaced
        self._lib = SimpleNamespace(ggml_version=1)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(name)
        return self._replaced.get(name) or getattr(loaded.bindings, name)


def test_names_fields_and_symbols_that_are_gone_are_named() -> None:
    old: Any = Without("llama_version", llama_model_params=OldParameters)
    lacks = needed.lacking(old)
    assert "llama_version" in lacks
    assert {"llama_model_params.load_mode", "llama_model_params.load_mtp", "ggml_commit"} <= {*lacks}
    assert "ggml_version" not in lacks
    assert not any(name.startswith("llama_context_params") for name in lacks)


# An llama_cpp package of its own, which stands before the real one in the path of the child.
BROKEN = {
    "raise ImportError('libgomp.so.1: cannot open shared object file')": "cannot be loaded (libgomp.so.1",
    "raise RuntimeError('Failed to load shared library')": "cannot be loaded (Failed to load shared library",
    "from types import SimpleNamespace\n__version__ = '0.2.90'\nllama_cpp = SimpleNamespace(_lib=None)\n": (
        "0.2.90 lacks GGML_NUMA_STRATEGY_DISTRIBUTE, "
    ),
}


@pytest.mark.parametrize("code", BROKEN, ids=["import", "library", "names"])
def test_a_library_that_cannot_be_used_is_one_line(code: str, tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(code, "utf-8")
    run = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOM.parents[1])!r}]\n"
    run += "from rest_local.cli.main import run; sys.exit(run(['generate', '-n', '1', 'x']))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert BROKEN[code] in done.stderr
    assert f"pip install 'llama-cpp-python=={needed.TESTED[-1]}'" in done.stderr


def test_the_page_of_compatibility_lists_the_versions_that_are_advised() -> None:
    page = (ROOM.parents[1] / "docs" / "COMPATIBILITY.md").read_text("utf-8")
    works = [line.split(" | ")[0].strip("| ") for line in page.splitlines() if line.endswith("| works |")]
    assert tuple(works) == needed.TESTED


# ---- The log -------------------------------------------------------------------------------------------------------


DEBUG, INFO, WARN, ERROR, CONT = 1, 2, 3, 4, 5


@pytest.fixture
def lines() -> LogLines:
    return LogLines(logging.getLogger("rest_local.llama.test"))


def test_a_message_of_several_lines_becomes_several_records(lines: LogLines, caplog: pytest.LogCaptureFixture) -> None:
    lines.feed(WARN, b"one\ntwo\n")
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, "one"),
        (logging.WARNING, "two"),
    ]


def test_a_continued_message_is_one_record_with_the_level_of_its_start(
    lines: LogLines, caplog: pytest.LogCaptureFixture
) -> None:
    for level, text in ((ERROR, b"tensor "), (CONT, b"'x' "), (CONT, b"missing"), (CONT, b"\n")):
        lines.feed(level, text)
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.ERROR, "tensor 'x' missing")]


def test_only_errors_are_collected_and_only_inside_the_block(lines: LogLines) -> None:
    with lines.collected_errors() as outer:
        lines.feed(ERROR, b"a\n")
        with lines.collected_errors() as inner:
            lines.feed(WARN, b"b\n")
            lines.feed(ERROR, b"c\n")
    lines.feed(ERROR, b"d\n")
    assert (outer, inner) == (["a", "c"], ["c"])
