"""The scripts of the demo model's recipe as modules, and the committed demo model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="session")
def recipe() -> Callable[[str], ModuleType]:
    """`recipe("prepare")`: models/prepare.py, imported as users run it but without torch and tokenizers."""

    def load(name: str) -> ModuleType:
        known = f"recipe_{name}"
        if known not in sys.modules:
            if name == "prepare_repeats":
                sys.modules.setdefault("prepare", load("prepare"))  # the scripts import each other by name
            spec = importlib.util.spec_from_file_location(known, MODELS / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[known] = module  # before it runs: dataclasses look their module up
            spec.loader.exec_module(module)
        return sys.modules[known]

    return load


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model. It is committed: where it is missing, tests fail."""
    path = MODELS / "demo.gguf"
    assert path.is_file(), f"{path} is missing; it belongs to the checkout, see models/README.md"
    return path
