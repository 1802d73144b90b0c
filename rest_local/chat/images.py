"""Images in the messages of a conversation: parts of type `image_url` become marks in the text, and bytes.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}

- A mark is a text that no client can write, because it differs in each conversation. Chat templates copy it like any
  other text, so it marks the place of the image in the prompt.
- Only `data:` URLs are read. Nothing is fetched, from the network or from the disk.

Knows no image formats and no models.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rest_local.errors import OptionError, Place

MOST_IMAGES = 64
MAX_BYTES = 1 << 25  # the bound of one image; the server bounds the whole request
TYPE = "image_url"
_DATA_URL = re.compile(r"data:(?P<kind>[\w.+-]+/[\w.+-]+)?(?:;[\w.+=-]+)*;base64,", re.ASCII)
_SPACE = re.compile(r"\s+")


class Mark(str):
    """The text that stands for an image in a list of content parts."""

    __slots__ = ()


@dataclass(frozen=True)
class Images:
    """The images of one conversation by mark. `places` has their places in the messages, for errors."""

    data: dict[str, bytes] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.data)

    def check_all_in(self, prompt: str) -> None:
        """Raise OptionError if the chat template has left out an image."""
        for mark, place in self.places.items():
            if mark not in prompt:
                raise OptionError("the model's chat template leaves out this image", place)

    @property
    def first_place(self) -> Place:
        return next(iter(self.places.values()), ("images",))


def take_images(messages: Sequence[Any]) -> tuple[list[Any], Images]:
    """Return the messages with a `Mark` in the place of each image, and the images. Nothing is changed in place.

    Raises OptionError, which names the place, for a URL that is no image in base64, and for more than MOST_IMAGES.
    """
    images, secret = Images(), secrets.token_hex(8)
    return [_without(message, number, images, secret) for number, message in enumerate(messages)], images


def _without(message: Any, number: int, images: Images, secret: str) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return message
    parts: list[Any] = []
    for i, part in enumerate(content):
        if not _is_image(part):
            parts.append(part)
            continue
        place: Place = ("messages", number, "content", i)
        if len(images.data) >= MOST_IMAGES:
            raise OptionError(f"more than {MOST_IMAGES} images in one conversation", place)
        mark = Mark(f"[image {len(images.data) + 1} {secret}]")
        images.data[mark], images.places[mark] = _bytes_of(part, place), place
        parts.append(mark)
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == TYPE


def _bytes_of(part: Mapping[str, Any], place: Place) -> bytes:
    given = part.get(TYPE)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise OptionError("give an object with a url", (*place, TYPE))
    place = (*place, TYPE, "url")
    found = _DATA_URL.match(url[:200])
    if found is None:
        raise OptionError("give the image as data:image/png;base64,...; no URL is fetched", place)
    if (kind := found["kind"]) and not kind.lower().startswith("image/"):
        raise OptionError(f"{kind[:40]} is no image", place)
    written = url[found.end() :]
    if len(written) > 4 * MAX_BYTES // 3 + 4:
        raise OptionError(f"the image has more than {MAX_BYTES} bytes", place)
    try:
        data = base64.b64decode(_SPACE.sub("", written), validate=True)
    except (binascii.Error, ValueError):
        raise OptionError("the image is not valid base64", place) from None
    if not data:
        raise OptionError("the image is empty", place)
    return data


def part_of(data: bytes) -> dict[str, Any]:
    """Return the content part of an image, from the bytes of its file."""
    return {"type": TYPE, TYPE: {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}
