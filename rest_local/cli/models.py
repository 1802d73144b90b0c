"""`rest-local models`: the models on the disk, and what is known of them without loading any."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from rest_local.cli.options import json_option
from rest_local.errors import printable

if TYPE_CHECKING:
    from rest_local.catalog.describe import ModelFacts

HEADINGS = ("NAME", "SIZE", "QUANT", "CONTEXT", "CHAT", "MEMORY", "DRAFTING")
TO_THE_RIGHT = (0, 2, 4)  # of the columns after the name
GAP = "  "
SHORT, LAST = 16, 12  # columns of a narrow terminal: for names in the same line, for DRAFTING at least
PATIENCE_S = 1.0
DRAFTING = {"tree": "trees", "chain": "chains", "none": "no"}


@click.command()
@json_option
def models(as_json: bool) -> None:
    """List the models on this machine; -m takes their names.

    Looks into the cache of huggingface_hub, the stores of Ollama and LM Studio, and the folders that the environment
    names in REST_LOCAL_MODELS. MEMORY is an estimate for 4,096 tokens of context. DRAFTING says whether trees or only
    chains of draft tokens can be verified, which datastores fit (`name?`: perhaps, known after the first use), and
    whether the costs of this machine are known (estimated from a few steps, or measured).
    """
    from rest_local.catalog.describe import list_models

    with _counter(as_json) as advance:
        found = list_models(progress=advance)
    if as_json:
        click.echo(json.dumps([_fields(facts) for facts in found], ensure_ascii=False))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table([row_of(facts) for facts in found], width):
        click.echo(line)
    if all(facts.store == "demo" for facts in found):
        from rest_local.cli.first_run import suggestion

        click.echo(f"Only the demo model is here. Get another: rest-local pull {suggestion()}", err=True)


def _fields(facts: ModelFacts) -> dict[str, object]:
    """The object of --json: the facts, with those of the header among them."""
    fields = asdict(facts)
    header = fields.pop("header")
    header.pop("kind")
    return {**fields, **header}


def row_of(facts: ModelFacts) -> tuple[str, ...]:
    """The columns of one model. A damaged one has its error in the place of all but the name."""
    from rest_local.catalog.quantization import in_bytes
    from rest_local.catalog.stores import DEMO

    if facts.error:
        return (printable(facts.name), f"cannot be used: {printable(facts.error)}")
    header = facts.header
    drafting = [DRAFTING.get(header.drafting, header.drafting)]
    if header.drafting != "none":
        drafting += [*facts.datastores, *(f"{name}?" for name in facts.perhaps)]
        drafting += [f"costs {facts.costs}"] if facts.costs else []
    return (
        printable(facts.name),
        in_bytes(facts.bytes),
        header.quantization,
        f"{header.n_ctx_train:,}" if header.n_ctx_train else "",
        "yes" if header.chat_template and facts.store != DEMO else "no",
        in_bytes(facts.memory_bytes),
        printable(", ".join(drafting)),
    )


def table(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Yield a heading and a line for each row. Where the longest is wider than `width`, the last column is broken into
    lines, and a long name has a line of its own.
    """
    every = [HEADINGS, *rows]
    names = max(len(row[0]) for row in every)
    details = _aligned([row[1:] for row in every])
    if width is not None:
        begin, end = (max(len(row[at]) for row in details if row[0]) for at in (0, 1))
        room = width - len(GAP) - begin
        names = min(names, max(room - end, min(SHORT, room - LAST), 0))
    for row, (begins, ends) in zip(every, details, strict=True):
        indent = names + len(GAP) + len(begins)
        lines = [ends] if width is None else textwrap.wrap(ends, max(width - indent, LAST))
        if len(row[0]) > names:
            yield row[0]
        yield f"{row[0] if len(row[0]) <= names else '':<{names}}{GAP}{begins}{lines[0]}"
        yield from (" " * indent + line for line in lines[1:])


def _aligned(rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """The columns after the name: all but the last in one text, aligned, and the last. A row of one has no others."""
    whole = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return [("".join(_cell(at, row[at], widths[at]) + GAP for at in range(len(row) - 1)), row[-1]) for row in rows]


def _cell(at: int, text: str, width: int) -> str:
    return f"{text:>{width}}" if at in TO_THE_RIGHT else f"{text:<{width}}"


@contextmanager
def _counter(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """What shows how many files were looked at, on stderr at a terminal, from the second second on."""
    began, shown = time.monotonic(), not quiet and sys.stderr.isatty()

    def advance(done: int, total: int) -> None:
        if shown and time.monotonic() - began > PATIENCE_S:
            click.echo(f"\rreading {done} of {total} models", nl=False, err=True)

    try:
        yield advance
    finally:
        if shown and time.monotonic() - began > PATIENCE_S:
            click.echo(f"\r{'':40}\r", nl=False, err=True)
