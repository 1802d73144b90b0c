"""The scripts of the demo model's recipe as modules, and the committed demo model."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import load_script

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="session")
def recipe() -> Callable[[str], ModuleType]:
    """Return `recipe("prepare")`, which gives models/prepare.py as a module, without torch and tokenizers."""

    def load(name: str) -> ModuleType:
        known = f"recipe_{name}"
        if known not in sys.modules:
            if name == "prepare_repeats":
                sys.modules.setdefault("prepare", load("prepare"))  # the scripts import each other by name
            load_script(MODELS / f"{name}.py", known)
        return sys.modules[known]

    return load


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """Return the demo model, which is committed. Tests fail without it."""
    path = MODELS / "demo.gguf"
    assert path.is_file(), f"{path} is missing; it belongs to the checkout, see models/README.md"
    return path
