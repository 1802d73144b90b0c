"""Decoding image files that are not trusted."""

import io
import struct
import subprocess
import sys
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rest_local import sandbox
from rest_local.errors import OptionError
from rest_local.llama import picture
from rest_local.llama.picture import MAX_PIXELS, Pixels, pixels_of
from rest_local.llama.placeholders import ids_of, spans, whole
from rest_local.sandbox import Worker


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG whose header says so, whatever it holds."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(data)),
        (b"IEND", b""),
    ]
    packed = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "JPEG"])
def test_each_format_is_read(form: str) -> None:
    image = Image.new("RGB", (5, 3), (10, 200, 30))
    options = {"lossless": True} if form == "WEBP" else {}
    found = pixels_of(saved(image, form, **options))
    assert found[:2] == (5, 3)
    if form != "JPEG":
        assert found == Pixels(5, 3, bytes((10, 200, 30)) * 15)


@pytest.mark.parametrize("form", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(OptionError, match="no image; PNG, JPEG, GIF, WEBP can be read"):
        pixels_of(saved(Image.new("RGB", (16, 16)), form))


def test_a_photo_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    image = Image.new("RGB", (2, 1), "red")
    image.putpixel((1, 0), (0, 0, 255))
    found = pixels_of(saved(image, exif=exif))
    assert found == Pixels(1, 2, bytes((255, 0, 0, 0, 0, 255)))


@pytest.mark.parametrize("side", [6_000, 60_000, 2**31 - 1])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    """60 000 x 60 000 pixels in 100 bytes: nothing is decoded, or the child would run out of memory or time."""
    with pytest.raises(OptionError, match=f"more than {MAX_PIXELS}|cannot be decoded"):
        pixels_of(png(side, side))


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000)])
def test_a_side_that_is_too_long_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match=f"more than {picture.MAX_SIDE} in a row"):
        pixels_of(saved(Image.new("1", size)))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0", b"not an image", b"GIF89a", b"\xff\xd8\xff\xe0", b"RIFF\x10\0\0\0WEBPVP8 ", png(4, 4), png(0, 4),
        png(4, 4)[:40],
    ],
)  # fmt: skip
def test_damaged_images_are_refused(data: bytes) -> None:
    with pytest.raises(OptionError):
        pixels_of(data)


def test_a_file_of_too_many_bytes_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_BYTES", 10)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(OptionError, match="the image has 11 bytes, more than 10"):
        pixels_of(b"x" * 11)


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"[]", b"[" * 10_000, b'{"width": 1, "height": 1}\n', b'{"width": -1, "height": -1}\nxxx',
        b'{"width": 1, "height": 1}\n' + b"x" * 10**7, b"x" * 10**7,
    ],
)  # fmt: skip
def test_a_child_that_was_taken_over_is_not_believed(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "ask", lambda *_: answer)
    with pytest.raises(OptionError, match="cannot be decoded"):
        pixels_of(b"x")


def test_a_child_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "SECONDS", 0.2)
    code = "import time; from rest_local import sandbox; sandbox.serve(lambda data: time.sleep(600), 1 << 30)"
    monkeypatch.setattr(sandbox, "command", lambda module: [sys.executable, "-c", code])
    with pytest.raises(OptionError, match="cannot be decoded"):
        pixels_of(b"x")


# ---- Placeholders --------------------------------------------------------------------------------------------------


Parts = st.lists(
    st.one_of(st.lists(st.integers(0, 99), max_size=5), st.tuples(st.binary(max_size=3), st.integers(1, 9)))
)


def joined(parts: list[list[int] | tuple[bytes, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of texts and images, and where the images are."""
    tokens: list[int] = []
    places = []
    for part in parts:
        ids = part if isinstance(part, list) else list(ids_of(*part))
        if isinstance(part, tuple):
            places.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    return tokens, places


@given(Parts)
def test_images_are_found_again_even_where_they_are_neighbours(parts: list[list[int] | tuple[bytes, int]]) -> None:
    tokens, places = joined(parts)
    assert list(spans(tokens)) == places


@given(Parts, st.data())
def test_no_image_is_cut(parts: list[list[int] | tuple[bytes, int]], data: st.DataObject) -> None:
    tokens, places = joined(parts)
    n = data.draw(st.integers(0, len(tokens)))
    inside = next((begin for begin, end in places if begin < n < end), n)
    assert whole(tokens, n) == inside


def test_ids_follow_from_the_content_alone() -> None:
    assert ids_of(b"a", 576) == ids_of(b"a", 576)
    assert not set(ids_of(b"a", 576)) & set(ids_of(b"b", 576))
    assert ids_of(b"a", 16) == ids_of(b"a", 576)[:16]
