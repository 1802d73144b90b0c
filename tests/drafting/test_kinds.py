"""What a file drafts as is read from its header, and damaged headers are refused."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy import demo_model

from benchmarks.gguf_file import byte_vocabulary, write
from benchmarks.tiny_heads import tiny_assistant, tiny_dflash
from rest_local.drafting.models.head_kinds import check_is_model, kind_of
from rest_local.errors import ModelInvalid, ModelNotFound, OptionError
from rest_local.llama.gguf import read_gguf

MODELS = demo_model().parent
EAGLE3, MTP = MODELS / "demo-eagle3.gguf", MODELS / "demo-mtp.gguf"


def test_the_kinds_of_the_committed_files() -> None:
    assert [kind_of(path) for path in (demo_model(), EAGLE3, MTP)] == ["model", "eagle3", "mtp"]
    assert read_gguf(MTP).number("mimo2.nextn_predict_layers") == 1
    assert read_gguf(demo_model()).architecture == "llama"


@pytest.mark.parametrize(("architecture", "name"), [("medusa", "Medusa"), ("hass", "HASS")])
def test_heads_that_nothing_here_drives_are_refused_by_name(tmp_path: Path, architecture: str, name: str) -> None:
    path = write(tmp_path / "head.gguf", architecture, {}, byte_vocabulary(384), [])
    with pytest.raises(OptionError, match=f"{name} heads are not supported; give an EAGLE-3 head, MTP layers, a"):
        kind_of(path)
    with pytest.raises(ModelInvalid, match=f"holds a {name} head and no model that can answer"):
        check_is_model(path)


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [(tiny_dflash, "dflash", "DFlash drafter"), (tiny_assistant, "assistant", "Gemma assistant")],
)
def test_drafters_are_told_by_their_headers(make: Callable[[Path], Path], kind: str, name: str, tmp_path: Path) -> None:
    path = make(tmp_path / "drafter.gguf")
    assert kind_of(path) == kind
    with pytest.raises(ModelInvalid, match=f"holds a {name} and no model that can answer"):
        check_is_model(path)


def test_a_head_is_no_model_that_can_answer() -> None:
    check_is_model(demo_model())
    with pytest.raises(ModelInvalid, match=r"holds an EAGLE-3 head and no model .* give it as the draft model"):
        check_is_model(EAGLE3)
    with pytest.raises(ModelInvalid, match="holds MTP layers and no model"):
        check_is_model(MTP)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        kind_of(tmp_path / "none.gguf")


@given(st.data())
def test_a_header_that_is_cut_off_or_damaged_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = EAGLE3.read_bytes()[:120_000]
    cut = data.draw(st.integers(0, len(whole)))
    damaged = bytearray(whole[:cut])
    for at in data.draw(st.lists(st.integers(0, 400), max_size=4)):
        if at < len(damaged):
            damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("headers") / "damaged.gguf"
    path.write_bytes(bytes(damaged))
    with suppress(ModelInvalid):  # anything else is a fault
        assert isinstance(read_gguf(path, tensors=True).architecture, str)
