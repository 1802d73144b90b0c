"""`rest-local completion`: what is offered, in process and in the shells that are here."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from rest_local.cli.completion import PROGRAM, VARIABLE
from rest_local.cli.main import cli
from rest_local.cli.sections import commands_below

ROOT = Path(__file__).resolve().parents[2]
Offered = Callable[..., list[str]]
HEAVY = ("numpy", "llama_cpp", "llguidance", "rich", "jinja2", "pydantic", "starlette", "tomlkit", "huggingface_hub")


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offered:
    """Return a function that completes the last word of a command line, in a folder with models and datastores."""
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "datastores"))
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    for name in ("datastores/mycode", "datastores/stdlib", "datastores/.removed-1", "data/history/demo-1"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a.gguf", "b.GGUF", "notes.txt", "models/coder.gguf", "hub/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    for name in ("HF_HUB_CACHE", "OLLAMA_MODELS", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "hub"))
    monkeypatch.setenv("REST_LOCAL_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr("rest_local.catalog.stores.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)

    def complete(*words: str) -> list[str]:
        items = BashComplete(cli, {}, PROGRAM, VARIABLE).get_completions(list(words[:-1]), words[-1])
        return [item.value if item.type == "plain" else f"<{item.type}>" for item in items]

    return complete


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("generate -d ", "mycode stdlib"), ("serve -d my", "mycode"), ("serve -d ./my", "<file>"),
        ("index info st", "stdlib"), ("index remove nothing", "<file>"),
        ("generate -m ", "a.gguf b.GGUF coder"), ("batch -m c", "coder"),
        ("generate --draft-model b", "b.GGUF"), ("chat -m ~/models/", "<file>"), ("generate -m zz", "<file>"),
    ],
)  # fmt: skip
def test_names_of_datastores_and_models(offered: Offered, words: str, names: str) -> None:
    assert offered(*words.split(" ")) == names.split()


def test_everything_that_names_a_file_or_a_datastore_is_completed(offered: Offered) -> None:
    """A text without a completer offers nothing, not even files."""
    wanted = re.compile(r"FILE|PATH|FOLDER|MODEL|GGUF|DATASTORE|REPO|DIR")
    other = re.compile(r"=|USER/")  # pairs, and names of a hub, which is not asked

    for _, command in commands_below(cli):
        for parameter in command.params:
            shown = parameter.metavar or (parameter.name or "").upper()
            flag = getattr(parameter, "is_flag", False)
            if wanted.search(shown) and not other.search(shown) and not flag:
                found = parameter.shell_complete(click.Context(command), "")
                assert found, f"{command.name} {shown}: give shell_complete=completion.paths, models or datastores"


@pytest.mark.parametrize("words", ["rest-local generate -d ", "rest-local serve -m "])
def test_nothing_heavy_is_imported(offered: Offered, words: str) -> None:
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print([n for n in {HEAVY!r} if n in sys.modules], file=sys.stderr))\n"
        "from rest_local.cli.main import main\n"
        "main()\n"
    )
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), VARIABLE: "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, cwd=ROOT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.startswith("plain,")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a folder with a program `rest-local` that runs this checkout."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "rest-local"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m rest_local "$@"\n')
    script.chmod(0o755)
    return folder


IN_BASH = """
eval "$(rest-local completion bash)"
COMP_WORDS=({words} '') COMP_CWORD={count}
_rest_local_completion rest-local 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(("words", "expected"), [("rest-local index", "search"), ("rest-local generate -d", "mycode")])
def test_in_a_shell(offered: Offered, program: Path, words: str, expected: str) -> None:
    done = subprocess.run(
        ["bash", "-c", IN_BASH.format(words=words, count=len(words.split()))],
        env={**os.environ, "PATH": f"{program}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert expected in done.stdout.replace("\t", "\n").splitlines(), done.stderr
