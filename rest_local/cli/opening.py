"""How every command opens its engine: the model by its name, the datastores, and the warnings on stderr.

Where no model was named, a command that needs one to converse with asks at a terminal which one to take.

What happens to a datastore that cannot be opened:

- It lacks an index for the model's vocabulary: at a terminal one question, and "yes" builds it. Elsewhere, after a "no"
  and with --no-build-missing the answer is drafted without it, and one line names the command that builds it. With
  --build-missing it is built without a question.
- It is damaged: left out with one line, since it could only have made the answer faster.
- Anything else is refused.

The default datastore is used without being named, so it is never a reason to refuse. A question about it that was
answered with "no" is not asked again, and a line about what it lacks is printed once for each vocabulary.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import inputs, terminal
from rest_local.cli.indexer import ASLEEP, Live
from rest_local.cli.terminal import duration, say, warn
from rest_local.decoding.config import NO_DRAFT_MODEL, EngineConfig
from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreNotFound,
    DatastoreVocabulary,
    ModelError,
    OptionError,
    RestLocalError,
)

if TYPE_CHECKING:
    from rest_local.catalog.describe import ModelFacts
    from rest_local.catalog.stores import StoredModel
    from rest_local.cli.indexer import Indexer
    from rest_local.decoding.core import Unusable
    from rest_local.decoding.engine import Engine
    from rest_local.llama.model import Model
    from rest_local.retrieval.sources.source import Source

OFFERED = 5  # models to choose from
LOOKED_AT = 20  # of the newest: each header takes up to 50 ms the first time

# Least main memory in GB, and a model of that family that leaves half of it free: 4.7, 2.1, 1.1 and 0.5 GB.
_SUGGESTED = ((12, "7B"), (6, "3B"), (3, "1.5B"), (0, "0.5B"))
FEW_PROCESSORS, SMALL_GB = 4, 4.0  # with so few, no model that wants more memory than this


def next_steps() -> list[str]:
    """The lines of `rest-local` alone."""
    newest = _newest()
    what = "rest-local runs GGUF models on this machine, faster with the same output."
    help_ = "`rest-local demo` shows the gain, `rest-local --help` lists the commands."
    if newest:
        name = newest[0].name
        here = "One model is" if len(newest) == 1 else f"{len(newest)} models are"
        return [
            what,
            f"{here} here (`rest-local models`). Draft from your code, and talk:",
            f"    rest-local index build ~/src/myproject -m {name}",
            f"    rest-local chat -m {name}",
            help_,
        ]
    return [what, *_download(), help_]


def choose() -> str:
    """The name of the model that the user chooses at a terminal, of the newest that can converse.

    Raises OptionError where there is none, or no terminal, after lines on stderr that say what to do.
    """
    found = _that_converse()
    if not found:
        pull = f"    rest-local pull {suggestion()}"
        _say(["No model was named, and none that can converse is on this machine. This one fits its memory:", pull])
        raise OptionError("no model was named; download one, then give its name with -m")
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        _say(["No model was named. On this machine:", *(f"    -m {model.name}" for model in found[: OFFERED - 2])])
        raise OptionError("no model was named; give one with -m, `rest-local models` lists all")
    from rest_local.catalog.quantization import in_bytes

    width = max(len(model.name) for model in found)
    _say(["No model was named (-m). On this machine:"])
    _say([f"  {n}  {model.name:<{width}}  {in_bytes(model.bytes):>7}" for n, model in enumerate(found, 1)])
    number = click.prompt("Which one", type=click.IntRange(1, len(found)), default=1, err=True)
    return found[int(number) - 1].name


def suggestion() -> str:
    """A model of a hub that fits the main memory of this machine, and its processors: each token reads all of it."""
    from rest_local.llama.cores import usable_cpus

    memory = min(_memory_gb(), SMALL_GB if len(usable_cpus()) <= FEW_PROCESSORS else math.inf)
    size = next(size for least, size in _SUGGESTED if memory >= least)
    return f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF:Q4_K_M"


def _download() -> list[str]:
    name = suggestion()
    return [
        "No model is here yet. This one fits the memory of this machine:",
        f"    rest-local pull {name}",
        f"    rest-local chat -m {name}",
    ]


def _newest() -> list[StoredModel]:
    """The models on the disk, the newest first, without the demo model."""
    from rest_local.catalog.stores import DEMO, stored_models

    def changed(model: StoredModel) -> float:
        try:
            return model.path.stat().st_mtime
        except OSError:
            return 0.0

    return sorted((model for model in stored_models() if model.store != DEMO), key=changed, reverse=True)


def _that_converse() -> list[ModelFacts]:
    from rest_local.catalog.describe import list_models

    facts = list_models(_newest()[:LOOKED_AT])
    return [each for each in facts if each.header.chat_template and not each.error][:OFFERED]


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


def _memory_gb() -> float:
    """Main memory; 8 where the platform does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (AttributeError, ValueError, OSError):
        return 8.0


