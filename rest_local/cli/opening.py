"""How every command opens its engine: with the default datastore, without damaged ones, its warnings on stderr."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from rest_local.cli.messages import warn
from rest_local.decoding.config import EngineConfig
from rest_local.errors import DatastoreCorrupt, DatastoreError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


def open_engine(config: EngineConfig) -> Engine:
    """Open an engine, print its warnings, and return it; the caller closes it.

    A datastore that was asked for must exist, in this format and for this vocabulary; one that is damaged is left out
    with a warning, since it could only have made the answer faster. The default datastore is left out with a warning
    whatever is wrong with it. Raises ModelError, DatastoreError, OptionError.
    """
    from rest_local.cli import messages

    messages.show_warnings()
    engine = _open_undamaged(config) if config.datastores else _open_with_default(config)
    for warning in engine.warnings:
        warn(warning)
    return engine


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
