"""The pixels of an image file: PNG, JPEG, GIF (its first frame) or WebP, by Pillow, in a child process with limits.

Images come from clients and are not trusted. Their bytes reach no C library of this process, only their pixels do.

- The child reads width and height from the header and refuses more than MAX_PIXELS, and a side of more than MAX_SIDE,
  before it decodes anything.
- It has MEMORY bytes of address space and SECONDS; two children run at a time. Windows and macOS do not limit the
  memory of a process, so there only the pixels and the time are bounded.
- What the child prints is read as a number of bytes that the header fixes, whatever has become of the child.

A child takes 0.1 s to start. Knows nothing about models.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, NamedTuple

from rest_local.errors import OptionError

MAX_BYTES = 1 << 25  # of a file
MAX_PIXELS = 1 << 25  # 100 MB decoded; the cameras of phones have 12 to 50 million, models see one or two
MEMORY = 1 << 30
SECONDS = 20.0
MAX_SIDE = 1 << 14  # pixels; llama.cpp takes half a minute to shrink an image of 1 x 33 554 432
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_LINE = 1 << 12  # bytes of the first line
_children = threading.BoundedSemaphore(2)


class Pixels(NamedTuple):
    """`rgb`: 3 * width * height bytes, row by row from the top."""

    width: int
    height: int
    rgb: bytes


def pixels_of(data: bytes) -> Pixels:
    """Decode a file. Transparent parts become white, and a photo is turned as its camera says.

    Raises OptionError for what is no image, is damaged, or exceeds a limit, and where Pillow is missing.
    """
    if len(data) > MAX_BYTES:
        raise OptionError(f"the image has {len(data)} bytes, more than {MAX_BYTES}")
    with _children:
        head, rgb = _decoded(data)
    try:
        answer = json.loads(head)
        if isinstance(answer.get("error"), str):
            raise OptionError(answer["error"][:300])
        width, height = int(answer["width"]), int(answer["height"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OptionError("the image cannot be decoded") from None
    if min(width, height) < 1 or len(rgb) != 3 * width * height:
        raise OptionError("the image cannot be decoded")
    return Pixels(width, height, rgb)


def _decoded(data: bytes) -> tuple[bytes, bytes]:
    """The first line of the child, and what follows it."""
    root = Path(__file__).parents[2]  # `-m` looks in the working directory first
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "rest_local.llama.picture"],
            cwd=root,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise OptionError(f"no process can be started to decode the image: {error}") from error
    timer = threading.Timer(SECONDS, child.kill)
    timer.daemon = True
    timer.start()
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(data)
                child.stdin.close()
            head = child.stdout.readline(_LINE)
            return head, child.stdout.read(3 * MAX_PIXELS + 1)
        finally:
            timer.cancel()
            child.kill()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()


def main(source: IO[bytes], sink: IO[bytes]) -> None:
    """The child: a file in, a line of JSON and the pixels out."""
    _bound()
    data = source.read()
    rgb = b""
    try:
        answer, rgb = _decode(data)
    except MemoryError:
        answer = {"error": f"the image needs more than {MEMORY >> 20} MB of memory"}
    except ImportError:
        answer = {"error": "images need Pillow: pip install 'rest-local[images]'"}
    except Exception as error:
        answer = {"error": f"the image cannot be decoded ({type(error).__name__})"}
    sink.write(json.dumps(answer).encode() + b"\n" + rgb)
    sink.flush()


def _decode(data: bytes) -> tuple[dict[str, object], bytes]:
    import io

    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        return {"error": f"the data is no image; {', '.join(FORMATS)} can be read"}, b""
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return {"error": f"the image has more than {MAX_PIXELS} pixels"}, b""
    width, height = image.size
    if width * height > MAX_PIXELS:
        return {"error": f"the image has {width} x {height} pixels, more than {MAX_PIXELS}"}, b""
    if max(width, height) > MAX_SIDE:
        return {"error": f"the image has {width} x {height} pixels, more than {MAX_SIDE} in a row"}, b""
    image.draft("RGB", image.size)
    image.load()
    image = ImageOps.exif_transpose(image) or image
    if image.mode.startswith("I"):  # 16 bits a pixel
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        whole = image.convert("RGBA")
        image = Image.new("RGB", whole.size, "white")
        image.paste(whole, mask=whole.getchannel("A"))
    image = image.convert("RGB")
    return {"width": image.width, "height": image.height}, image.tobytes()


def _bound() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, int(SECONDS)), (resource.RLIMIT_CORE, 0))
    for limit, most in limits:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
