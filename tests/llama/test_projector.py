"""Projectors: what is refused, what an image becomes, and what is computed once."""

import struct
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.images import WIDTH, picture, projector_for

from models import tiny_mmproj
from rest_local.errors import GenerationError, ProjectorInvalid
from rest_local.llama import projector as module
from rest_local.llama.model import Model
from rest_local.llama.projector import Projector


@pytest.fixture
def model(tiny_model) -> Iterator[Model]:
    with Model.open(tiny_model("llama")) as model:
        yield model


@pytest.fixture
def projector(model: Model, tmp_path: Path) -> Iterator[Projector]:
    with Projector.open(projector_for("llama", tmp_path), model) as projector:
        yield projector


def test_another_projector_gives_other_ids(model: Model, projector: Projector, tmp_path: Path) -> None:
    other = tiny_mmproj.write(tmp_path / "other.gguf", WIDTH, seed=2)
    with Projector.open(other, model) as second:
        assert not set(second.image(picture(1)).tokens) & set(projector.image(picture(1)).tokens)


def test_an_image_is_decoded_and_encoded_once(projector: Projector, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr(module, "pixels_of", lambda data: decoded.append(data) or PIXELS(data))
    for _ in range(3):
        (chunk,) = projector.image(picture(1)).chunks
        projector.rows(chunk).result(60)
    assert len(decoded) == projector.encoded == 1


PIXELS = module.pixels_of


def test_rows_that_were_dropped_are_computed_again_to_the_same_bits(
    projector: Projector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES", 0)
    monkeypatch.setattr(module, "HANDLES", 1)
    (one,), (two,) = (projector.image(picture(seed)).chunks for seed in (1, 2))
    first = projector.rows(one).result(60)
    projector.rows(two).result(60)
    assert np.array_equal(projector.rows(one).result(60), first)
    assert projector.encoded == 3


def test_an_image_that_is_not_wanted_any_more_is_not_encoded(projector: Projector) -> None:
    blocked = threading.Event()
    projector._thread.submit(blocked.wait, 60)
    (one,), (two,) = (projector.image(picture(seed)).chunks for seed in (1, 2))
    left, kept = projector.rows(one, lambda: False), projector.rows(two, lambda: False)
    assert projector.rows(two, lambda: True) is kept  # another request wants it
    blocked.set()
    with pytest.raises(CancelledError):
        left.result(60)
    assert len(kept.result(60)) == 16
    assert projector.encoded == 1
    assert len(projector.rows(one).result(60)) == 16  # wanted again


def test_a_failure_concerns_one_image(projector: Projector, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,), (two,) = (projector.image(picture(seed)).chunks for seed in (1, 2))
    monkeypatch.setattr(module._mtmd(), "mtmd_encode_chunk", lambda *arguments: 1)
    with pytest.raises(GenerationError, match="the projector could not encode the image"):
        projector.rows(one).result(60)
    monkeypatch.undo()
    assert len(projector.rows(two).result(60)) == 16
    assert len(projector.rows(one).result(60)) == 16


def _damaged(path: Path, how: str) -> Path:
    good = tiny_mmproj.write(path, WIDTH).read_bytes()
    data = {
        "truncated": good[: len(good) // 2], "header": good[:100], "empty": b"", "text": b"hello",
        "counts": good[:8] + struct.pack("<q", 2**40) + good[16:],
    }[how]  # fmt: skip
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("how", ["truncated", "header", "empty", "text", "counts"])
def test_a_damaged_file_is_refused(how: str, model: Model, tmp_path: Path) -> None:
    with pytest.raises(ProjectorInvalid, match=r"projector .*mmproj\.gguf: "):
        Projector.open(_damaged(tmp_path / "mmproj.gguf", how), model)


@pytest.mark.parametrize("kind", module.PLACE_DEPENDENT)
def test_a_projector_whose_rows_depend_on_the_prompt_is_refused(kind: str, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.vision.projector_type", kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ProjectorInvalid, match=f"type {kind} are not supported"):
        Projector.open(path, model)


def test_a_file_that_crashes_its_loader_costs_a_child(
    model: Model, tmp_path: Path, real_children: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its position embeddings libmtmd dereferences a null pointer as soon as the graph is built."""
    path = tiny_mmproj.write(tmp_path / "mmproj.gguf", WIDTH)
    path.write_bytes(path.read_bytes().replace(b"v.position_embd.weight", b"v.position_xmbd.weight"))
    with pytest.raises(ProjectorInvalid, match=r"llama.cpp crashed|cannot load it"):
        Projector.open(path, model)
