"""`rest-local history`: what is kept of earlier answers, and forgetting it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from rest_local.cli import completion
from rest_local.cli.messages import counted
from rest_local.cli.options import json_option
from rest_local.cli.sections import SummaryGroup

if TYPE_CHECKING:
    from rest_local.retrieval.histories import HistoryEntry


@click.group(cls=SummaryGroup)
def history() -> None:
    """List and forget the answers that are kept to draft from.

    One history a model, at most 4 million tokens; the oldest answers go first. --no-history keeps nothing.
    """


@history.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the histories: name, model, answers, tokens, size, last use."""
    from dataclasses import asdict

    from rest_local.retrieval.histories import list_histories
    from rest_local.retrieval.history import history_home

    found = list_histories()
    if as_json:
        click.echo(json.dumps({"home": str(history_home()), "histories": [asdict(listed) for listed in found]}))
        return
    for listed in found:
        click.echo(_line(listed))
    if not found:
        click.echo(f"no answers are kept in {history_home()}")


@history.command()
@click.argument("name", required=False, metavar="[NAME]", shell_complete=completion.histories)
@click.option("--all", "everything", is_flag=True, allow_from_autoenv=False, help="Forget every history.")
@click.option("--yes", is_flag=True, allow_from_autoenv=False, help="Do not ask.")
@json_option
def forget(name: str | None, everything: bool, yes: bool, as_json: bool) -> None:
    """Delete a history, with what was learned about the model's drafts."""
    from rest_local.retrieval.histories import forget_history, list_histories

    if (name is None) != everything:
        raise click.UsageError("give the NAME that `rest-local history list` shows, or --all")
    names = [listed.name for listed in list_histories()] if name is None else [name]
    if not yes and names:
        _ask(names)
    forgotten = []
    try:
        for each in names:
            forget_history(each)
            forgotten.append(each)
            _forget_acceptance(each)
            if not as_json:
                click.echo(f"forgotten: {each}")
    finally:  # what is gone is said also where the next one cannot be deleted
        if as_json:
            click.echo(json.dumps({"forgotten": forgotten}))
    if not names and not as_json:
        click.echo("no answers are kept")


def _ask(names: list[str]) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("--yes forgets without asking, which a pipe cannot answer")
    what = names[0] if len(names) == 1 else f"{len(names)} histories"
    click.confirm(f"Delete the answers of {what}?", abort=True, err=True)


def _forget_acceptance(name: str) -> None:
    from rest_local.decoding.core import acceptance_path

    acceptance_path(name).unlink(missing_ok=True)


def _line(listed: HistoryEntry) -> str:
    from rest_local.errors import printable

    parts = [f"{listed.name:<40}"]
    if listed.last_use:
        parts.append(
            f"{counted(listed.answers, 'answer'):>15} {listed.tokens:>11,} tokens {listed.bytes / 1e6:>8.1f} MB"
        )
        parts.append(f"{listed.last_use[:16].replace('T', ' ')}  {printable(listed.model)}")
    return "  ".join([*parts, printable(listed.error)]).rstrip()
