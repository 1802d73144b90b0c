"""The recipes of `datastore/` are valid and shipped; one of the user's own is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit

from rest_local.errors import InputInvalid
from rest_local.retrieval.sources import Git, Python, Transcripts, Walk
from rest_local.retrieval.sources.recipes import list_recipes, read_recipe

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "datastore").glob("*.toml"))
GOOD = '[[sources]]\nkind = "walk"\npaths = ["src"]\n'


def test_every_recipe_is_shipped_and_described() -> None:
    wheel = tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()["tool"]["hatch"]["build"]["targets"]["wheel"]
    shipped = {name: to for name, to in wheel["force-include"].items() if name.startswith("datastore/")}
    assert shipped == {f"datastore/{name}.toml": f"rest_local/data/recipes/{name}.toml" for name in NAMES}
    described = (ROOT / "datastore" / "README.md").read_text()
    for recipe in list_recipes():
        assert f"| `{recipe.name}` |" in described
        assert recipe.description
        assert recipe.licence
        assert recipe.size
        assert recipe.recorded() == {
            "recipe": recipe.name, "description": recipe.description, "licence": recipe.licence,
        }  # fmt: skip
    assert [recipe.name for recipe in list_recipes()] == NAMES


def test_the_sources_of_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REST_LOCAL_DATA", "/data")
    assert read_recipe("python").sources == (Python(),)
    assert read_recipe("site-packages").sources == (Python(True),)
    assert read_recipe("git-history").sources == (Git(".", history=True),)
    assert read_recipe("chats").sources == (Transcripts("/data/sessions/*.json"),)
    for name in ("c-headers", "documentation", "node-modules"):
        (source,) = read_recipe(name).sources
        assert isinstance(source, Walk)
        assert source.include


def test_of_several_paths_those_that_exist_are_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "notes").mkdir(parents=True)
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace('"src"', '"src", "~/notes"'))
    recipe = read_recipe(str(path))
    assert recipe.name == "mine"
    assert recipe.present() == [Walk((str(tmp_path / "home" / "notes"),))]
    (tmp_path / "home" / "notes").rmdir()
    with pytest.raises(InputInvalid, match=f"recipe mine: this machine has none of: {tmp_path}/src, "):
        recipe.present()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[sources", "mine.toml: "),
        ("", "give at least one table"),
        ("sources = []", "give at least one table"),
        ("sources = [5]", "not known here"),
        (f"tokens = 5\n{GOOD}", "unknown field 'tokens'"),
        (f"size = 5\n{GOOD}", "must be texts"),
        (GOOD.replace("walk", "torrent"), "'torrent': not known here"),
        (GOOD.replace("paths", "path"), "unknown field 'path'"),
        ("\x00", "mine.toml: "),
        ("a = " + "[" * 100_000, "mine.toml: "),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputInvalid, match=complaint):
        read_recipe(str(path))
