"""The tutorial, the how-to pages and the first page: every block of `sh` and `python` runs as written, in order.

Blocks marked `console` say why not (`test_documents.py`); blocks of `curl` are run by
`server/clients/test_documented_commands.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.mimo2 import convert
from rest_local.paths import demo_model

DOCS = Path(__file__).parents[1] / "docs"
COMPILES = DOCS / "howto" / "peer-drafts.md"  # llama.cpp's server, and takes ten minutes
PAGES = [DOCS / "index.md", DOCS / "tutorial.md", DOCS / "DRAFTERS.md"]
PAGES += sorted({*(DOCS / "howto").glob("*.md")} - {COMPILES})
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [page for page in PAGES if BLOCK.search(page.read_text("utf-8"))]  # of the others nothing can be run
SHAPES = 'def area(width, height):\n    """The area of a rectangle."""\n    return width * height\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models and code under the names of the pages, and `rest-local` on the path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "rest-local"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m rest_local "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "data" / "datastores"))
    monkeypatch.setenv("REST_LOCAL_CONFIG", str(tmp_path / "config.toml"))
    place = tmp_path / "place"
    (place / "src").mkdir(parents=True)
    (place / "src" / "shapes.py").write_text(SHAPES)
    for name in ("model.gguf", "small.gguf"):
        shutil.copy(demo_model(), place / name)  # a link would be the demo model, which cannot chat
    shutil.copy(demo_model().with_name("demo-eagle3.gguf"), place / "eagle3.gguf")
    convert(demo_model(), place / "with-mtp.gguf", demo_model().with_name("demo-mtp.gguf"))
    return place


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(page: Path, folder: Path) -> None:
    blocks, drafted = BLOCK.findall(page.read_text("utf-8")), []
    for language, block in blocks:
        if block.startswith("curl http"):
            continue  # they need a server
        command = ["sh", "-euc", block] if language == "sh" else [sys.executable, "-c", block]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Warning" not in done.stderr
        assert "going on without" not in done.stderr, block
        if " --json -" in block:
            drafted.append(json.loads(done.stdout)["draft"])
    if page.stem == "tutorial":  # its steps show that drafting works
        for draft, source in zip(drafted, ("datastore", "prediction"), strict=True):
            assert draft["by_source"][source]["accepted"] > 0
            assert draft["accepted"] > draft["steps"], "more than half of the text"
