"""`rest-local config`: what it shows, and that it changes one key and nothing else."""

import json
import os
import random
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from fake_cli_engine import Call

from rest_local.cli import config, settings

KEPT = """# mine
model = "/models/a.gguf"  # the usual one

# sampling
temp = 0.7   # warm

[profile."qwen*"]  # all of them
ctx = 32768
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_CONFIG", str(tmp_path / "folder" / "config.toml"))
    for name in ("REST_LOCAL_NO_CODE", "REST_LOCAL_MODEL"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "config.toml"


def read(path: Path) -> dict[str, Any]:
    return tomlkit.parse(path.read_bytes().decode()).unwrap()


def test_show_says_where_each_value_comes_from(call: Call, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(KEPT)
    monkeypatch.setenv("REST_LOCAL_TOP_K", "20")
    monkeypatch.setenv("REST_LOCAL_TEMP", "")  # empty, as none
    assert [line.split(maxsplit=2) for line in call("config", "show").out.splitlines()] == [
        ["model", '"/models/a.gguf"', f"{path}:2"],
        ["temp", "0.7", f"{path}:5"],
        ["top-k", '"20"', "environment, REST_LOCAL_TOP_K"],
    ]
    lines = call("config", "show", "-m", "dir/Qwen3.gguf", "ctx", "max-body").out.splitlines()
    assert [line.split(maxsplit=2) for line in lines] == [
        ["ctx", "32768", f'{path}:8, profile "qwen*"'],
        ["max-body", "8388608", "default"],
    ]


@pytest.mark.parametrize("text", ["ctx = 'x'\n", "[profile.a]\ntopk = 3\n", "ctx =\n"])
def test_show_checks_the_whole_file(call: Call, path: Path, text: str) -> None:
    path.write_text(text)
    done = call("config", "show")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith(f"rest-local: error: configuration {path}:")


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["top-k", "20"], "top-k", 20),
        (["seed", "-1"], "seed", -1),
        (["temp", "0.25"], "temp", 0.25),
        (["history", "off"], "history", False),
        (["gpu-layers", "all"], "gpu-layers", "all"),
        (["gpu-layers", "20"], "gpu-layers", 20),
        (["model", "3"], "model", "3"),
        (["system", 'say "no"\nand\\yes\t\u00e9'], "system", 'say "no"\nand\\yes\t\u00e9'),
        (["datastore", "a", "b"], "datastore", ["a", "b"]),
        (["logit-bias", "15=-1.5"], "logit-bias", ["15=-1.5"]),
        (["tensor-split", "3,1"], "tensor-split", "3,1"),
    ],
)
def test_set_writes_a_value_of_the_options_kind(
    call: Call, path: Path, arguments: list[str], key: str, value: object
) -> None:
    done = call("config", "set", *arguments)
    assert (done.code, done.err) == (0, "")
    found = read(path)[key]
    assert found == value
    assert type(found) is type(value)
    assert json.loads(call("config", "show", key, "--json").out)["settings"][0]["value"] == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topk", "20"], "unknown key topk; did you mean top-k?"),
        (["top_k", "20"], "unknown key top_k; write top-k"),
        (["top-k", "many"], "top-k: 'many' is not a valid integer"),
        (["ctx", "-5"], "ctx: -5 is not in the range x>=0"),
        (["history", "maybe"], "history: 'maybe' is not a valid boolean"),
        (["policy", "fast"], "policy: 'fast' is not one of"),
        (["top-k", "1", "2"], "top-k: takes one value, not 2"),
        (["model", "x", "--profile", "q*"], "model: the model chooses the profile"),
        (["ctx", "5", "--profile", ""], "--profile: give a glob, for example 'qwen*'"),
    ],
)
def test_set_refuses_what_a_command_would_refuse(call: Call, path: Path, arguments: list[str], message: str) -> None:
    path.write_text(KEPT)
    done = call("config", "set", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"rest-local: error: {message}")
    assert path.read_text() == KEPT


def test_set_keeps_comments_and_order(call: Call, path: Path) -> None:
    path.write_text(KEPT)
    call("config", "set", "temp", "0.2")
    call("config", "set", "--profile", "qwen*", "ctx", "4096")
    assert path.read_text() == KEPT.replace("0.7", "0.2").replace("32768", "4096")
    call("config", "set", "top-k", "20")
    call("config", "set", "--profile", "llama*", "top-k", "30")
    assert read(path) == {
        "model": "/models/a.gguf", "temp": 0.2, "top-k": 20,
        "profile": {"qwen*": {"ctx": 4096}, "llama*": {"top-k": 30}},
    }  # fmt: skip
    assert all(
        comment in path.read_text() for comment in ("# mine\n", "# the usual one\n", "# warm\n", "# all of them")
    )
    assert list(read(path)["profile"]) == ["qwen*", "llama*"], "the last one wins, so the order has a meaning"


def read_text(text: str) -> dict[str, Any]:
    return tomlkit.parse(text).unwrap()


def test_any_series_of_changes_gives_what_a_dictionary_gives(call: Call, path: Path) -> None:
    choose = random.Random(7)
    path.write_text(KEPT)
    expected = read_text(KEPT)
    values = {"ctx": 4096, "top-k": 7, "temp": 0.5, "history": False, "datastore": ["a", "b"], "system": "be brief"}
    for _ in range(30):
        key, profile = choose.choice(list(values)), choose.choice(["", "", "qwen*", "a.b*", 'x"y'])
        table = expected["profile"].setdefault(profile, {}) if profile else expected
        where = ["--profile", profile] if profile else []
        if key in table and choose.random() < 0.5:
            assert call("config", "unset", key, *where).code == 0
            del table[key]
        else:
            value = values[key]
            texts = value if isinstance(value, list) else [str(value)]
            assert call("config", "set", key, *texts, *where).code == 0
            table[key] = value
        expected["profile"] = {name: held for name, held in expected["profile"].items() if held}
        found = read(path)
        assert {"profile": {}} | found == expected
        assert "# mine\n" in path.read_text()


@pytest.mark.parametrize("command", [["set", "ctx", "3"], ["unset", "ctx"]])
def test_a_damaged_file_is_not_overwritten(call: Call, path: Path, command: list[str]) -> None:
    path.write_text("ctx = = 3\n")
    done = call("config", *command)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"configuration {path}:1: not TOML" in done.err
    assert path.read_text() == "ctx = = 3\n"


def test_a_new_file_is_private_and_an_old_one_keeps_its_mode_and_link(call: Call, path: Path, tmp_path: Path) -> None:
    path.parent.rmdir()
    call("config", "set", "top-k", "20")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    dotfile = tmp_path / "dotfile"
    path.rename(dotfile)
    dotfile.chmod(0o644)
    path.symlink_to(dotfile)
    call("config", "set", "top-k", "30")
    assert path.is_symlink()
    assert read(dotfile) == {"top-k": 30}
    assert stat.S_IMODE(dotfile.stat().st_mode) == 0o644
    assert sorted(place.name for place in path.parent.iterdir()) == ["config.toml"]


def test_a_write_that_fails_leaves_the_file(call: Call, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(KEPT)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    done = call("config", "set", "top-k", "20")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"configuration {path}: cannot be written: No space left on device" in done.err
    assert path.read_text() == KEPT
    assert sorted(place.name for place in path.parent.iterdir()) == ["config.toml"]


def test_what_is_no_file_is_not_replaced(call: Call, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device such as /dev/null must stay one. A socket stands for it here."""
    listener = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(path.parent)  # the path of a socket has a limit
    listener.bind("device")
    listener.close()
    monkeypatch.setenv("REST_LOCAL_CONFIG", "device")
    monkeypatch.setattr(settings, "read", lambda path: "")
    done = call("config", "set", "top-k", "20")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "not a regular file" in done.err
    assert (path.parent / "device").is_socket()


def test_changes_at_one_moment_are_all_kept(path: Path) -> None:
    """Threads make them. The lock belongs to the open file, so processes are safe as well."""
    profiles = [f"model-{n}" for n in range(8)]
    barrier = threading.Barrier(len(profiles))

    def change(profile: str) -> None:
        barrier.wait(60)
        for n in range(1, 6):
            with config._changed(path) as document:
                config._table(document, profile)["top-k"] = n

    threads = [threading.Thread(target=change, args=(profile,)) for profile in profiles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(path) == {"profile": {profile: {"top-k": 5} for profile in profiles}}
