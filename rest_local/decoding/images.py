"""The prompt of a text with images: its tokens, what the placeholders among them stand for, and their rows.

Text is tokenized between two images, as llama.cpp's libmtmd does it, so that the tokens are the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import OptionError, Place, PromptTooLong
from rest_local.kv_cache.slot import Slot
from rest_local.llama.placeholders import spans
from rest_local.llama.projector import ImageChunk, Projector, Rows
from rest_local.llama.vocabulary import Vocabulary

ImagePrompt = tuple[list[int], tuple[ImageChunk, ...]]


def image_prompt(
    vocabulary: Vocabulary,
    projector: Projector,
    text: str,
    images: Mapping[str, bytes],
    places: Mapping[str, Place],
    most: int | None = None,
) -> ImagePrompt:
    """Tokenize a text with images. `images`: by the text that stands for each; one that is not in `text` is left out.

    `places`: the names of the images in errors. `most`: tokens. Raises OptionError if one cannot be read as an image,
    and PromptTooLong.
    """
    parts = re.split("(" + "|".join(map(re.escape, images)) + ")", text)
    tokens: list[int] = [vocabulary.ids.bos] if vocabulary.ids.add_bos and vocabulary.ids.bos is not None else []
    chunks: list[ImageChunk] = []
    for number, part in enumerate(parts):
        if number % 2:
            try:
                image = projector.image(images[part])
            except OptionError as error:
                raise OptionError(str(error), places.get(part, ("images",))) from None
            tokens += image.tokens
            chunks += image.chunks
        elif part:
            ids: list[int] = vocabulary.tokenize(part, special=True, most=most).tolist()
            tokens += ids[1:] if tokens and not number and ids[:1] == tokens else ids
        if most is not None and len(tokens) > most:
            raise PromptTooLong(len(tokens), most)
    return tokens, tuple(chunks)


Encode = Callable[[ImageChunk, Callable[[], bool]], "Future[Rows]"]
"""Has the rows of an image computed, unless they are no longer wanted: `Projector.rows`."""


class ImageRows(NamedTuple):
    """Rows of an image to evaluate, as for `Backend.decode_rows`."""

    rows: Rows
    pos: NDArray[np.int32]
    causal: bool


class PromptImages:
    """The images in the text of one request, of which most have none.

    `offsets`: the end of each image that takes fewer positions than rows, and how many fewer up to there. `future`: the
    rows of the image that is computed next. `lost`: cells of images were lost once, and evaluated again.
    """

    def __init__(self, chunks: Sequence[ImageChunk], encode: Encode | None) -> None:
        self.offsets: list[tuple[int, int]] = []
        self.future: Future[Rows] | None = None
        self.lost = False
        self._waits_since: float | None = None
        self._encoding: ImageChunk | None = None  # The image whose rows `future` has.
        self._chunks, self._encode = {chunk.ids: chunk for chunk in chunks}, encode
        self._images: list[tuple[int, int, ImageChunk]] = []

    def find(self, tokens: Sequence[int]) -> None:
        """Find where images are in a text, and which of them take fewer positions than rows."""
        self._images, self.offsets, saved = [], [], 0
        for begin, end in spans(tokens) if self._chunks else ():
            chunk = self._chunks[tuple(tokens[begin:end])]
            self._images.append((begin, end, chunk))
            saved += len(chunk) - chunk.n_pos
            if saved:
                self.offsets.append((end, saved))

    def __bool__(self) -> bool:
        return bool(self._images)

    def ready_at(self, place: int) -> bool:
        """Return True if the rows of the image at this place of the text are computed."""
        return self.future is not None and self.future.done() and self._at(place)[1] is self._encoding

    def missing_at(self, place: int) -> Future[Rows] | None:
        """Return the rows of the image at this place if there is one whose rows are not computed yet."""
        at_image = any(begin <= place < end for begin, end, _ in self._images)
        return self.future if at_image and not self.ready_at(place) else None

    def look_ahead(self, n_past: int, wanted: Callable[[], bool]) -> float:
        """Have the rows of the next image after `n_past` tokens computed, as long as they are `wanted`.

        Return the milliseconds in which there was nothing to do but wait for the image, once that is over. Raises the
        error that kept the rows from being computed.
        """
        chunk = next((chunk for _, end, chunk in self._images if n_past < end), None)
        if chunk is None:
            self._encoding = self.future = None
        elif chunk is not self._encoding or self.future is None or self.future.cancelled():
            assert self._encode is not None
            self._encoding, self.future = chunk, self._encode(chunk, wanted)
        waited = 0.0
        if self.missing_at(n_past) is not None:
            self._waits_since = self._waits_since or time.perf_counter()
        elif self._waits_since is not None:
            waited, self._waits_since = 1e3 * (time.perf_counter() - self._waits_since), None
        if self.future is not None and self.future.done() and (error := self.future.exception()):
            self._encoding = self.future = None
            raise error
        return waited

    def next_rows(self, place: int, most: int) -> int:
        """Return how many rows of the image at this place to evaluate at once: `most`, or all."""
        begin, chunk = self._at(place)
        return min(most, begin + len(chunk) - place) if chunk.causal else len(chunk)

    def text_before(self, place: int, most: int) -> int:
        """Return how many tokens, up to `most`, come before the next image."""
        return min(most, next((begin for begin, _, _ in self._images if begin >= place), place + most) - place)

    def rows(self, slot: Slot, n: int) -> ImageRows:
        """Return the next `n` rows for a slot; they have to be ready."""
        assert self.future is not None
        begin, chunk = self._at(slot.n_past)
        first = slot.n_past - begin
        rows, place = self.future.result()[first : first + n], slot.position(begin)
        if chunk.offsets is None:
            return ImageRows(rows, np.arange(place + first, place + first + n, dtype=np.int32), chunk.causal)
        return ImageRows(rows, place + chunk.offsets[:, first : first + n], chunk.causal)

    def _at(self, place: int) -> tuple[int, ImageChunk]:
        return next((begin, chunk) for begin, end, chunk in self._images if begin <= place < end)
