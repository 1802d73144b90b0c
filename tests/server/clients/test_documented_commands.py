"""Every `curl` in the documents, as it stands there: only the address is the test's own server's."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from live import Live, Scripted

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("docs/SERVER.md", "docs/CLIENTS.md", "docs/tutorial.md", "docs/howto/editor.md")
ADDRESS = "http://127.0.0.1:8012"

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def commands(text: str) -> list[str]:
    """Return the commands of the blocks of shell, each from its `curl` to the next command or remark."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        parts = re.split(r"^(?=\S)", block, flags=re.MULTILINE)
        found += [part for part in parts if part.startswith("curl ")]
    return found


WRITTEN = [(name, command) for name in DOCUMENTS for command in commands((ROOT / name).read_text("utf-8"))]


def run(command: str, live: Live, folder: Path) -> str:
    assert ADDRESS in command
    (folder / "keys").write_text("any\n")
    done = subprocess.run(
        ["sh", "-c", command.replace(ADDRESS, live.url).replace("curl ", "curl -sS --fail-with-body ", 1)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_documented_command_is_found() -> None:
    """They may be in any document, at any line that begins with `curl`, however the block is marked."""
    for name in DOCUMENTS:
        lines = re.findall(r"^ *curl .*", (ROOT / name).read_text("utf-8"), re.MULTILINE)
        assert len(lines) == sum(document == name for document, _ in WRITTEN) > 0
    assert commands("```sh\n# a\ncurl x \\\n  -d 'y\n    z'\nls\ncurl w\n```\n") == [
        "curl x \\\n  -d 'y\n    z'\n",
        "curl w\n",
    ]


@pytest.mark.parametrize(("name", "command"), WRITTEN, ids=lambda value: re.sub(r"\W+", "_", value)[:60])
def test_a_documented_command_works(scripted: Scripted, tmp_path: Path, name: str, command: str) -> None:
    """The scripted model answers at once, whatever it is asked."""
    said = run(command, scripted(keys=(b"any",) if "keys" in command else ()), tmp_path)
    if '"stream": true' in command:
        assert said.endswith("data: [DONE]\n\n")
    else:
        assert isinstance(json.loads(said), dict)
