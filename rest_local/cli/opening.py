"""How every command opens its engine: with the default datastore, without damaged ones, its warnings on stderr."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import first_run, inputs
from rest_local.cli.messages import warn
from rest_local.decoding.config import EngineConfig
from rest_local.errors import DatastoreCorrupt, DatastoreError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


def open_engine(config: EngineConfig, chat: bool = False) -> Engine:
    """Open an engine, print its warnings, and return it; the caller closes it.

    Without a model it is the demo model's, which a terminal is told; a command that needs one that can converse says
    `chat`, and gets what the user chooses of those on the disk (`cli.first_run`), never the demo model.

    A datastore that was asked for must exist, in this format and for this vocabulary; one that is damaged is left out
    with a warning, since it could only have made the answer faster. The default datastore is left out with a warning
    whatever is wrong with it. Raises ModelError, DatastoreError,
    OptionError.
    """
    from rest_local.cli import log

    log.show_warnings()
    config = replace(config, model=_model(config, chat))
    if config.draft_model is not None:
        config = replace(config, draft_model=inputs.model_path(config.draft_model))
    engine = _open_undamaged(config) if config.datastores else _open_with_default(config)
    for warning in engine.warnings:
        warn(warning)
    return engine


def _model(config: EngineConfig, chat: bool) -> Path:
    """The file of the model that was asked for, or of the one to use without it."""
    if config.model is None and chat:
        return inputs.model_path(first_run.choose())
    if config.model is None and sys.stderr.isatty():
        click.echo("rest-local: no model was named (-m), so the demo model answers, which writes only Python", err=True)
    return inputs.model_path(config.model)


def _open_with_default(config: EngineConfig) -> Engine:
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import DEFAULT_NAME

    if config.policy == "off" or not _has_default():
        return Engine(config)
    try:
        return Engine(replace(config, datastores=(DEFAULT_NAME,)))
    except DatastoreError as error:
        warn(f"the default datastore is not used: {error}")
        return Engine(config)


def _has_default() -> bool:
    from rest_local.retrieval.home import DEFAULT_NAME, list_datastores

    try:
        return DEFAULT_NAME in list_datastores()
    except OSError as error:
        warn(f"the default datastore is not used: {error.filename}: {error.strerror}")
        return False


def _open_undamaged(config: EngineConfig) -> Engine:
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import datastore_path

    while True:
        try:
            return Engine(config)
        except DatastoreCorrupt as error:
            damaged = os.fspath(error.path)
            others = tuple(name for name in config.datastores if os.fspath(datastore_path(name)) != damaged)
            if others == config.datastores:
                raise
            warn(f"{error}; going on without it")
            config = replace(config, datastores=others)
