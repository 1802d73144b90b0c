"""Opens what an engine needs, in order: settings that work here, the model, its projector, its datastores, the draft
model, the context; and the history of earlier answers.

Everything that was opened is registered with the caller's exit stack, so an error at any place closes it all.

An engine keeps a model's answers for later runs, to draft from (`open_history`). The vocabulary and the model's own
description decide where they are, not the model's path: a model file that was moved keeps them, and quantizations with
the same name share them. Errors are never fatal and never change an answer: the history warns where something is wrong
with its files, and the engine goes on without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rest_local.calibration.settings import contexts_to_try, settings_for
from rest_local.catalog.describe import header_of, snapshots_of
from rest_local.catalog.quantization import in_bytes
from rest_local.catalog.stores import model_file, projector_of
from rest_local.decoding.config import AUTO_PROJECTOR, NO_DRAFT_MODEL, NO_PROJECTOR, EngineConfig
from rest_local.decoding.decode_context import WITHOUT_DRAFTER, DecodeContext
from rest_local.drafting.models.head_kinds import check_is_model
from rest_local.drafting.models.opening import NO_DRAFTER, Opener, has_usable_mtp, mtp_inside, opener_of
from rest_local.errors import (
    DatastoreError,
    ModelError,
    ModelInvalid,
    ModelNotFound,
    OptionError,
    ProjectorInvalid,
)
from rest_local.kv_cache.checkpoints import CHECKPOINT_BYTES, MOST_CHECKPOINTS
from rest_local.llama import library, load_fallback
from rest_local.llama.context import ContextSettings
from rest_local.llama.embedding import pooling
from rest_local.llama.gguf import Gguf, check_headers, read_gguf, trained_context
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.projector import Projector
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.history import History, history_home
from rest_local.retrieval.home import datastore_path

log = logging.getLogger("rest_local.history")
NAME_LENGTH = 40
MODEL_LENGTH = 200  # A file can call itself anything.
BUFFERS = 256 << 20  # Snapshots leave so many bytes free for the buffers of a forward pass.
NEXT_TO_EXPERTS = 1 / 8  # Snapshots get this share of free memory where weights are placed by hand.
_NO_LIMIT = 1 << 62  # bytes
_UNKNOWN = 2 << 30  # The bytes of free memory where the system does not say.
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def open_encoder(config: EngineConfig) -> Model | None:
    """Open the model if its file says that it reads a text in both directions: it makes vectors, and no text.

    Raises ModelError, also if it has no pooling method.
    """
    path = model_file(config.model)
    try:
        if not read_gguf(path).is_encoder:
            return None
    except (ModelError, OSError):  # Opening the model says what is wrong with it.
        return None
    model = Model.open(path, n_gpu_layers=config.n_gpu_layers, options=config.options)
    if pooling(model) is None:
        model.close()
        raise ModelInvalid(path, "reads in both directions and names no pooling, so it makes neither text nor vectors")
    return model


def free_memory(config: EngineConfig) -> int:
    """Return the bytes that are free where the cells will be: on the GPU if the model's layers go there, else of the
    system.
    """
    if uses_gpu(config):
        return sum(device.free_bytes for device in library.devices() if device.name in library.gpus()) or _UNKNOWN
    return min(_available(), _cgroup_room())


def with_context(config: EngineConfig, memory: int | None = None) -> EngineConfig:
    """Return the config with a context that fits the free memory if it names none (`EngineConfig.sized`), of which the
    model may take `memory` bytes. Raises ModelError.
    """
    if config.n_ctx is not None or config.cells is not None:
        return config
    path = model_file(config.model)
    metadata = read_gguf(path)
    share, room = _room_for(config, path, metadata, memory)
    cell_bytes = share * header_of(metadata, path).kv_bytes
    return config.sized(trained_context(path, config.options), cell_bytes, room)


def _room_for(config: EngineConfig, path: Path, metadata: Gguf, memory: int | None = None) -> tuple[float, int]:
    """Return the share of the model's cells that go where `free_memory` looks, and the bytes that the weights leave
    them there, of `memory` at most.
    """
    layers = config.n_gpu_layers
    room = min(free_memory(config), _NO_LIMIT if memory is None else memory)
    if _placed_by_hand(config):
        return 1.0, int(NEXT_TO_EXPERTS * room)
    all_layers = metadata.number(f"{metadata.architecture}.block_count") + 1
    share = min(1.0, layers / all_layers) if uses_gpu(config) and layers is not None and layers > 0 else 1.0
    size = sum(status.st_size for _, status in check_headers(path))
    return share, room - int(share * size) - BUFFERS


def _placed_by_hand(config: EngineConfig) -> bool:
    """Return True if options say which weights go to the GPU, so that their size there is unknown."""
    options = config.options
    return uses_gpu(config) and bool(options.cpu_moe or options.n_cpu_moe or options.override_tensor)


def uses_gpu(config: EngineConfig) -> bool:
    """Return True if layers of the model go to a GPU."""
    return library.supports_gpu() and config.n_gpu_layers != 0 and config.options.devices != ("none",)


def _available() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return _UNKNOWN


def _cgroup_room() -> int:
    """Return the bytes that the limit of a container leaves free, a large number if there is no limit."""
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text("ascii"))
        return max(limit - int((_CGROUP / "memory.current").read_text("ascii")), 0)
    return _NO_LIMIT


class Snapshots(NamedTuple):
    """Snapshots of a recurrent state: how many a slot has and wants, the bytes of one, and the number of slots."""

    number: int
    wanted: int
    size: int
    slots: int

    def __str__(self) -> str:
        each = f"{self.number} snapshots of {in_bytes(self.size)}"
        slots = f" for each of {self.slots} slots" if self.slots > 1 else ""
        total = f"{in_bytes(self.slots * (1 + self.number) * self.size)} with the state itself"
        kept = in_bytes(max(min(CHECKPOINT_BYTES, self.slots * MOST_CHECKPOINTS * self.size), self.size))
        return f"recurrent state: {each}{slots}, {total}; checkpoints of prompts: at most {kept} of main memory"

    @property
    def warning(self) -> str:
        """Return a warning if there are fewer than are wanted."""
        if self.number == self.wanted:
            return ""
        return f"{self}; {self.wanted} do not fit next to the layers: longer drafts go back to checkpoints (--rollback)"


def snapshots_for(config: EngineConfig, path: Path) -> Snapshots:
    """Return how many snapshots of a recurrent state each slot gets, from a header alone. Raises ModelError.

    They are those that were asked for, else as many as fit next to the layers, and 0 for a model without such a state.
    """
    metadata, options, slots = read_gguf(path), config.options, config.slots
    header = header_of(metadata, path)
    wanted = snapshots_of(header, options.rollback)
    if not wanted or options.rollback is not None:
        return Snapshots(wanted, wanted, header.state_bytes, slots)
    share, room = _room_for(config, path, metadata)
    if not _placed_by_hand(config):
        cells = config.cells or slots * config.context_length(trained_context(path, options))
        room -= int(share * cells * header.kv_bytes)
    each = slots * header.state_bytes
    fitting = (number for number in (wanted, 8, 4, 2, 1) if number * each <= room - each)
    return Snapshots(next(fitting, 0), wanted, header.state_bytes, slots)


def open_model(config: EngineConfig, undo: ExitStack) -> tuple[Model, str]:
    """Open the model with options that a child process has tried, and return it with a warning of what these gave up.

    Raises ModelError, OptionError.
    """
    path = model_file(config.model)
    snapshots = snapshots_for(config, path)
    options = replace(config.options, rollback=snapshots.number) if snapshots.size else config.options

    def contexts(tried: ModelOptions) -> list[ContextSettings]:
        size = config.context_length(trained_context(path, tried))
        return contexts_to_try(tried, size, config.threads or 0, config.slots, config.cells, config.fidelity)

    try:
        chosen = load_fallback.choose(path, config.n_gpu_layers, options, contexts)
    except ModelInvalid:
        check_is_model(path)
        raise
    mtp, refusal = False, ""
    if config.draft_model is None:
        mtp, refusal = has_usable_mtp(path, chosen.options, chosen.n_gpu_layers)
    model = Model.open(path, n_gpu_layers=chosen.n_gpu_layers, options=chosen.options, mtp=mtp)
    undo.callback(model.close)
    return model, "; ".join(filter(None, (snapshots.warning, chosen.warning, refusal)))


def open_projector(config: EngineConfig, model: Model, undo: ExitStack) -> tuple[Projector | None, str]:
    """Open the projector for images; return a warning as well if one that was found with the model cannot be used.
    Raises ProjectorInvalid for one that was named.
    """
    named = config.mmproj
    if named is None or named == NO_PROJECTOR:
        return None, ""
    path = projector_of(model.path) if named == AUTO_PROJECTOR else named
    if path is None:
        return None, ""
    try:
        return undo.enter_context(Projector.open(path, model, threads=config.threads or 0)), ""
    except ProjectorInvalid as error:
        if named != AUTO_PROJECTOR:
            raise
        return None, f"images are refused: {error}"


Unusable = Callable[[str | Path, DatastoreError, Model], None]
"""Called with a datastore that cannot be opened. It raises the error, or returns, and the datastore is left out."""


def open_datastores(
    config: EngineConfig, model: Model, undo: ExitStack, unusable: Unusable | None = None
) -> list[Datastore]:
    """Open the datastores by name or path. Raises DatastoreError unless `unusable` decides otherwise."""
    known = model.vocabulary.identity
    mmap = None if model.options.mmap else False
    stores: list[Datastore] = []
    for name in config.datastores:
        path = datastore_path(name)
        try:
            store = Datastore.open(path, vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=mmap)
        except DatastoreError as error:
            if unusable is None:
                raise
            unusable(name, error, model)
        else:
            stores.append(undo.enter_context(store))
    return stores


def open_context(config: EngineConfig, model: Model, undo: ExitStack) -> DecodeContext:
    """Open the context of all requests, after the draft model.

    One that cannot be used costs a warning. Raises ModelError.
    """
    size = config.context_length(model.n_ctx_train)
    threads = config.threads or 0
    settings = settings_for(model.options, size, threads, config.slots, config.cells)
    opener, refusal = _opener(config, model, size)
    try:
        context = DecodeContext.open(model, settings, config.fidelity, config.sessions, opener=opener)
    except ModelError as error:
        if opener is NO_DRAFTER:
            raise
        opener.close()  # Both may be too much for the memory.
        refusal = f"{WITHOUT_DRAFTER}: next to it the model cannot be evaluated ({error})"
        context = DecodeContext.open(model, settings, config.fidelity, config.sessions)
    undo.callback(context.close)
    if refusal:
        context.warnings.append(refusal)
    return context


def _opener(config: EngineConfig, model: Model, size: int) -> tuple[Opener, str]:
    """Return what opens a drafter for the model, and a warning if it is refused: no draft is worth an answer.

    Raises ModelNotFound, because the user wants to know of a mistyped name at once.
    """
    if config.draft_model is None:
        return (mtp_inside(model) if model.with_mtp else NO_DRAFTER), ""
    if config.draft_model == NO_DRAFT_MODEL:
        return NO_DRAFTER, ""
    path, threads, layers = model_file(config.draft_model), config.threads or 0, config.draft_gpu_layers
    try:
        return opener_of(path, model, size, config.slots, threads, layers), ""
    except ModelNotFound:
        raise
    except (ModelError, OptionError) as error:
        return NO_DRAFTER, f"{WITHOUT_DRAFTER}: {error}"


def open_history(model: Model) -> History | None:
    """Open the earlier answers of a model, to draft from.

    Return None if no directory can be made. Reads up to 32 MB.
    """
    try:
        path = history_home() / key_of(model)
    except OSError as error:
        log.warning("no history is kept: %s: %s", error.filename, error.strerror)
        return None
    about = {"model": model.name[:MODEL_LENGTH], "description": model.description}
    return History.open(path, VocabularyId(*model.vocabulary.identity), about, mmap=model.options.mmap)


def key_of(model: Model) -> str:
    """Return a legible name for a model's files. Other vocabularies, names, shapes and adapters give other ones."""
    shape: list[object] = [model.vocabulary.hash, model.name, model.n_params, model.n_layer, model.n_embd]
    if model.adapters.identity:  # Without adapters, keys of older versions stay valid.
        shape.append(model.adapters.identity)
    legible = re.sub(r"[^a-z0-9]+", "-", model.name.lower())[:NAME_LENGTH].strip("-") or "model"
    return f"{legible}-{hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]}"
