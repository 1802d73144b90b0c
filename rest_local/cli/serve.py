"""`rest-local serve`: answer HTTP requests, with one model in this process, or with each of several in its own."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rest_local.cli import indexer, inputs, opening, options
from rest_local.cli.indexer import Live
from rest_local.cli.sections import SectionedCommand, option, rare_option
from rest_local.cli.terminal import warn
from rest_local.decoding.config import AUTO_PROJECTOR, NO_DRAFT_MODEL, NO_PROJECTOR, EngineConfig
from rest_local.errors import InputInvalid, OptionError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.router.app import ModelChoice
    from rest_local.router.memory import Need
    from rest_local.server.settings import ServerSettings


class Named(NamedTuple):
    """A model to serve. `eager` means that it was named itself, and not by its folder."""

    name: str
    path: Path
    eager: bool


def named_models(models: Sequence[str]) -> list[Named]:
    """Return the models that -m names, the default one first. Without -m that is SmolLM2.

    Raises InputInvalid for a folder without models, OptionError for two models of one name, and the errors of
    `inputs.model_path`.
    """
    if not models:
        path = inputs.model_path(None)
        return [Named(inputs.model_name(path), path, True)]
    found: list[Named] = []
    for model in models:
        path = inputs.model_path(model)
        if path.is_dir():
            found += _in_folder(path)
        else:
            found.append(Named(inputs.model_name(model), path, True))
    names = [each.name.casefold() for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"two models are called {twice}; rename one of the files, or give the others one by one")
    return found


def _in_folder(folder: Path) -> list[Named]:
    from rest_local.catalog.describe import list_models
    from rest_local.catalog.stores import models_in

    found = []
    for facts in list_models(models_in(folder)):
        if facts.error:
            warn(f"{facts.path} is left out: {facts.error}")
        else:
            found.append(Named(facts.name, Path(facts.path), False))
    if not found:
        raise InputInvalid("folder", folder, "holds no model that can be used")
    return found


def aliases_of(given: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the aliases of each model, given as `NAME=MODEL` with a MODEL of `names`, or as NAME for the first model.

    Raises OptionError for a name that would mean two models, and for `*=MODEL`.
    """
    owners = {name: name for name in names}
    found: dict[str, tuple[str, ...]] = {}
    for alias in given:
        name, _, model = alias.rpartition("=")
        owner, own = (model, name) if name and model in names else (names[0], alias)
        if own == "*" != alias:
            raise OptionError(f"alias {alias}: any other name means the first model; give its -m first, and '*'")
        if own != "*":
            if owners.setdefault(own, owner) != owner:
                raise OptionError(f"alias {alias}: {own} already means the model {owners[own]}")
            found[owner] = (*found.get(owner, ()), own)
    return found


def choice(
    model: Named,
    config: EngineConfig,
    live: Live,
    aliases: tuple[str, ...],
    template: str | None = None,
    variables: dict[str, object] | None = None,
    memory: int | None = None,
) -> ModelChoice:
    """Return what the server needs to know of a model, with a template and variables for it if given.

    Its default context fits into `memory` bytes, next to its weights.
    """
    from rest_local.router.app import ModelChoice

    mmproj = config.mmproj and Path(config.mmproj)
    if mmproj and mmproj not in (AUTO_PROJECTOR, NO_PROJECTOR):
        mmproj = mmproj.absolute()  # The process of the model may have another working directory.
    own = replace(config, model=model.path, mmproj=mmproj)
    load = partial(_load, own, live, template, variables or {}, memory)
    need = partial(_need, own, model.path, memory)
    return ModelChoice(model.name, model.path, load, need, aliases)


def _load(
    config: EngineConfig, live: Live, template: str | None, variables: dict[str, object], memory: int | None
) -> Engine:
    """Load the model, in its own process."""
    from rest_local.decoding.opening import with_context

    indexer.at_once()
    engine = opening.open_engine(config if memory is None else with_context(config, memory), live)
    if template is not None:
        engine.model.chat_template = template
    engine.model.template_variables = variables
    return engine


def _need(config: EngineConfig, path: Path, memory: int | None) -> Need:
    from rest_local.router.memory import need_of

    draft = config.draft_model
    if draft is not None and draft != NO_DRAFT_MODEL:
        draft = inputs.model_path(draft)
    return need_of(replace(config, model=path, draft_model=draft), memory)


PORT = 8012  # This is rest_local.server.settings.DEFAULT_PORT, whose import would slow down --help.
SLOTS = 4
# llama.cpp has 256 sequence ids (rest_local.llama.context.MOST_IDS), and a slot takes 8 (ContextSettings.n_branches).
MOST_SLOTS = 32
MAX_BODY = 8 << 20
_FORBIDDEN_MODE = 0o027  # A key file may grant nothing to other users, and no writing to the group.


