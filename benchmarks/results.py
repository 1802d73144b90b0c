"""Check the rows in docs/results/README.md that `rest-local tune --share` printed.

    python -m benchmarks results [FILE]

A row has every column, a date, speeds that have the ratio that it names, and a machine, model and version
that no other row has together. Every fault is one line, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path

from rest_local.cli.doctor import SHARED

PAGE = Path(__file__).parents[1] / "docs/results/README.md"
SPEEDS = re.compile(r"(\d+\.\d) to (\d+\.\d) tokens/s \((\d+\.\d\d)\)")
NEAR = 0.02  # Speeds and ratio are rounded.


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the table that has the columns SHARED."""
    lines = [line.strip() for line in text.splitlines()]
    head = f"| {' | '.join(SHARED)} |"
    if head not in lines:
        raise ValueError(f"no table with the columns {', '.join(SHARED)}")
    after = lines[lines.index(head) + 2 :]
    end = next((n for n, line in enumerate(after) if not line.startswith("|")), len(after))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after[:end]]


def faults(table: list[list[str]]) -> Iterator[str]:
    """Yield what is wrong with the rows of a table."""
    known = set[tuple[str, ...]]()
    for number, cells in enumerate(table, 1):
        if len(cells) != len(SHARED):
            yield f"row {number}: {len(cells)} cells in place of {len(SHARED)}"
            continue
        row = dict(zip(SHARED, cells, strict=True))
        for name in ("a question", "an edit"):
            found = SPEEDS.fullmatch(row[name])
            if found is None:
                yield f"row {number}, {name}: not PLAIN to DRAFTED tokens/s (RATIO)"
            elif abs(float(found[2]) / max(float(found[1]), 0.1) - float(found[3])) > NEAR * float(found[3]):
                yield f"row {number}, {name}: the speeds do not have this ratio"
        if not re.fullmatch(r"[0-2] of 2", row["same output"]):
            yield f"row {number}, same output: not N of 2"
        try:
            datetime.date.fromisoformat(row["date"])
        except ValueError:
            yield f"row {number}, date: not YYYY-MM-DD"
        key = (row["machine"], row["model"], row["version"])
        if not all(key):
            yield f"row {number}: machine, model or version is missing"
        if key in known:
            yield f"row {number}: another row has this machine, model and version"
        known.add(key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=PAGE)
    table = rows(parser.parse_args().file.read_text("utf-8"))
    wrong = list(faults(table))
    print("\n".join([*wrong, json.dumps({"rows": len(table), "faults": len(wrong)})]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
