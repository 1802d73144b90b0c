"""The models of `rest-local serve`: from what -m and --alias say to what a process loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rest_local.cli import indexer, inputs, opening
from rest_local.cli.live import Live
from rest_local.cli.messages import warn
from rest_local.decoding.config import AUTO_PROJECTOR, NO_DRAFT_MODEL, NO_PROJECTOR, EngineConfig
from rest_local.errors import InputInvalid, OptionError

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.router.memory import Need
    from rest_local.router.run import ModelChoice


class Named(NamedTuple):
    """A model to serve. `eager`: it was named itself, not by its folder."""

    name: str
    path: Path | None
    eager: bool


def named(models: Sequence[str]) -> list[Named]:
    """The models that -m names, the default one first; the demo model, as `path` None, without any.

    Raises InputInvalid for a folder without models, OptionError for two models of one name, and what
    `inputs.model_path` raises.
    """
    if not models:
        return [Named(inputs.model_name(None), None, True)]
    found: list[Named] = []
    for model in models:
        path = inputs.model_path(model)
        if path.is_dir():
            found += _in_folder(path)
        else:
            found.append(Named(inputs.model_name(model), path, True))
    names = [each.name.casefold() for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"two models are called {twice}; rename one of the files, or give the others one by one")
    return found


def _in_folder(folder: Path) -> list[Named]:
    from rest_local.catalog.describe import list_models
    from rest_local.catalog.stores import models_in

    found = []
    for facts in list_models(models_in(folder)):
        if facts.error:
            warn(f"{facts.path} is left out: {facts.error}")
        else:
            found.append(Named(facts.name, Path(facts.path), False))
    if not found:
        raise InputInvalid("folder", folder, "holds no model that can be used")
    return found


def aliases(given: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The aliases of each model: `NAME=MODEL`, where MODEL is one of `names`, else of the first model.

    Raises OptionError for a name that would mean two models, and for `*=MODEL`.
    """
    owners = {name: name for name in names}
    found: dict[str, tuple[str, ...]] = {}
    for alias in given:
        name, _, model = alias.rpartition("=")
        owner, own = (model, name) if name and model in names else (names[0], alias)
        if own == "*" != alias:
            raise OptionError(f"alias {alias}: any other name means the first model; give its -m first, and '*'")
        if own != "*":
            if owners.setdefault(own, owner) != owner:
                raise OptionError(f"alias {alias}: {own} already means the model {owners[own]}")
            found[owner] = (*found.get(owner, ()), own)
    return found


def choice(
    model: Named,
    config: EngineConfig,
    live: Live,
    aliases: tuple[str, ...],
    template: str | None = None,
    variables: dict[str, object] | None = None,
) -> ModelChoice:
    """What the server needs to know of a model. `template`: in the place of its own chat template; `variables`: for it,
    unless a request gives others.
    """
    from rest_local.paths import demo_model
    from rest_local.router.run import ModelChoice

    own = replace(config, model=model.path, mmproj=config.mmproj and _projector(config.mmproj))
    path = model.path or demo_model()
    return ModelChoice(
        model.name, path, partial(_load, own, live, template, variables or {}), partial(_need, own, path), aliases
    )


def _projector(given: str | Path) -> Path:
    """As given; a path for another process, which may have another directory."""
    path = Path(given)
    return path if path in (AUTO_PROJECTOR, NO_PROJECTOR) else path.absolute()


def _load(config: EngineConfig, live: Live, template: str | None, variables: dict[str, object]) -> Engine:
    """In the process of the model."""
    indexer.at_once()
    engine = opening.open_engine(config, live)
    if template is not None:
        engine.model.chat_template = template
    engine.model.template_variables = variables
    return engine


def _need(config: EngineConfig, path: Path) -> Need:
    from rest_local.router.memory import need_of

    draft = config.draft_model
    if draft is not None and draft != NO_DRAFT_MODEL:
        draft = inputs.model_path(draft)
    return need_of(replace(config, model=path, draft_model=draft))
