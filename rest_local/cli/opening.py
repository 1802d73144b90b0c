"""Open the engine of a command: find the model by its name, open the datastores, and print warnings on stderr.

What happens to a datastore that cannot be opened depends on the reason:

- It lacks an index for the model's vocabulary. A terminal asks one question, and "yes" builds the index. Without a
terminal, after a "no" and with --no-build-missing, the command works without it, and one line names the command that
builds it. With --build-missing it is built without a question. - It is damaged. It is left out with one line, since it
could only have made the answer faster. - Anything else is an error.

The default datastore is used without being named, so it is never a reason to refuse. A question about it that was
answered with "no" is not asked again, and a line about what it lacks is printed once for each vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import inputs, models, terminal
from rest_local.cli.indexer import ASLEEP, NEVER, Live, recalled, remember
from rest_local.cli.terminal import duration, say, warn
from rest_local.decoding.config import NO_DRAFT_MODEL, EngineConfig
from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreNotFound,
    DatastoreVocabulary,
    ModelError,
    RestLocalError,
)

if TYPE_CHECKING:
    from rest_local.cli.indexer import Indexer
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.opening import Unusable
    from rest_local.llama.model import Model
    from rest_local.retrieval.sources.source import Source


def unusable(build: bool | None, is_named: bool, awaited: Callable[[str], bool] = lambda name: False) -> Unusable:
    """Return the function that `Engine` calls for a datastore that it cannot open.

    `build` is --build-missing. `is_named` says that the user named it, and `awaited` that it is being built.
    """

    def decide(name: str | Path, error: DatastoreError, model: Model) -> bool:
        if awaited(str(name)) and isinstance(error, (DatastoreNotFound, DatastoreVocabulary)):
            return False
        if isinstance(error, DatastoreVocabulary):
            return _add_index(name, model, build, is_named)
        if is_named and not isinstance(error, DatastoreCorrupt):
            raise error
        warn(f"{error}; going on without it" if is_named else f"the default datastore is not used: {error}")
        return False

    return decide


def _add_index(name: str | Path, model: Model, build: bool | None, is_named: bool) -> bool:
    """Build the index for the model's vocabulary if the user wants it, or else say how. Return True if it was built."""
    from rest_local.decoding.opening import build_index
    from rest_local.retrieval.building.indexing import recorded_sources
    from rest_local.retrieval.home import build_command, datastore_path, newest_manifest

    path, vocabulary = datastore_path(name), model.vocabulary
    asks = build is None and terminal.can_ask() and recalled(_key("declined", path, vocabulary.hash)) is None
    try:
        if build or asks:
            sources = recorded_sources(path)
            if build or _wanted(name, model, sources):
                with terminal.build_bar(False, sources) as progress:
                    build_index(name, model, sources, progress)
                return True
            remember(_key("declined", path, vocabulary.hash), NEVER)
    except RestLocalError as error:
        warn(f"{error}; going on without it")
        return False
    told = _key("told", path, vocabulary.hash)
    if is_named or (build is None and not asks and recalled(told) is None):
        remember(told, NEVER)
        command = build_command(path, newest_manifest(path).recipe, str(model.path))
        lacks = f"datastore {name}: nothing is built for this model's vocabulary ({vocabulary.name})"
        warn(f"{lacks}; going on without it; `{command}` builds it")
    return False


def _wanted(name: str | Path, model: Model, sources: list[Source]) -> bool:
    from rest_local.decoding.opening import turn_renderer
    from rest_local.retrieval.building.indexing import estimate

    guess = estimate(sources, model.vocabulary, turn_renderer(model, sources))
    takes = f"about {in_bytes(guess.disk)} on disk and {duration(max(guess.seconds, 1))}"
    return terminal.ask(
        f"Datastore {name} has nothing for this model's vocabulary ({model.vocabulary.name}) yet. "
        f"Build it from {guess.files:,} files ({in_bytes(guess.text)}; {takes})?",
        default=True,
    )


def _key(kind: str, path: Path, vocabulary_hash: str) -> str:
    """Return the key under which the answer to a question about a datastore is kept."""
    return f"{kind} {path.absolute()} {vocabulary_hash[:16]}"


def open_engine(config: EngineConfig, live: Live = ASLEEP) -> Engine:
    """Open an engine, print its warnings, and return it. The caller closes it.

    Without a model it opens the default one. `live` is kept up to date in the background until the engine is closed.
    Raises ModelError, DatastoreError, OptionError.
    """
    from rest_local.cli import terminal
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
            config.build_missing,
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


def tell_snapshots(config: EngineConfig) -> None:
    """Say on stderr, before the model is loaded, how much memory the snapshots of its recurrent state take."""
    from rest_local.decoding.opening import snapshots_for

    with suppress(RestLocalError, OSError):  # Loading will report the error.
        if (found := snapshots_for(config, inputs.model_path(config.model))).size:
            say(str(found))


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


def conversing(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the model that was named, or that the user chooses (`models.choose`).

    It is for commands that converse or follow instructions. Raises OptionError if there is no model, and the errors of
    `inputs.model_path`.
    """
    return replace(config, model=inputs.model_path(config.model or models.choose()))


def require_template(engine: Engine, to_do: str, way_out: str) -> None:
    """Raise ModelError if the model was not trained to converse. `to_do` is what it cannot do."""
    if not engine.model.chat_template:
        raise ModelError(f"model {engine.model.path}: has no chat template, so it cannot {to_do}; {way_out}")
