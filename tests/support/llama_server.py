#!/usr/bin/env python3
"""Stands in for `llama-server` in llama.cpp's own tests of it: starts `rest-local serve` with the flags translated.

`LLAMA_SERVER_BIN_PATH` names this file, `MODEL` the model in the place of those that the tests would download. What
`serve` has no option for is dropped.
"""

from __future__ import annotations

import os
import sys
import tempfile

SAME = {
    *("--port", "--host", "--threads", "--lora", "--batch-size", "--ubatch-size", "--mmproj"),
    *("-ctk", "-ctv", "-fa", "--chat-template-file"),
}  # fmt: skip
SWITCHES = {"--metrics", "--context-shift"}
VALUES = {
    *("--hf-repo", "--hf-file", "--model-url", "--mmproj-url", "--model", "--chat-template"),
    *("--temp", "--seed", "--n-predict", "--reasoning-format", "--reasoning", "--cache-ram", "--tags", "--media-path"),
    *("--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-synth-len", "--spec-synth-rates"),
    *("--models-dir", "--models-max", "--models-preset", "--model-draft", "--tools", "--tools-runtime"),
    *("--mcp-servers-config", "--mcp-servers-json", "--grp-attn-n", "--grp-attn-w", "--cors-origins"),
    *("--n-gpu-layers", "--sleep-idle-seconds", "--slot-save-path"),
}  # fmt: skip
POOLINGS = {"mean": 1, "cls": 2, "last": 3, "rank": 4}


def command(given: list[str], model: str, architecture: str) -> list[str]:
    """The arguments of `rest-local` that mean the same."""
    made, found, i = ["serve", "--no-history", "--sessions", "0", "-m", model, "--alias", "*"], {}, 0
    while i < len(given):
        name, value = given[i], given[i + 1] if i + 1 < len(given) else ""
        if name in SWITCHES:
            made.append(name)
        if name in SAME:
            made += [name, value]
        elif name == "--alias":
            made += [part for alias in value.split(",") for part in ("--alias", alias)]
        elif name == "--api-key":
            with tempfile.NamedTemporaryFile("w", delete=False) as keys:
                keys.write("\n".join(value.split(",")) + "\n")
            made += ["--api-key-file", keys.name]
        elif name == "--pooling":
            made += ["--override-kv", f"{architecture}.pooling_type=int:{POOLINGS.get(value, 0)}"]
        elif name in ("--ctx-size", "--parallel"):
            found[name] = int(value)
        elif name not in VALUES:  # it has no value
            found[name] = 1
            i -= 1
        i += 2
    slots = found.get("--parallel", 1)
    made += ["--slots", str(slots)]
    if total := found.get("--ctx-size"):  # of all slots together
        unified = "--kv-unified" in found
        made += ["-c", str(total), "--cells", str(total)] if unified else ["-c", str(max(8, total // slots))]
    return made


if __name__ == "__main__":
    program = os.environ.get("REST_LOCAL", "rest-local")
    arguments = command(sys.argv[1:], os.environ["MODEL"], os.environ.get("ARCHITECTURE", "llama"))
    os.execvp(program, [program, *arguments])