def unusable(build: bool | None, is_named: bool, awaited: Callable[[str], bool] = lambda name: False) -> Unusable:
    """What `Engine` calls for a datastore that it cannot open. build: --build-missing, None: ask; is_named: the user
    named it, so that it is no default; awaited: whether it is being built, and used when it is there.
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
    """Build the index for the model's vocabulary if that is wanted, else say how. Whether it was built."""
    from rest_local.retrieval.building.indexing import recorded_sources
    from rest_local.retrieval.home import build_command, datastore_path, newest_manifest

    path, vocabulary = datastore_path(name), model.vocabulary
    asks = build is None and terminal.can_ask() and not _noted("declined", path, vocabulary.hash)
    try:
        if build or asks:
            sources = recorded_sources(path)
            if build or _wanted(name, model, sources):
                return _build(name, model, sources)
            _note("declined", path, vocabulary.hash)
    except RestLocalError as error:  # the answer can do without
        warn(f"{error}; going on without it")
        return False
    if is_named or (build is None and not asks and not _noted("told", path, vocabulary.hash)):
        _note("told", path, vocabulary.hash)
        command = build_command(path, newest_manifest(path).recipe, str(model.path))
        lacks = f"datastore {name}: nothing is built for this model's vocabulary ({vocabulary.name})"
        warn(f"{lacks}; going on without it; `{command}` builds it")
    return False


def _wanted(name: str | Path, model: Model, sources: list[Source]) -> bool:
    from rest_local.decoding.transcripts import turn_renderer
    from rest_local.retrieval.building.indexing import estimate

    guess = estimate(sources, model.vocabulary, turn_renderer(model, sources))
    takes = f"about {in_bytes(guess.disk)} on disk and {duration(max(guess.seconds, 1))}"
    return terminal.ask(
        f"Datastore {name} has nothing for this model's vocabulary ({model.vocabulary.name}) yet. "
        f"Build it from {guess.files:,} files ({in_bytes(guess.text)}; {takes})?",
        default=True,
    )


def _build(name: str | Path, model: Model, sources: list[Source]) -> bool:
    from rest_local.decoding.transcripts import turn_renderer
    from rest_local.retrieval.building.indexing import build_from_sources

    with terminal.build_bar(False, sources) as progress:
        made = {"model": str(model.path.absolute())}
        render = turn_renderer(model, sources)
        build_from_sources(
            name, sources, vocabulary=model.vocabulary, recipe=made, progress=progress, replace=False, render=render
        )
    return True


def _marker(kind: str, path: Path, vocabulary_hash: str) -> Path:
    import hashlib

    from rest_local.paths import cache_dir

    key = "\0".join((kind, os.path.abspath(path), vocabulary_hash))
    return cache_dir() / "asked" / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _noted(kind: str, path: Path, vocabulary_hash: str) -> bool:
    try:
        return _marker(kind, path, vocabulary_hash).exists()
    except OSError:
        return False


def _note(kind: str, path: Path, vocabulary_hash: str) -> None:
    """Remember it in the cache. Where that cannot be written, the question or the line comes again."""
    try:
        marker = _marker(kind, path, vocabulary_hash)
        marker.parent.mkdir(exist_ok=True)
        marker.touch()
    except OSError:
        pass


def open_engine(config: EngineConfig, live: Live = ASLEEP) -> Engine:
    """Open an engine, print its warnings, and return it; the caller closes it.

    Without a model it is the demo model's, which a terminal is told. `missing` says what happens to a datastore that
    cannot be opened. `live`: what is kept up to date in the background, until the engine is closed. Raises ModelError,
    DatastoreError, OptionError.
    """
    from rest_local.cli import terminal
    from rest_local.decoding.engine import Engine
    from rest_local.retrieval.home import DEFAULT_NAME

    terminal.show_warnings()
    config = _with_files(config)
    is_named = bool(config.datastores)
    if not is_named and config.policy != "off" and _has_default():
        config = replace(config, datastores=(DEFAULT_NAME,))
    with ExitStack() as undo:
        config, indexer = _indexed(config, live, undo)
        decide = unusable(config.build_missing, is_named, awaited=_awaited(live))
        engine = Engine(replace(config, follow=bool(config.datastores)), decide)
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

    model = inputs.model_path(config.model or choose())
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
