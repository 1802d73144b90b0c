"""`make bench`: the figures that the README and docs/LOG.md quote, one line of JSON each.

It takes about half an hour on 2 cores; nothing else should run. Each part also runs alone with more options: `python -m
benchmarks.PART`. Not included are measurements that need a larger model (`bench replay -m`, `--model` of many and
server), other runtimes (`bench replay --peers`), and the experiments (`bench experiment --list`).
"""

from __future__ import annotations

import sys

from benchmarks import batch, draft_model, driver, exact, many, published, server, speed, startup
from rest_local.cli.main import run

PARTS = {
    "startup": startup.main,
    "lookup": lambda: run(["bench", "lookup", "--model", "models/demo.gguf", "--cold", "--json"]),
    "driver": driver.main,
    "speed": speed.main,
    "draft_model": draft_model.main,
    "exact": exact.main,
    "many": many.main,
    "batch": batch.main,
    "server": server.main,
    "published": published.main,
}


def main() -> None:
    """Run the parts named on the command line, all without a name."""
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in wanted:
        print(f"== {name}", flush=True)
        sys.argv = [f"benchmarks.{name}"]
        PARTS[name]()


if __name__ == "__main__":
    main()
