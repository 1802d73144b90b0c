"""Open the engine of a command: find the model by its name, open the datastores, and print warnings on stderr.

What happens to a datastore that cannot be opened depends on the reason:

- It lacks an index for the model's vocabulary. It is left out, and one line names the command that builds the index.
- It is damaged. It is left out with one line, since it could only have made the answer faster.
- Anything else is an error.

The default datastore is used without being named, so it is never a reason to refuse. The line about what it lacks is
printed once for each vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rest_local.cli import inputs, terminal
from rest_local.cli.indexer import ASLEEP, Live, recalled, remember
from rest_local.cli.terminal import say, warn
from rest_local.decoding.config import NO_DRAFT_MODEL, EngineConfig
from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreNotFound,
    DatastoreVocabulary,
    ModelError,
)

if TYPE_CHECKING:
    from rest_local.cli.indexer import Indexer
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.opening import Unusable
    from rest_local.llama.model import Model


def unusable(is_named: bool, awaited: Callable[[str], bool] = lambda name: False) -> Unusable:
    """Return the function that `Engine` calls for a datastore that it cannot open.

    `is_named` says that the user named it, and `awaited` that it is being built.
    """

    def decide(name: str | Path, error: DatastoreError, model: Model) -> None:
        if awaited(str(name)) and isinstance(error, (DatastoreNotFound, DatastoreVocabulary)):
            return
        if isinstance(error, DatastoreVocabulary):
            _tell_lack(name, model, is_named)
        elif is_named and not isinstance(error, DatastoreCorrupt):
            raise error
        else:
            warn(f"{error}; going on without it" if is_named else f"the default datastore is not used: {error}")

    return decide


def _tell_lack(name: str | Path, model: Model, is_named: bool) -> None:
    """Say which command builds the index for the model's vocabulary, of a datastore that nobody named once."""
    from rest_local.retrieval.home import build_command, datastore_path, newest_manifest

    path, vocabulary = datastore_path(name), model.vocabulary
    told = f"told {path.absolute()} {vocabulary.hash[:16]}"
    if is_named or recalled(told) is None:
        remember(told, True)
        command = build_command(path, newest_manifest(path).recipe, str(model.path))
        lacks = f"datastore {name}: nothing is built for this model's vocabulary ({vocabulary.name})"
        warn(f"{lacks}; going on without it; `{command}` builds it")


def open_engine(config: EngineConfig, live: Live = ASLEEP) -> Engine:
    """Open an engine, print its warnings, and return it. The caller closes it.

    Without a model it opens the default one. `live` is kept up to date in the background until the engine is closed.
    Raises ModelError, DatastoreError, OptionError.
    """
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import DEFAULT_NAME, list_datastores

    terminal.show_warnings()
    draft = config.draft_model
    if draft is not None and draft != NO_DRAFT_MODEL:
        draft = inputs.model_path(draft)
    config = replace(config, model=inputs.model_path(config.model), draft_model=draft)
    is_named = bool(config.datastores)
    if not is_named and config.policy != "off":
        try:
            if DEFAULT_NAME in list_datastores():
                config = replace(config, datastores=(DEFAULT_NAME,))
        except OSError as error:
            warn(f"the default datastore is not used: {error.filename}: {error.strerror}")
    with ExitStack() as undo:
        config, indexer = _indexed(config, live, undo)
        decide = unusable(
            is_named,
            awaited=lambda name: live.watch or (live.code is not None and name == live.code.name),
        )
        engine = Engine(replace(config, follow=bool(config.datastores)), decide)
        if indexer is not None:
            if engine.follower:
                indexer.committed = engine.follower.look_soon
            engine.closing.callback(undo.pop_all().close)
    for warning in engine.warnings:
        warn(warning)
    if indexer is not None:
        _announce(engine, live, indexer)
    return engine


def _indexed(config: EngineConfig, live: Live, undo: ExitStack) -> tuple[EngineConfig, Indexer | None]:
    """Return the config with the datastore of the code, and the process that keeps the datastores up to date."""
    from rest_local.cli.indexer import Indexer

    named = tuple(map(str, config.datastores))
    if config.policy == "off" or not (live.code or (live.watch and named)):
        return config, None
    indexer = Indexer(inputs.model_path(config.model), named if live.watch else (), live.code)
    undo.callback(indexer.close)
    code = (live.code.name,) if live.code else ()
    return replace(config, datastores=tuple(dict.fromkeys((*named, *code)))), indexer


def _announce(engine: Engine, live: Live, indexer: Indexer) -> None:
    """Say what is drafted from now, and what will be."""
    from rest_local.cli.indexer import held
    from rest_local.retrieval.home import datastore_path

    stores = {store.path: store for store in engine.datastores.in_use}
    for name in engine.config.datastores:
        store = stores.get(datastore_path(name))
        if live.code is not None and name == live.code.name:
            if store is None:
                say(f"indexing {live.code.root} in the background; drafts use it when it is ready")
                indexer.tell_ready()
            elif sys.stderr.isatty():
                say(f"drafting from {live.code.root}: {held(len(store), store.info()['documents'])}")
        elif store is None and live.watch:
            say(f"datastore {name} is used as soon as it is built for this model's vocabulary")


def require_template(engine: Engine, to_do: str, way_out: str) -> None:
    """Raise ModelError if the model was not trained to converse. `to_do` is what it cannot do."""
    if not engine.model.chat_template:
        raise ModelError(f"model {engine.model.path}: has no chat template, so it cannot {to_do}; {way_out}")