def _read_variables(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, object]:
    try:
        found = json.loads(value or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object")
    return found


@click.command(cls=SectionedCommand)
@options.engine_options_of_models
@options.sampling_defaults
@options.projector_option
@options.template_option
@rare_option(
    "--chat-template-kwargs JSON",
    "Variables for the chat templates, unless a request sets others: '{\"enable_thinking\": false}'.",
    callback=_read_variables,
)
@options.history_option
@indexer.code_options
@option("--watch", "Keep the datastores of -d up to date with their files.")
@option("--host ADDRESS,...", "Address to listen on, or several: 127.0.0.1,::1.", default="127.0.0.1")
@option("--port N", "Port to listen on; 0 takes a free one.", type=click.IntRange(0, 65535), default=PORT)
@option(
    "--memory SIZE",
    "Memory of all models together, such as 24G; the least recently used are unloaded. Default: no limit for "
    "one model, four fifths of the machine's for several.",
    callback=options.size,
)
@option(
    "--idle TIME",
    "Unload a model after this time without use, such as 90s, 10m or 2h. Default: never.",
    also="--sleep-idle-seconds",
    callback=options.duration,
)
@option(
    "--alias NAME",
    "Name of the (first) model for clients; repeatable. NAME=MODEL names another model, '*' answers to any name.",
    to="aliases",
    also="-a",
    multiple=True,
)
@option(
    "--api-key-file FILE",
    "File of keys, one a line; clients send one of them. Needed to listen on an address that others reach.",
)
@option("-np --slots N", "Answer N at a time.", also="--parallel", type=click.IntRange(1, MOST_SLOTS), default=SLOTS)
@option(
    "--cells N",
    "Tokens of KV cache for all answers together. Default: a whole --ctx for each slot; without --ctx, one for all.",
    type=click.IntRange(min=8),
)
@option(
    "--sessions SIZE",
    "Disk for the conversations of all models, so that none is evaluated again after a restart, an unload or an "
    "eviction. The least recently used go first, and 0 keeps none.",
    callback=options.size_or_none,
    default="8G",
)
@option(
    "--jinja",
    "Accepted for llama-server's command lines, and always on.",
    also="-cb --cont-batching --cache-prompt --no-context-shift --embedding --embeddings",
    configurable=False,
    expose_value=False,
    hidden=True,
)
@rare_option("--queue N", "Let at most N requests wait.", default=64)
@option("--metrics", "Serve /metrics for Prometheus.")
@rare_option("--allow-host NAME", "Accept this name in Host headers; repeatable.", to="allowed_hosts", multiple=True)
@rare_option(
    "--allow-origin ORIGIN", "Let web pages of this origin call; repeatable.", to="allowed_origins", multiple=True
)
@rare_option("--max-body BYTES", "Refuse larger requests.", type=click.IntRange(min=1024), default=MAX_BODY)
@rare_option(
    "--share-statistics",
    "Show draft statistics and each step's text to other users too (other machines, several keys); that tells "
    "what datastores and the history hold.",
    to="statistics",
)
def serve(
    config: EngineConfig,
    models: tuple[str, ...],
    live: Live,
    chat_template_file: Path | None,
    chat_template_kwargs: dict[str, object],
    memory: int | None,
    idle: float | None,
    aliases: tuple[str, ...],
    api_key_file: Path | None,
    queue: int,
    **of_server: Any,
) -> None:
    """Serve the APIs of OpenAI, Anthropic, Ollama and llama-server, and a page to try it at /.

    The sampling options apply to requests that do not set their own.

    A model is loaded when a request names it, and the first -m at once. Of several models, each has its own process.
    Ctrl-C, SIGTERM or closing the terminal lets running answers end.
    """
    from rest_local.router.app import Routing
    from rest_local.router.memory import default_limit
    from rest_local.router.supervisor import supervise
    from rest_local.server.http import listen_on_all, log_to_stderr
    from rest_local.server.settings import ServerSettings

    settings = ServerSettings(aliases=aliases, keys=_keys(api_key_file), **of_server)
    template = None if chat_template_file is None else inputs.read_text(chat_template_file, "chat template")
    named = named_models(models)
    if memory is None and len(named) > 1:
        memory = default_limit()
    also = aliases_of(aliases, [each.name for each in named])
    live = live.chosen()
    with ExitStack() as opened:
        sockets = [opened.enter_context(each) for each in listen_on_all(settings)]
        log_to_stderr()
        choices = []
        share = None if memory is None else memory // min(len(named), 2)  # Two models fit at a time.
        for each in named:
            own = template if each is named[0] else None
            choices.append(choice(each, config, live, also.get(each.name, ()), own, chat_template_kwargs, share))
        eager = named[0].eager
        _announce(settings, sockets[0].getsockname()[1], len(choices))
        if len(choices) == 1 and eager and idle is None and memory is None:
            supervise(settings, choices[0], sockets, queue)
            return
        Routing(settings, choices, eager=eager, limit=memory, idle=idle, queue=queue).run(sockets)


def _keys(path: Path | None) -> tuple[bytes, ...]:
    from rest_local.server.settings import parse_keys

    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & _FORBIDDEN_MODE:
                shown = f"{stat.S_IMODE(mode):04o}"
                raise OptionError(f"API key file: other users can read or change it (mode {shown}); chmod 600 it")
            return parse_keys(file.read())
    except OSError as error:
        raise InputInvalid("API key file", path, error.strerror or str(error)) from error
    except OptionError as error:
        raise InputInvalid("API key file", path, str(error).removeprefix("API key file: ")) from error


def _announce(settings: ServerSettings, port: int, models: int) -> None:
    hosts = [f"[{host}]" if ":" in host else host for host in settings.hosts]
    what = "loading the model" if models == 1 else f"{models} models"
    addresses = ", ".join(f"http://{host}:{port}" for host in hosts)
    click.echo(f"rest-local: {addresses} ({what})", err=True)
