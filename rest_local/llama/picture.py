"""Decode an image file with Pillow in a child process with limits: PNG, JPEG, GIF (its first frame) or WebP.

Images come from clients and are not trusted. Their bytes reach no C library of this process, only their pixels do.

- The child reads width and height from the header and refuses more than MAX_PIXELS, and a side of more than MAX_SIDE,
  before it decodes anything.
- It has MEMORY bytes of address space and SECONDS (`rest_local.sandbox`). Two children run at a time, and each decodes
  one image, so that a child that was taken over sees no other image.
- Only as many bytes of its answer are read as the largest image has.

A child takes 0.1 s to start. Knows nothing about models.
"""

from __future__ import annotations

import json
import threading
from typing import NamedTuple

from rest_local import sandbox
from rest_local.errors import OptionError
from rest_local.sandbox import Worker

MAX_BYTES = 1 << 25  # limit of a file
MAX_PIXELS = 1 << 25  # 100 MB decoded; the cameras of phones have 12 to 50 million, models see one or two
MEMORY = 1 << 30
SECONDS = 20.0
MAX_SIDE = 1 << 14  # pixels; llama.cpp takes half a minute to shrink an image of 1 x 33 554 432
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_LINE = 1 << 12  # maximum bytes of the first line
_children = threading.BoundedSemaphore(2)


class Pixels(NamedTuple):
    """The pixels of an image. `rgb` has 3 * width * height bytes, row by row from the top."""

    width: int
    height: int
    rgb: bytes


def pixels_of(data: bytes) -> Pixels:
    """Decode a file. Transparent parts become white, and a photo is turned as its camera says. Raises OptionError for
    what is no image, is damaged, or exceeds a limit, and without Pillow.
    """
    if len(data) > MAX_BYTES:
        raise OptionError(f"the image has {len(data)} bytes, more than {MAX_BYTES}")
    with _children:
        worker = Worker(__name__)
        try:
            head, _, rgb = worker.ask(data, SECONDS, SECONDS, 3 * MAX_PIXELS + _LINE).partition(b"\n")
            answer = json.loads(head[:_LINE])
            if isinstance(answer.get("error"), str):
                raise OptionError(answer["error"][:300])
            width, height = int(answer["width"]), int(answer["height"])
        except sandbox.NotStarted as error:
            raise OptionError(f"images are decoded in a child process: {error}") from error
        except (sandbox.TookTooLong, sandbox.Died, RecursionError, ValueError, KeyError, TypeError, AttributeError):
            raise OptionError("the image cannot be decoded") from None
        finally:
            worker.close()
    if min(width, height) < 1 or len(rgb) != 3 * width * height:
        raise OptionError("the image cannot be decoded")
    return Pixels(width, height, rgb)


# The rest of this module runs in the child.


def _answer(data: bytes) -> bytes:
    """Return a line of JSON and the pixels."""
    rgb = b""
    try:
        answer, rgb = _decode(data)
    except MemoryError:
        answer = {"error": f"the image needs more than {MEMORY >> 20} MB of memory"}
    except ImportError:
        answer = {"error": "images need Pillow: pip install 'rest-local[images]'"}
    except Exception as error:
        answer = {"error": f"the image cannot be decoded ({type(error).__name__})"}
    return json.dumps(answer).encode() + b"\n" + rgb


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


if __name__ == "__main__":
    sandbox.serve(_answer, MEMORY)
