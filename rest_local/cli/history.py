"""`rest-local history`: list the earlier answers that are kept, and forget them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import completion
from rest_local.cli.sections import SummaryGroup, option
from rest_local.cli.terminal import columns, confirm, counted, json_option, print_json

if TYPE_CHECKING:
    from rest_local.retrieval.history import HistoryEntry


@click.group(cls=SummaryGroup)
def history() -> None:
    """List and forget the answers that are kept to draft from.

    Each model has one history of at most 4 million tokens, and the oldest answers go first. --no-history keeps nothing.
    Your questions are kept by `chat --session`, by `serve --sessions`, and as the lines you typed in `chat`. `forget
    --prompts` deletes them.
    """


@history.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the histories: name, model, answers, tokens, size, last use."""
    from dataclasses import asdict

    from rest_local.retrieval.history import history_home, list_histories

    found = list_histories()
    if as_json:
        return print_json({"home": str(history_home()), "histories": [asdict(listed) for listed in found]})
    for line in columns([_row(listed) for listed in found], right=(1, 2, 3)):
        click.echo(line)
    if not found:
        click.echo(f"no answers are kept in {history_home()}")
    return None


@history.command()
@click.argument("name", required=False, metavar="[NAME]", shell_complete=completion.histories)
@option("--all", "Forget every history.", to="everything", configurable=False)
@option(
    "--prompts",
    "Forget what was asked: saved chats, lines typed in `chat`, KV cells of `serve --sessions`.",
    configurable=False,
)
@option("--yes", "Do not ask.", configurable=False)
@json_option
def forget(name: str | None, everything: bool, prompts: bool, yes: bool, as_json: bool) -> None:
    """Delete a history, or with --prompts the questions you asked.

    End running servers first: they write again what they hold in memory.
    """
    from rest_local.cli.chat.conversation import forget_sessions, session_names
    from rest_local.paths import data_dir, delete_unfinished
    from rest_local.retrieval.history import forget_history, list_histories

    if (name is not None) + everything > 1 or not (name is not None or everything or prompts):
        raise click.UsageError("give the NAME that `rest-local history list` shows, --all or --prompts")
    names = [name] if name is not None else [listed.name for listed in list_histories()] if everything else []
    if not yes and (names or prompts):
        what = [f"the answers of {names[0] if len(names) == 1 else f'{len(names)} histories'}"] if names else []
        if prompts:
            what.append(f"{len(session_names())} saved chats, typed lines and all KV cells")
        confirm(f"Delete {', and '.join(what)}?", "--yes forgets without asking, which a pipe cannot answer")
    forgotten = []
    if prompts:
        forget_sessions()
        delete_unfinished(data_dir())
        for path in _asked():
            with contextlib.suppress(FileNotFoundError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if not as_json:
            click.echo("forgotten: the questions that were asked")
    try:
        for each in names:
            forget_history(each)
            forgotten.append(each)
            if not as_json:
                click.echo(f"forgotten: {each}")
    finally:  # If one cannot be deleted, still say which ones are gone.
        if as_json:
            print_json({"forgotten": forgotten} | ({"prompts": True} if prompts else {}))
    if not names and not prompts and not as_json:
        click.echo("no answers are kept")


def keeps_answers_or_prompts() -> bool:
    """Return True if there is something that `forget` deletes."""
    from rest_local.cli.chat.conversation import session_names
    from rest_local.retrieval.history import list_histories

    return bool(list_histories() or session_names() or any(_asked()))


def _asked() -> Iterator[Path]:
    """Yield the files and folders with typed lines and KV cells. The content of a folder comes before the folder."""
    from rest_local.kv_cache.cell_files import SESSIONS
    from rest_local.paths import cache_dir, data_dir

    if (typed := data_dir() / "chat_history").exists():
        yield typed
    yield from sorted((cache_dir() / SESSIONS).rglob("*"), reverse=True)


def _row(listed: HistoryEntry) -> tuple[str, ...]:
    if not listed.last_use:
        return listed.name, listed.error
    size = f"{listed.bytes / 1e6:.1f} MB"
    about = "  ".join(filter(None, (listed.last_use[:16].replace("T", " "), listed.model, listed.error)))
    return listed.name, counted(listed.answers, "answer"), f"{listed.tokens:,} tokens", size, about
