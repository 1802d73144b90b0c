"""llama-server's own tests against `serve`: what does not pass is listed with its reason.

They are in the source distribution of llama-cpp-python, in vendor/llama.cpp/tools/server/tests; `FOLDER` names that
folder, whose tests read templates in vendor/llama.cpp/models. They take a quarter of an hour on two cores; `make soak`
runs them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import llama_server
from support.toy import demo_model

from rest_local.llama.gguf import read_gguf

FOLDER = "REST_LOCAL_LLAMA_SERVER_TESTS"
LISTED = Path(__file__).parents[1] / "data" / "llama-server-tests.json"


KINDS = ("not passed", "passes or not")


def listed(kind: str) -> dict[str, str]:
    """Return the reason of each test of this kind."""
    found: dict[str, list[str]] = json.loads(LISTED.read_text())[kind]
    return {test: reason for reason, tests in found.items() for test in tests}


def test_every_listed_test_has_one_reason() -> None:
    found = [pair for kind in KINDS for pair in json.loads(LISTED.read_text())[kind].items()]
    every = {**listed(KINDS[0]), **listed(KINDS[1])}
    assert sum(len(tests) for _, tests in found) == len(every)
    assert all(reason.endswith(".") and tests for reason, tests in found)
    files = {f"unit/test_{name}.py" for name in llama_server.FILES}
    assert {test.partition("::")[0] for test in every} <= files


def test_flags_are_translated() -> None:
    def command(given: str) -> str:
        return " ".join(llama_server.command(given.split(), "m.gguf", "llama"))

    given = "--port 8080 --temp 0.8 --hf-repo a/b --ctx-size 512 --parallel 2 --no-jinja"
    given += " --alias one,two --metrics --embedding --pooling last"
    begin = "serve --no-history --sessions 0 -m m.gguf --alias *"
    named = "--port 8080 --alias one --alias two --metrics"
    assert command(given) == f"{begin} {named} --override-kv llama.pooling_type=int:3 --slots 2 -c 256"
    assert command("--ctx-size 512 --parallel 4 --kv-unified") == f"{begin} --slots 4 -c 512 --cells 512"


@pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no folder with llama-server's tests")
def test_llama_servers_tests_pass_but_for_those_that_are_listed(tmp_path: Path) -> None:
    passed = tmp_path / "passed.json"
    own = {
        "LLAMA_SERVER_BIN_PATH": llama_server.__file__,
        "REST_LOCAL": str(Path(sys.executable).with_name("rest-local")),
        "MODEL": str(demo_model()),
        "ARCHITECTURE": str(read_gguf(demo_model()).values["general.architecture"]),
        "PASSED": str(passed),
        "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3])),
    }
    files = [f"unit/test_{name}.py" for name in llama_server.FILES]
    run = [sys.executable, "-m", "pytest", "-q", "-p", "support.llama_server", "-p", "no:cacheprovider", *files]
    done = subprocess.run(run, cwd=os.environ[FOLDER], env=os.environ | own, capture_output=True, text=True)
    assert passed.is_file(), done.stdout[-4000:] + done.stderr[-4000:]
    found = set(json.loads(passed.read_text()))
    collect = [*run, "--collect-only"]
    collected = subprocess.run(collect, cwd=os.environ[FOLDER], env=os.environ | own, capture_output=True, text=True)
    every = {line for line in collected.stdout.splitlines() if "::" in line}
    assert every - found - listed(KINDS[1]).keys() == listed(KINDS[0]).keys()
