"""Images for tests, tiny projectors, and the answers of llama.cpp's own libmtmd to compare with."""

import ctypes
import io
import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp as mtmd
from PIL import Image

from models import tiny_mmproj
from rest_local.decoding.logprobs import TokenLogprobs, logprobs_of
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

MARK = "<image>"
KIND_OF = {"llama": "mlp", "qwen2": "mlp", "gemma3": "gemma3", "lfm2": "mlp", "qwen2vl": "qwen2vl"}
WIDTH = 64  # The models of `benchmarks.tiny` have this width.


def picture(seed: int, size: tuple[int, int] = (40, 30), form: str = "PNG") -> bytes:
    """Return the bytes of an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def projector_for(arch: str, folder: Path, width: int = WIDTH) -> Path:
    """Write a projector that suits a tiny model, once: ids of images depend on when its file was changed."""
    path = folder / f"mmproj-{arch}.gguf"
    return path if path.exists() else tiny_mmproj.write(path, width, KIND_OF[arch])


def reference(
    model: Model, projector: Path, settings: ContextSettings, text: str, images: Sequence[bytes], n: int
) -> tuple[list[int], list[TokenLogprobs]]:
    """Decode `n` tokens greedily after a text with images (`MARK`), and return them with their log-probabilities.

    `mtmd_helper_eval_chunk_single` evaluates the text, and its last token alone, as are those of the answer.
    """
    parameters = mtmd.mtmd_context_params_default()
    parameters.use_gpu, parameters.print_timings, parameters.warmup, parameters.n_threads = False, False, False, 1
    vision = mtmd.mtmd_init_from_file(os.fsencode(projector), model.pointer, parameters)
    assert vision
    chunks = mtmd.mtmd_input_chunks_init()
    bitmaps = [_bitmap(each) for each in images]
    data = text.replace(MARK, "<__media__>").encode()
    given = mtmd.mtmd_input_text(data, len(data), True, True)
    array = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
    assert mtmd.mtmd_tokenize(vision, chunks, ctypes.byref(given), array, len(bitmaps)) == 0
    tokens: list[int] = []
    told: list[TokenLogprobs] = []
    with Context(model, settings) as context:
        past = llama_cpp.llama_pos(0)
        last = mtmd.mtmd_input_chunks_size(chunks) - 1
        for number in range(last):
            chunk = mtmd.mtmd_input_chunks_get(chunks, number)
            code = mtmd.mtmd_helper_eval_chunk_single(
                vision, context.pointer, chunk, past, 0, context.n_batch, False, ctypes.byref(past)
            )
            assert code == 0
        count = ctypes.c_size_t()
        ids = mtmd.mtmd_input_chunk_get_tokens_text(mtmd.mtmd_input_chunks_get(chunks, last), ctypes.byref(count))
        *before, token = [int(ids[i]) for i in range(count.value)]
        place = past.value
        if before:
            context.batch.fill(before, range(place, place + len(before)), 0, 1, 0)
            assert context.decode() == 0
        place += len(before)
        while len(tokens) < n and not (tokens and model.vocabulary.is_end(tokens[-1])):
            context.batch.fill([token], place, 0, 1, 1)
            assert context.decode() == 0
            row = context.logits(1)[0]
            token = int(row.argmax())
            tokens.append(token)
            told.append(logprobs_of(row, token, 3))
            place += 1
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_input_chunks_free(chunks)
    mtmd.mtmd_free(vision)
    return tokens, told


def _bitmap(data: bytes) -> int:
    with Image.open(io.BytesIO(data)) as image:
        rgb = image.convert("RGB").tobytes()
        width, height = image.size
    pixels = (ctypes.c_uint8 * len(rgb)).from_buffer_copy(rgb)
    return int(mtmd.mtmd_bitmap_init(width, height, pixels))
