"""How every command opens its engine: the model by its name, the default datastore, and its warnings on stderr."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.cli import first_run, inputs, missing
from rest_local.cli.messages import warn
from rest_local.decoding.config import EngineConfig
from rest_local.errors import ModelError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


def open_engine(config: EngineConfig) -> Engine:
    """Open an engine, print its warnings, and return it; the caller closes it.

    Without a model it is the demo model's, which a terminal is told. `missing` says what happens to a datastore that
    cannot be opened. Raises ModelError, DatastoreError, OptionError.
    """
    from rest_local.cli import logged
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import DEFAULT_NAME

    logged.show_warnings()
    config = _with_files(config)
    is_named = bool(config.datastores)
    if not is_named and config.policy != "off" and _has_default():
        config = replace(config, datastores=(DEFAULT_NAME,))
    engine = Engine(config, missing.unusable(config.build_missing, is_named))
    for warning in engine.warnings:
        warn(warning)
    return engine


def conversing(config: EngineConfig) -> EngineConfig:
    """The same with a model for a command that converses or follows instructions: the one that was named, or the one
    that the user chooses of those on the disk (`first_run`).

    Raises ModelError for the demo model, which can do neither, and OptionError where none was named or chosen.
    """
    config = replace(config, model=inputs.model_path(config.model or first_run.choose()))
    if config.model is not None and Path(config.model).resolve() == inputs.model_path(None).resolve():
        raise ModelError(
            "the demo model writes Python and cannot chat; give a model that can with -m (`rest-local models` lists "
            "those that are here), or complete code with `rest-local generate`"
        )
    return config


def _with_files(config: EngineConfig) -> EngineConfig:
    """The same with the files of its models in the place of their names (`inputs.model_path`)."""
    if config.model is None and sys.stderr.isatty():
        click.echo("rest-local: no model was named (-m), so the demo model answers, in Python only", err=True)
    model, draft = (name and inputs.model_path(name) for name in (config.model, config.draft_model))
    return replace(config, model=model, draft_model=draft)


def _has_default() -> bool:
    from rest_local.retrieval.home import DEFAULT_NAME, list_datastores

    try:
        return DEFAULT_NAME in list_datastores()
    except OSError as error:
        warn(f"the default datastore is not used: {error.filename}: {error.strerror}")
        return False
