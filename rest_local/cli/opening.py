"""How every command opens its engine: with the default datastore, and its warnings on stderr."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rest_local.cli import messages, missing
from rest_local.cli.messages import warn
from rest_local.decoding.config import EngineConfig

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


def open_engine(config: EngineConfig) -> Engine:
    """Open an engine, print its warnings, and return it; the caller closes it.

    `missing` says what happens to a datastore that cannot be opened. Raises ModelError, DatastoreError, OptionError.
    """
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import DEFAULT_NAME

    messages.show_warnings()
    is_named = bool(config.datastores)
    if not is_named and config.policy != "off" and _has_default():
        config = replace(config, datastores=(DEFAULT_NAME,))
    engine = Engine(config, missing.unusable(config.build_missing, is_named))
    for warning in engine.warnings:
        warn(warning)
    return engine


def _has_default() -> bool:
    from rest_local.retrieval.home import DEFAULT_NAME, list_datastores

    try:
        return DEFAULT_NAME in list_datastores()
    except OSError as error:
        warn(f"the default datastore is not used: {error.filename}: {error.strerror}")
        return False
