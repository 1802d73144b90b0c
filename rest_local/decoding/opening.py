"""Opens what an engine needs, in order: settings that work here, the model, its datastores, the draft model, the lane.

Contract: everything that was opened is registered with the caller's exit stack, so an error at any place closes it all.
"""

from __future__ import annotations

from contextlib import ExitStack

from rest_local.calibration.settings import contexts_to_try, settings_for
from rest_local.catalog.find import model_file
from rest_local.decoding.config import LARGEST_DEFAULT, TRAINED, EngineConfig
from rest_local.decoding.lane import Lane
from rest_local.drafting.draft_model import DraftModel
from rest_local.llama import ladder
from rest_local.llama.model import Model
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path


def open_model(config: EngineConfig, undo: ExitStack) -> tuple[Model, str]:
    """The model with options that were tried in a child process, and a warning about what they gave up, if anything.
    Raises ModelError, OptionError.
    """
    path = model_file(config.model)
    asked = 0 if config.n_ctx == TRAINED else config.n_ctx  # as for `trial.attempt`
    chosen = ladder.choose(
        path,
        config.n_gpu_layers,
        config.options,
        lambda tried: contexts_to_try(
            tried, asked or LARGEST_DEFAULT, config.threads or 0, config.slots, config.cells, config.exact
        ),
        asked,
    )
    model = Model.open(path, n_gpu_layers=chosen.n_gpu_layers, options=chosen.options)
    undo.callback(model.close)
    return model, chosen.warning


def open_datastores(config: EngineConfig, model: Model, undo: ExitStack) -> list[Datastore]:
    """The datastores by name or path. Raises DatastoreError."""
    known = model.vocabulary.identity
    mmap = None if model.options.mmap else False
    stores = []
    for name in config.datastores:
        store = Datastore.open(datastore_path(name), vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=mmap)
        stores.append(undo.enter_context(store))
    return stores


def open_lane(config: EngineConfig, model: Model, undo: ExitStack) -> Lane:
    """The context that requests share, and the draft model, which is opened before it. Raises ModelError."""
    size = config.context_length(model.n_ctx_train)
    threads = config.threads or 0
    drafter: DraftModel | None = None
    if config.draft_model is not None:
        path = model_file(config.draft_model)
        layers = config.draft_gpu_layers
        drafter = DraftModel.open(path, model.vocabulary, size, config.slots + 1, threads=threads, n_gpu_layers=layers)
        undo.callback(drafter.close)
    settings = settings_for(model.options, size, threads, config.slots, config.cells)
    lane = Lane.open(model, settings, config.exact, draft_model=drafter)
    undo.callback(lane.close)
    return lane
