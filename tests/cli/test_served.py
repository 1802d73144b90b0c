"""What `rest-local serve` makes of -m, --alias, --memory and --idle."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from support.toy import demo_model

from rest_local.cli import options, serve
from rest_local.cli.indexer import ASLEEP
from rest_local.cli.main import cli
from rest_local.decoding.config import AUTO_PROJECTOR, EngineConfig
from rest_local.errors import OptionError


def folder_of(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "models"
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(demo_model(), path)
    return folder


def test_a_folder_is_all_its_models_and_none_is_loaded_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, "b.gguf", "a.gguf", "deep/c-Q4_K_M.gguf", "mmproj-a.gguf")
    (folder / "broken.gguf").write_bytes(b"no model")
    found = serve.named_models([str(folder)])
    assert sorted((each.name, each.eager) for each in found) == [("a", False), ("b", False), ("c-Q4_K_M", False)]
    assert "broken.gguf is left out: " in capsys.readouterr().err


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a.gguf")
    with pytest.raises(OptionError, match="two models are called a"):
        serve.named_models([str(folder), str(folder / "a.gguf")])


def test_aliases_are_of_the_first_model_unless_they_name_another() -> None:
    given = ("coder", "*", "fast=b", "a=b=b", "x=unknown")
    assert serve.aliases_of(given, ["a", "b"]) == {"a": ("coder", "x=unknown"), "b": ("fast", "a=b")}


def test_what_loads_a_model_can_be_sent_to_its_process(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "a.gguf") / "a.gguf"
    choice = serve.choice(serve.Named("a", path, True), EngineConfig(n_ctx=64), ASLEEP, ())
    engine = pickle.loads(pickle.dumps(choice.load))()
    with engine:
        assert (engine.model.path, engine.n_ctx) == (path, 64)
    assert choice.need().files == path.stat().st_size


@pytest.mark.parametrize("text", ["soon", "-5m", "", "m", "1e99d", "nan"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time"):
        options.duration(*_option(), text)


def _option() -> tuple[click.Context, click.Parameter]:
    return click.Context(cli), click.Option(["--idle"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("b",), "b already means the model b"),
        (("a=b",), "a already means the model a"),
        (("x", "x=b"), "x already means the model a"),
        (("*=b",), "any other name means the first model"),
    ],
)
def test_an_alias_that_would_mean_two_models_is_refused(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        serve.aliases_of(given, ["a", "b"])


def test_the_process_of_a_model_gets_a_path_that_does_not_depend_on_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = serve.Named("demo", demo_model(), True)
    given = (Path("mmproj.gguf"), AUTO_PROJECTOR, None)
    made: list[Any] = [serve.choice(model, EngineConfig(mmproj=each), ASLEEP, ()) for each in given]
    assert [each.load.args[0].mmproj for each in made] == [tmp_path / "mmproj.gguf", AUTO_PROJECTOR, None]
