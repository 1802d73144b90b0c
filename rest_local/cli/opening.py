"""How every command opens its engine: the model by its name, the default datastore, and its warnings on stderr."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from rest_local.cli import first_run, inputs, messages, missing
from rest_local.cli.messages import warn
from rest_local.decoding.config import EngineConfig

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


def open_engine(config: EngineConfig, chat: bool = False) -> Engine:
    """Open an engine, print its warnings, and return it; the caller closes it.

    `chat`: as for `with_model`. `missing` says what happens to a datastore that cannot be opened. Raises ModelError,
    DatastoreError, OptionError.
    """
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import DEFAULT_NAME

    messages.show_warnings()
    config = with_model(config, chat)
    is_named = bool(config.datastores)
    if not is_named and config.policy != "off" and _has_default():
        config = replace(config, datastores=(DEFAULT_NAME,))
    engine = Engine(config, missing.unusable(config.build_missing, is_named))
    for warning in engine.warnings:
        warn(warning)
    return engine


def with_model(config: EngineConfig, chat: bool = False) -> EngineConfig:
    """The same with the files of its models in the place of their names (`inputs.model_path`).

    Where none is named: for a command that needs a model that can converse (`chat`), the one that the user chooses of
    those on the disk (`first_run`); else the demo model, which a terminal is told. Raises ModelError, OptionError.
    """
    model = first_run.choose() if config.model is None and chat else config.model
    if model is None and sys.stderr.isatty():
        click.echo("rest-local: no model was named (-m), so the demo model answers, which writes only Python", err=True)
    draft = None if config.draft_model is None else inputs.model_path(config.draft_model)
    return replace(config, model=inputs.model_path(model), draft_model=draft)


def _has_default() -> bool:
    from rest_local.retrieval.home import DEFAULT_NAME, list_datastores

    try:
        return DEFAULT_NAME in list_datastores()
    except OSError as error:
        warn(f"the default datastore is not used: {error.filename}: {error.strerror}")
        return False
