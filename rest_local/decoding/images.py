"""The prompt of a text with images: its tokens, and what the placeholders among them stand for.

Text is tokenized between two images, as llama.cpp's libmtmd does it, so that the tokens are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rest_local.errors import OptionError, Place, PromptTooLong
from rest_local.llama.projector import ImageChunk, Projector
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
    """`images`: by the text that stands for each; one that is not in `text` is left out. `places`: what errors call
    them. `most`: tokens. Raises OptionError for what is no image, PromptTooLong.
    """
    parts = re.split("(" + "|".join(map(re.escape, images)) + ")", text)
    tokens: list[int] = [vocabulary.bos] if vocabulary.add_bos and vocabulary.bos is not None else []
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
