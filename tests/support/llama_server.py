#!/usr/bin/env python3
"""Lets llama.cpp's own tests of llama-server (tools/server/tests in its source) run against `rest-local serve`.

As a program it stands in for `llama-server` (`LLAMA_SERVER_BIN_PATH`) and starts `serve` with the flags translated;
`MODEL` is used in the place of the models that the tests would download. What `serve` has no option for is dropped. As
a plugin of pytest (`-p support.llama_server`) it keeps the tests from downloading, and writes the ids of those that
passed to the file that `PASSED` names.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

SAME = {
    *("--port", "--host", "--threads", "--lora", "--batch-size", "--ubatch-size", "--mmproj", "--chat-template-file"),
    *("-ctk", "-ctv", "-fa"),
}  # fmt: skip
SWITCHES = {"--metrics"}
DROPPED = {
    *("--hf-repo", "--hf-file", "--model-url", "--mmproj-url", "--model", "--model-draft", "--chat-template"),
    *("--temp", "--seed", "--n-predict", "--reasoning-format", "--cache-ram", "--tags", "--media-path"),
    *("--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-synth-len", "--spec-synth-rates"),
    *("--models-dir", "--models-max", "--models-preset", "--tools", "--tools-runtime", "--cors-origins"),
    *("--mcp-servers-config", "--mcp-servers-json", "--grp-attn-n", "--grp-attn-w", "--n-gpu-layers"),
    *("--sleep-idle-seconds", "--slot-save-path"),
}  # fmt: skip
POOLINGS = {"mean": 1, "cls": 2, "last": 3, "rank": 4}
FILES = (  # what needs no download
    *("basic", "chat_completion", "compat_anthropic", "compat_gcp", "compat_oai_responses", "completion", "ctx_shift"),
    *("embedding", "ignore_eos", "infill", "kv_keep_only_active", "metrics", "security", "template", "tokenize"),
)  # fmt: skip


def command(given: list[str], model: str, architecture: str) -> list[str]:
    """Return the arguments of `rest-local` that mean the same."""
    made, found, rest = ["serve", "--no-history", "--sessions", "0", "-m", model, "--alias", "*"], {}, list(given)
    while rest:
        name = rest.pop(0)
        value = rest.pop(0) if name in {*SAME, *DROPPED, "--alias", "--api-key", "--pooling", "--reasoning"} else ""
        if name in SWITCHES:
            made.append(name)
        elif name in SAME:
            made += [name, value]
        elif name == "--alias":
            made += [part for alias in value.split(",") for part in ("--alias", alias)]
        elif name == "--api-key":
            with tempfile.NamedTemporaryFile("w", delete=False) as keys:
                keys.write("\n".join(value.split(",")) + "\n")
            made += ["--api-key-file", keys.name]
        elif name == "--reasoning":
            made += ["--chat-template-kwargs", json.dumps({"enable_thinking": value != "off"})]
        elif name in ("--ctx-size", "--parallel"):
            found[name] = int(rest.pop(0))
        elif name not in DROPPED:
            found[name] = POOLINGS.get(value, 0)
    if "--pooling" in found or "--embedding" in found:  # Otherwise it is what the file of an embedding model names.
        made += ["--override-kv", f"{architecture}.pooling_type=int:{found.get('--pooling', POOLINGS['cls'])}"]
    slots = found.get("--parallel", 1)
    made += ["--slots", str(slots)]
    if total := found.get("--ctx-size"):  # The size is for all slots together.
        unified = "--kv-unified" in found
        made += ["-c", str(total), "--cells", str(total)] if unified else ["-c", str(max(8, total // slots))]
    return made


_passed: list[str] = []
sys.modules.setdefault("wget", ModuleType("wget"))  # Their conftest imports it before any hook of a plugin.


def pytest_sessionstart() -> None:
    """Download no model."""
    vars(sys.modules["utils"])["ServerPreset"].load_all = staticmethod(lambda: None)


def pytest_runtest_logreport(report: Any) -> None:
    """Collect what passed."""
    if report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write what passed."""
    Path(os.environ["PASSED"]).write_text(json.dumps(_passed))


if __name__ == "__main__":
    program = os.environ.get("REST_LOCAL", "rest-local")
    arguments = command(sys.argv[1:], os.environ["MODEL"], os.environ["ARCHITECTURE"])
    os.execvp(program, [program, *arguments])
