"""How every command opens its engine: the model by its name, the default datastore, and its warnings on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from rest_local.cli import first_run, inputs, missing
from rest_local.cli.live import ASLEEP, Live
from rest_local.cli.messages import say, warn
from rest_local.decoding.config import NO_DRAFT_MODEL, EngineConfig
from rest_local.errors import ModelError

if TYPE_CHECKING:
    from rest_local.cli.indexer import Indexer
    from rest_local.decoding.engine import Engine


def open_engine(config: EngineConfig, live: Live = ASLEEP) -> Engine:
    """Open an engine, print its warnings, and return it; the caller closes it.

    Without a model it is the demo model's, which a terminal is told. `missing` says what happens to a datastore that
    cannot be opened. `live`: what is kept up to date in the background, until the engine is closed. Raises ModelError,
    DatastoreError, OptionError.
    """
    from rest_local.cli import logged
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import DEFAULT_NAME

    logged.show_warnings()
    config = _with_files(config)
    is_named = bool(config.datastores)
    if not is_named and config.policy != "off" and _has_default():
        config = replace(config, datastores=(DEFAULT_NAME,))
    with ExitStack() as undo:
        config, indexer = _indexed(config, live, undo)
        unusable = missing.unusable(config.build_missing, is_named, awaited=_awaited(live))
        engine = Engine(replace(config, follow=bool(config.datastores)), unusable)
        if indexer is not None:
            indexer.committed = engine.look_for_commits
            engine.at_close(undo.pop_all().close)
    for warning in engine.warnings:
        warn(warning)
    if indexer is not None:
        _announce(engine, live, indexer)
    return engine


def _indexed(config: EngineConfig, live: Live, undo: ExitStack) -> tuple[EngineConfig, Indexer | None]:
    """The config with the datastore of the code, and the process that keeps what is wanted up to date."""
    from rest_local.cli.indexer import Indexer

    named = tuple(map(str, config.datastores))
    if config.policy == "off" or not (live.code or (live.watch and named)):
        return config, None
    indexer = Indexer(inputs.model_path(config.model), named if live.watch else (), live.code)
    undo.callback(indexer.close)
    code = (live.code.name,) if live.code else ()
    return replace(config, datastores=tuple(dict.fromkeys((*named, *code)))), indexer


def _awaited(live: Live) -> Callable[[str], bool]:
    """Whether a datastore need not exist yet: that of the code, and those that are watched."""
    return lambda name: live.watch or (live.code is not None and name == live.code.name)


def _announce(engine: Engine, live: Live, indexer: Indexer) -> None:
    """What is drafted from now, and what will be."""
    from rest_local.cli.indexer import held
    from rest_local.retrieval.home import datastore_path

    stores = {store.path: store for store in engine.datastores}
    for name in engine.config.datastores:
        store = stores.get(datastore_path(name))
        if live.code is not None and name == live.code.name:
            if store is None:
                say(f"indexing {live.code.root} in the background; drafts use it when it is ready")
                indexer.tell_ready()
            elif sys.stderr.isatty():
                say(f"drafting from {live.code.root}: {held(len(store), store.info()['documents'])}")
        elif store is None and live.watch:
            say(f"datastore {name} cannot be used yet; it is as soon as it is built for this model's vocabulary")


def conversing(config: EngineConfig) -> EngineConfig:
    """The same with a model for a command that converses or follows instructions: the one that was named, or the one
    that the user chooses of those on the disk (`first_run`).

    Raises ModelError for the demo model, which can do neither, and OptionError where none was named or chosen.
    """
    from rest_local.paths import is_demo_model

    model = inputs.model_path(config.model or first_run.choose())
    if is_demo_model(model):
        raise ModelError(
            "the demo model writes Python and cannot chat; give a model that can with -m (`rest-local models` lists "
            "those that are here), or complete code with `rest-local generate`"
        )
    return replace(config, model=model)


def _with_files(config: EngineConfig) -> EngineConfig:
    """The same with the files of its models in the place of their names (`inputs.model_path`)."""
    if config.model is None and sys.stderr.isatty():
        click.echo("rest-local: no model was named (-m), so the demo model answers, in Python only", err=True)
    wanted = (config.model, None if config.draft_model == NO_DRAFT_MODEL else config.draft_model)
    model, draft = (name and inputs.model_path(name) for name in wanted)
    return replace(config, model=model, draft_model=draft or config.draft_model)


def _has_default() -> bool:
    from rest_local.retrieval.home import DEFAULT_NAME, list_datastores

    try:
        return DEFAULT_NAME in list_datastores()
    except OSError as error:
        warn(f"the default datastore is not used: {error.filename}: {error.strerror}")
        return False
