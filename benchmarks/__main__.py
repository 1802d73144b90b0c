"""Measurements for developers, from a checkout.

    python -m benchmarks                # their names, and what each measures
    python -m benchmarks NAME --help
    python -m benchmarks NAME [OPTION]...
    python -m benchmarks figures        # `make bench`: what the README and docs/LOG.md quote, half an hour on 2 cores

Each prints a table and ends in one line of JSON. Nothing else should run on the machine. `rest-local demo` and
`rest-local tune` measure for users.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FIGURES = ("driver", "exact", "many", "batch", "server", "published")


def names() -> dict[str, str]:
    """Return every benchmark with the first sentence of its module, without importing any."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        module = ast.parse(path.read_text("utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main() -> None:
    """Run the benchmark that the command line names, or list all."""
    known = names()
    chosen, *arguments = sys.argv[1:] or [""]
    if chosen not in (*known, "figures"):
        print("\n".join(f"{name:20} {about}" for name, about in known.items()))
        raise SystemExit(f"no such benchmark: {chosen}" if chosen else 0)
    for name in FIGURES if chosen == "figures" else (chosen,):
        if chosen == "figures":
            print(f"== {name}", flush=True)
        sys.argv = [f"python -m benchmarks {name}", *arguments]
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
