"""The tutorial, the README, the how-to pages and the first page: every block of `sh` and `python` runs as written, in
order, with no variable of the tests. So does each server of a block that says it runs until it is stopped: it starts,
and ends when it is told to.

The tutorial runs from an empty home. The others find what a user has after it: models are measured once for all pages,
answers are short, and one thread waits for no other on a busy machine. What a command imports is there already
(`support.warm`); `test_dist.py` starts fresh processes.

Other blocks marked `console` say why not (`test_documents.py`); blocks of `curl` are run by
`server/clients/test_documented_commands.py`.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.encoders import MEAN_POOLING, encoder
from support.forked import can_fork
from support.repository import Repository
from support.toy import demo_model
from support.warm import Warm

from models.mimo2 import convert

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CLUSTER = DOCS / "howto" / "cluster.md"  # run by retrieval/test_clusters.py
TUTORIAL = DOCS / "tutorial.md"
PAGES = [TUTORIAL, ROOT / "README.md", DOCS / "index.md", DOCS / "DRAFTERS.md"]
PAGES += sorted({*(DOCS / "howto").glob("*.md")} - {CLUSTER})
UNTIL_STOPPED = "<!-- not run: runs until it is stopped -->"
BLOCK = re.compile(rf"^({re.escape(UNTIL_STOPPED)})?\n```(sh|python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRESH = Path(sys.executable).parent
SHAPES = 'def area(width, height):\n    """The area of a rectangle."""\n    return width * height\n'


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return the language (`servers` if it runs until it is stopped) and lines of each block that is run."""
    found = [("servers" if mark else kind, lines) for mark, kind, lines in BLOCK.findall(page.read_text("utf-8"))]
    return [
        (kind, lines) for kind, lines in found if kind != "console" and not re.search("^curl ", lines, re.MULTILINE)
    ]


PAGES = [page for page in PAGES if blocks_of(page)]  # Nothing on the others can be run.


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home with nothing but models and code under the names of the pages, in a checkout with a change."""
    home = tmp_path_factory.mktemp("template")
    checkout = Repository(home / "place")
    checkout.commit("one", {"src/shapes.py": SHAPES, "src/a.py": "size = 1\n"})
    (checkout.path / "src" / "a.py").write_text("size = 2\n")
    shutil.copytree(checkout.path / "src", home / "src" / "myproject")
    for name in ("model.gguf", "small.gguf", "chat.gguf", "7b.gguf", "0.5b.gguf"):
        shutil.copy(demo_model(), checkout.path / name)  # a link would be the demo model, which cannot chat
    shutil.copytree(checkout.path, home / "models", ignore=lambda _, names: {*names} - {"chat.gguf", "small.gguf"})
    encoder(checkout.path / "embed.gguf", MEAN_POOLING)
    requests = [json.dumps({"custom_id": f"r{n}", "prompt": f"def area_{n}(", "max_tokens": 8}) for n in range(6)]
    (checkout.path / "in.jsonl").write_text("\n".join(requests) + "\n")
    shutil.copy(demo_model().with_name("demo-eagle3.gguf"), checkout.path / "eagle3.gguf")
    convert(demo_model(), checkout.path / "with-mtp.gguf", demo_model().with_name("demo-mtp.gguf"))
    return home


@pytest.fixture
def place(page: Path, template: Path, tiny_model: Callable[..., Path]) -> Path:
    """Copy the checkout of `template`, always to the same path, because a measured model is known by its path."""
    home, cache = template.with_name("home"), template.with_name("cache")
    if (home / ".cache").exists():
        shutil.rmtree(cache, ignore_errors=True)
        (home / ".cache").rename(cache)
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(template, home)
    if page.stem in ("exact", "measure"):  # They measure the model, whatever it says.
        shutil.copy(tiny_model("llama"), home / "place" / "model.gguf")
    if page != TUTORIAL:
        (home / ".config" / "rest-local").mkdir(parents=True)
        (home / ".config" / "rest-local" / "config.toml").write_text("tokens = 40\nthreads = 1\n")
        if cache.exists():
            shutil.copytree(cache, home / ".cache")
    return home / "place"


@pytest.fixture(scope="module")
def warm() -> Iterator[Path]:
    """Yield the folder of programs that start at once, where processes can be forked."""
    with contextlib.ExitStack() as stack:
        if can_fork():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-"))  # the path of a socket is short
            yield stack.enter_context(Warm(Path(folder))).bin
        else:
            yield FRESH


def environment(place: Path, programs: Path) -> dict[str, str]:
    path = os.pathsep.join((str(programs), str(FRESH), os.environ["PATH"]))
    return {"PATH": path, "HOME": str(place.parent), "TERM": "dumb", "LANG": "C.UTF-8"}


def run(language: str, block: str, place: Path, programs: Path) -> str:
    """Run a block, and return what it prints."""
    command = ["sh", "-euc", block] if language == "sh" else [str(programs / "python"), "-c", block]
    done = subprocess.run(
        command, cwd=place, env=environment(place, programs), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    assert "Warning" not in done.stderr
    assert "going on without" not in done.stderr, block
    return done.stdout


def start_and_stop(lines: str, place: Path, programs: Path) -> None:
    """Run each until it has loaded its model, on a free port, since tests may run twice at a time."""
    for line in lines.splitlines():
        words = [str(place.parent / word[2:]) if word.startswith("~/") else word for word in shlex.split(line, True)]
        if words:
            port = ["--port", "0"] if words[1] == "serve" else []
            with subprocess.Popen(
                [*words, *port], cwd=place, env=environment(place, programs), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            ) as process:  # fmt: skip
                said = until_it_is_ready(process)
                process.send_signal(signal.SIGTERM)
                said += process.communicate(timeout=600)[0]
            assert process.returncode == 0, f"{line}\n{said}"
            assert "rror" not in said, f"{line}\n{said}"


def until_it_is_ready(process: subprocess.Popen[str]) -> str:
    """Return what it has said when its server is healthy, or when it has ended."""
    assert process.stdout is not None
    said = ""
    while line := process.stdout.readline():
        said += line
        if address := re.search(r"http://[\d.:]+", line):
            while process.poll() is None and not healthy(address[0]):
                time.sleep(0.05)
            break
    return said


def healthy(address: str) -> bool:
    with httpx.Client(timeout=60) as client:
        return client.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(page: Path, place: Path, warm: Path) -> None:
    drafted = []
    for kind, block in blocks_of(page):
        if kind == "servers":
            start_and_stop(block, place, warm)
            continue
        printed = run(kind, block, place, warm)
        if " --json -" in block:
            drafted.append(json.loads(printed)["draft"]["by_source"])
    if page.stem == "tutorial":  # what is drafted there depends on measured times; on a busy machine it is nothing
        assert len(drafted) == 2
