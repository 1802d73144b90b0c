"""`rest-local serve`: models that answer HTTP requests, each in a process of its own."""

from __future__ import annotations

import json
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import inputs, options, served, sizes
from rest_local.cli import live as live_options
from rest_local.cli.live import Live
from rest_local.cli.sections import SectionedCommand, rare_option
from rest_local.decoding.config import EngineConfig

if TYPE_CHECKING:
    from rest_local.server.settings import Settings

PORT = 8012  # rest_local.server.settings.DEFAULT_PORT, whose import would cost --help
SLOTS = 4
MOST_SLOTS = 32  # llama.cpp's sequence ids (rest_local.llama.batch.MOST_IDS), 8 a slot (ContextSettings.n_branches)
MAX_BODY = 8 << 20
_OTHERS = 0o027  # that a key file may not grant: everything to all, writing to the group


def _read_variables(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, object]:
    try:
        found = json.loads(value or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is no JSON object")
    return found


@click.command(cls=SectionedCommand)
@options.engine_options_of_models
@options.projector_option
@options.template_option
@rare_option(
    "--chat-template-kwargs",
    callback=_read_variables,
    metavar="JSON",
    help="Names for the chat templates, unless a request gives others: '{\"enable_thinking\": false}'.",
)
@options.history_option
@live_options.code_options
@click.option("--watch", is_flag=True, help="Keep the datastores of -d up to date with their files.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS,...",
    help="Address to listen on, or several: 127.0.0.1,::1.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, metavar="N", help="0 takes a free one."
)
@click.option(
    "--memory",
    callback=sizes.size,
    metavar="SIZE",
    help="Memory of all models together, such as 24G; the least recently used are unloaded. Default: any for one "
    "model, four fifths of the machine's for several.",
)
@click.option(
    "--idle",
    callback=sizes.duration,
    metavar="TIME",
    help="Unload a model that is not used for 90s, 10m, 2h. Default: never.",
)
@click.option(
    "--alias",
    multiple=True,
    metavar="NAME",
    help="Name of the (first) model for clients; repeatable. NAME=MODEL names another model, '*' answers to any name.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keys, one a line; clients have to send one of them. Needed to listen on an address that others reach.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, MOST_SLOTS),
    default=SLOTS,
    show_default=True,
    metavar="N",
    help="Answers at a time.",
)
@click.option(
    "--cells",
    type=click.IntRange(min=8),
    metavar="N",
    help="Tokens of memory for all answers together. Default: a whole context (--ctx) for each slot.",
)
@click.option(
    "--sessions",
    callback=sizes.size_or_none,
    default="8G",
    show_default=True,
    metavar="SIZE",
    help="Disk for conversations of all models together, so that none is evaluated again after a restart, an unload or "
    "an eviction; the least recently used go first. 0: none.",
)
@rare_option(
    "--queue", type=click.IntRange(min=1), default=64, show_default=True, metavar="N", help="Requests that may wait."
)
@click.option("--metrics", is_flag=True, help="Serve /metrics for Prometheus.")
@rare_option("--allow-host", multiple=True, metavar="NAME", help="Accept this name in Host headers; repeatable.")
@rare_option("--allow-origin", multiple=True, metavar="ORIGIN", help="Let web pages of this origin call; repeatable.")
@rare_option(
    "--daemon",
    is_flag=True,
    help="Go on after the terminal closes; SIGHUP then opens the datastores' newest commits. A service needs none.",
)
@rare_option(
    "--max-body",
    type=click.IntRange(min=1024),
    default=MAX_BODY,
    show_default=True,
    metavar="BYTES",
    help="Refuse larger requests.",
)
@rare_option(
    "--share-statistics",
    is_flag=True,
    help="Show draft statistics and each step's text to other users too (other machines, several keys); that tells "
    "what datastores and the history hold.",
)
def serve(
    config: EngineConfig,
    models: tuple[str, ...],
    live: Live,
    chat_template_file: Path | None,
    chat_template_kwargs: dict[str, object],
    host: str,
    port: int,
    memory: int | None,
    idle: float | None,
    alias: tuple[str, ...],
    api_key_file: Path | None,
    queue: int,
    metrics: bool,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    daemon: bool,
    max_body: int,
    share_statistics: bool,
) -> None:
    """Serve the APIs of OpenAI, Anthropic, Ollama and llama-server, with a page to try it at /.

    A request that names no temperature is sampled at 0.8, as llama-server does, because clients expect answers that
    vary; other commands are greedy (0).

    Each model has a process of its own and is loaded when a request names it; the first -m is loaded at once. Ctrl-C,
    SIGTERM or closing the terminal lets running answers end. With --daemon and as a service, SIGHUP opens the
    datastores' newest commits instead.
    """
    from rest_local.paths import data_home
    from rest_local.router.memory import default_limit
    from rest_local.router.run import Routing
    from rest_local.server.http import ignore_hangups, listen_on_all, log_to_stderr
    from rest_local.server.settings import Settings

    settings = Settings(
        host=host,
        port=port,
        aliases=alias,
        keys=_keys(api_key_file),
        allowed_hosts=allow_host,
        allowed_origins=allow_origin,
        metrics=metrics,
        max_body=max_body,
        statistics=share_statistics,
    )
    template = None if chat_template_file is None else inputs.read_text(chat_template_file, "chat template")
    named = served.named(models)
    aliases = served.aliases(alias, [each.name for each in named])
    live = live.chosen()
    if daemon:
        ignore_hangups()
    with ExitStack() as opened:
        sockets = [opened.enter_context(each) for each in listen_on_all(settings)]
        log_to_stderr()
        choices = [
            served.choice(
                each,
                config,
                live,
                aliases.get(each.name, ()),
                template if each is named[0] else None,
                chat_template_kwargs,
            )
            for each in named
        ]
        if memory is None and len(choices) > 1:
            memory = default_limit()
        kept = data_home() / "batches"
        routing = Routing(settings, choices, eager=named[0].eager, limit=memory, idle=idle, queue=queue, kept=kept)
        _announce(settings, sockets[0].getsockname()[1], len(choices))
        routing.run(*sockets)


def _keys(path: Path | None) -> tuple[bytes, ...]:
    from rest_local.errors import InputInvalid, OptionError
    from rest_local.server.settings import parse_keys

    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name != "nt" and stat.S_ISREG(mode) and mode & _OTHERS:  # Windows has no such modes
                shown = f"{stat.S_IMODE(mode):04o}"
                raise OptionError(f"API key file: other users can read or change it (mode {shown}); chmod 600 it")
            return parse_keys(file.read())
    except OSError as error:
        raise InputInvalid("API key file", path, error.strerror or str(error)) from error
    except OptionError as error:
        raise InputInvalid("API key file", path, str(error).removeprefix("API key file: ")) from error


def _announce(settings: Settings, port: int, models: int) -> None:
    hosts = [f"[{host}]" if ":" in host else host for host in settings.hosts]
    what = "loading the model" if models == 1 else f"{models} models"
    addresses = ", ".join(f"http://{host}:{port}" for host in hosts)
    click.echo(f"rest-local: {addresses} ({what})", err=True)
