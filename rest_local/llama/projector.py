"""Make rows of embeddings of an image with a projector (`mmproj`). A model reads them in place of tokens.

    projector = Projector.open("mmproj-model.gguf", model)
    image = projector.image(png_bytes)       # the tokens of the image: text around it, and placeholders for its rows
    rows = projector.rows(image.chunks[0]).result()

- llama.cpp's library for this is libmtmd. It gets decoded pixels only, because it would give unknown files to ffmpeg,
  if there is one. `picture` decodes files in a child process.
- `image` decodes and lays out an image (any thread). `rows` runs the image through the projector, in a separate thread,
  one image at a time: milliseconds on a GPU, seconds on a CPU. Nothing can break that off.
- Both remember: the layout of the newest images by their bytes, and CACHE_BYTES of rows. So a conversation that is
  sent again decodes and encodes nothing.
- A projector file is tried in a child process the first time it is seen, as models are (`loading`).

`python -m rest_local.llama.projector TASK` is that child.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rest_local import sandbox, stop
from rest_local.errors import GenerationError, ModelInvalid, ModelNotFound, OptionError, ProjectorInvalid
from rest_local.llama import library
from rest_local.llama.cores import release_team
from rest_local.llama.gguf import check_header, identity_of, read_gguf
from rest_local.llama.loaded import llama_cpp, set_fields
from rest_local.llama.loading import cause_of, one_line
from rest_local.llama.model import Model
from rest_local.llama.picture import Pixels, pixels_of
from rest_local.llama.placeholders import ids_of
from rest_local.stop import Closing

Rows = NDArray[np.float32]

CACHE_BYTES = 1 << 28  # rows of 28 images with 576 rows for a model of 4 096
LAYOUTS = 64  # the tokens of so many images are remembered
PLACE_DEPENDENT = ("deepseek4v", "hunyuanvl")  # their rows depend on the place of the image in the prompt
HANDLES = 4  # This many images stay decoded, of up to 40 MB each.
NO_IMAGES = "is not a projector for images"
_MARKER = b"<__media__>"
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class ImageChunk:
    """Consecutive rows of an image. A model with tiles has several for one image."""

    ids: tuple[int, ...]  # placeholders, one for each row; the same for the same bytes and the same projector
    n_pos: int  # positions that it takes in the text: as many as rows, fewer with M-RoPE
    offsets: NDArray[np.int32] | None  # [4, rows], positions relative to that of its first row; only M-RoPE has them
    causal: bool  # True if a row attends to earlier rows only; else all rows have to be evaluated together
    number: int = 0  # its number among libmtmd's chunks of the image
    digest: bytes = b""  # the image's digest
    data: bytes = field(default=b"", repr=False)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PromptImage:
    """An image as it stands in a prompt. `tokens` has the text around it, and the ids of `chunks`."""

    tokens: tuple[int, ...]
    chunks: tuple[ImageChunk, ...]


class _Decoded:
    """The chunks that libmtmd makes of an image. They are freed with the object."""

    def __init__(self, projector: int, pixels: Pixels) -> None:
        """Lay out an image. Raises OptionError if the projector refuses it."""
        mtmd = self._mtmd = _mtmd()
        rgb = (ctypes.c_uint8 * len(pixels.rgb)).from_buffer_copy(pixels.rgb)
        self.chunks = mtmd.mtmd_input_chunks_init()
        bitmap = mtmd.mtmd_bitmap_init(pixels.width, pixels.height, rgb)
        try:
            text = mtmd.mtmd_input_text(_MARKER, len(_MARKER), False, True)
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            with library.log_lines.collected_errors() as errors:
                code = mtmd.mtmd_tokenize(projector, self.chunks, ctypes.byref(text), bitmaps, 1)
            if code:
                why = f": {errors[0][:200]}" if errors else ""
                raise OptionError(f"the projector refuses an image of {pixels.width} x {pixels.height} pixels{why}")
        finally:
            mtmd.mtmd_bitmap_free(bitmap)

    def __del__(self) -> None:
        if getattr(self, "chunks", None):
            self._mtmd.mtmd_input_chunks_free(self.chunks)

    def __len__(self) -> int:
        return int(self._mtmd.mtmd_input_chunks_size(self.chunks))

    def __getitem__(self, number: int) -> int:
        return int(self._mtmd.mtmd_input_chunks_get(self.chunks, number))


class Projector(Closing):
    """An open projector. Make one with `Projector.open`; close it before its model. `encoded` counts its images."""

    def __init__(self, pointer: int, path: Path, model: Model) -> None:
        self.path, self._model = path, model
        self._pointer: int | None = pointer
        mtmd = _mtmd()
        self.causal = not mtmd.mtmd_decode_use_non_causal(pointer, None)
        self.has_m_rope = bool(mtmd.mtmd_decode_use_mrope(pointer))
        self.width = int(llama_cpp.llama_model_n_embd_inp(model.pointer))
        self.encoded = 0
        self._identity = hashlib.sha256(json.dumps(identity_of([(path, path.stat())]), default=str).encode()).digest()
        self._turn = threading.Lock()  # one image is decoded at a time
        self._lock = threading.Lock()
        self._layouts: OrderedDict[bytes, PromptImage] = OrderedDict()  # their chunks have no `data`
        self._decoded: OrderedDict[bytes, _Decoded] = OrderedDict()
        self._rows: OrderedDict[tuple[int, ...], Future[Rows]] = OrderedDict()
        self._wanted: dict[tuple[int, ...], list[Callable[[], bool]]] = {}
        self._thread = ThreadPoolExecutor(1, "rest-local-images")

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], model: Model, *, threads: int = 0, gpu: bool | None = None
    ) -> Projector:
        """Load a projector for a model. `threads` is 0 for as many as decode by default. By default it uses a `gpu` if
        there is one and the model uses it.

        Takes a second more when the file is opened for the first time. Raises ProjectorInvalid for a file that is no
        projector for images, or is for a model of another width.
        """
        file = Path(path).expanduser()
        try:
            status = check_header(file)
        except ModelNotFound:
            raise ProjectorInvalid(file, "no such file", "give the path of a GGUF file, or `none`") from None
        except ModelInvalid as error:
            raise ProjectorInvalid(file, error.cause) from None
        if not (kinds := read_gguf(file).projectors):
            raise ProjectorInvalid(file, "is no projector")
        if other := set(kinds).intersection(PLACE_DEPENDENT):
            raise ProjectorInvalid(file, f"projectors of type {other.pop()} are not supported", "give `none`")
        if cause := cause_of(__name__, [(file, status)], {"path": os.path.abspath(file)}):
            raise ProjectorInvalid(file, cause)
        gpu = library.supports_gpu() and model.n_gpu_layers != 0 if gpu is None else gpu
        with library.log_lines.collected_errors() as errors:
            pointer = _load(file, model.pointer, threads, gpu)
        if not pointer:
            raise ProjectorInvalid(file, one_line(errors))
        if not _mtmd().mtmd_support_vision(pointer):
            _mtmd().mtmd_free(pointer)
            raise ProjectorInvalid(file, NO_IMAGES)
        try:
            return cls(pointer, file, model)
        except BaseException:
            _mtmd().mtmd_free(pointer)
            raise

    def image(self, data: bytes) -> PromptImage:
        """Return the tokens of an image in a prompt, from a file in PNG, JPEG, GIF or WebP. Any thread may call it.
        Takes a tenth of a second, and nothing for one of the newest images. Raises OptionError for what is no image, or
        exceeds a limit of `picture`.
        """
        digest = hashlib.sha256(self._identity + data).digest()
        with self._lock:
            found = _newest(self._layouts, digest)
        if found is None:
            found = _layout(self, digest, self._decode(digest, data))
            with self._lock:
                _keep(self._layouts, digest, found, LAYOUTS)
        return replace(found, chunks=tuple(replace(chunk, data=data) for chunk in found.chunks))

    def rows(self, chunk: ImageChunk, wanted: Callable[[], bool] = lambda: True) -> Future[Rows]:
        """Return a future of the rows of a chunk, float32 [rows, width]; they are kept for a while.

        `wanted` is asked before the work begins; if no caller wants the rows any more, the future is cancelled. The
        future may also hold a GenerationError. Any thread may call it.
        """
        key = chunk.ids
        with self._lock:
            future = self._rows.get(key)
            if future is not None and not (future.done() and (future.cancelled() or future.exception())):
                self._rows.move_to_end(key)
                if key in self._wanted:
                    self._wanted[key].append(wanted)
                return future
            future = self._rows[key] = Future()
            self._wanted[key] = [wanted]
        self._thread.submit(self._encode, chunk, future)
        return future

    def close(self) -> None:
        """Free the projector, after the image that is being encoded. A second call does nothing."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._decoded.clear()
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            _mtmd().mtmd_free(pointer)

    @property
    def pointer(self) -> int:
        """Return the mtmd_context_p. Raises GenerationError after `close`."""
        if self._pointer is None:
            raise GenerationError("the projector is closed")
        return self._pointer

    def _decode(self, digest: bytes, data: bytes) -> _Decoded:
        """Decode one image at a time, because a large one takes half a gigabyte. Raises OptionError."""
        with self._turn:
            stop.check()
            with self._lock:
                found = _newest(self._decoded, digest)
            if found is None:
                found = _Decoded(self.pointer, pixels_of(data))
                with self._lock:
                    _keep(self._decoded, digest, found, HANDLES)
            return found

    def _encode(self, chunk: ImageChunk, future: Future[Rows]) -> None:
        with self._lock:
            wanted = any(each() for each in self._wanted.pop(chunk.ids))
            if not wanted:
                future.cancel()
                future.set_running_or_notify_cancel()
                return
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self._encoded(chunk))
        except (GenerationError, OptionError) as error:
            future.set_exception(error)
        except Exception as error:
            library.logger.error("an image could not be encoded", exc_info=error)
            future.set_exception(GenerationError(f"the image could not be encoded: {error}"))
        with self._lock:
            self._forget()

    def _encoded(self, chunk: ImageChunk) -> Rows:
        mtmd, decoded = _mtmd(), self._decode(chunk.digest, chunk.data)
        with library.log_lines.collected_errors() as errors:
            code = mtmd.mtmd_encode_chunk(self.pointer, decoded[chunk.number])
        release_team()
        if code:
            why = f": {errors[0][:200]}" if errors else ""
            raise GenerationError(f"the projector could not encode the image{why}")
        address = ctypes.cast(mtmd.mtmd_get_output_embd(self.pointer), ctypes.POINTER(ctypes.c_float))
        rows: Rows = np.ctypeslib.as_array(address, (len(chunk), self.width)).copy()
        self.encoded += 1
        return rows

    def _forget(self) -> None:
        """Drop the rows, beyond CACHE_BYTES, that were not asked for the longest. The newest image's stay."""
        sizes = {key: 4 * self.width * len(key) for key, future in self._rows.items() if future.done()}
        left = sum(sizes.values())
        for key in list(sizes)[:-1]:
            if left <= CACHE_BYTES:
                break
            left -= sizes[key]
            del self._rows[key]


def _layout(projector: Projector, digest: bytes, decoded: _Decoded) -> PromptImage:
    mtmd = _mtmd()
    tokens: list[int] = []
    found: list[ImageChunk] = []
    for number in range(len(decoded)):
        chunk = decoded[number]
        n = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            count = ctypes.c_size_t()
            ids = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            tokens += [int(ids[i]) for i in range(count.value)]
            continue
        ids = ids_of(digest + number.to_bytes(4, "little"), n)
        tokens += ids
        n_pos = mtmd.mtmd_input_chunk_get_n_pos(chunk)
        offsets = _offsets(chunk, n) if projector.has_m_rope else None
        causal = not mtmd.mtmd_decode_use_non_causal(projector.pointer, chunk)
        found.append(ImageChunk(ids, n_pos, offsets, causal, number, digest))
    if not found:
        raise OptionError("the projector makes nothing of the image")
    return PromptImage(tuple(tokens), tuple(found))


def _offsets(chunk: int, n: int) -> NDArray[np.int32]:
    """Return positions in the order of llama.cpp's batches: time, height, width, and one that is not used."""
    mtmd = _mtmd()
    image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
    places = (mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, i) for i in range(n))
    offsets = np.array([(each.t, each.y, each.x, each.z) for each in places], np.int32)
    return np.ascontiguousarray(offsets.T)


def _newest(cache: OrderedDict[Key, Value], key: Key) -> Value | None:
    """Return an entry, which becomes the newest one."""
    if key in cache:
        cache.move_to_end(key)
    return cache.get(key)


def _keep(cache: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    cache[key] = value
    while len(cache) > most:
        cache.popitem(last=False)


def _mtmd() -> Any:
    """Load libmtmd. Raises ProjectorInvalid if llama-cpp-python was built without it. The first call takes 20 ms."""
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, FileNotFoundError, RuntimeError) as error:
        raise ProjectorInvalid("", f"this llama-cpp-python has no libmtmd ({error})", "install one with it") from None
    if not _forwarded:
        _forwarded.append(True)
        mtmd_cpp.mtmd_helper_log_set(library._log_callback, None)
    return mtmd_cpp


_forwarded: list[bool] = []


def _load(path: Path, model: int | None, threads: int, gpu: bool, warmup: bool = False) -> int | None:
    from rest_local.llama.cores import default_threads

    mtmd = _mtmd()
    parameters = mtmd.mtmd_context_params_default()
    set_fields(parameters, use_gpu=gpu, print_timings=False, warmup=warmup, media_marker=_MARKER)
    set_fields(parameters, n_threads=threads or default_threads())
    pointer: int | None = mtmd.mtmd_init_from_file(os.fsencode(path), model, parameters)
    return pointer


def load_error(path: Path) -> str | None:
    """Load a projector in this process, without a model, and build its compute graph. Return its error. May abort."""
    with library.log_lines.collected_errors() as errors:
        pointer = _load(path, None, 1, False, warmup=True)
    if not pointer:
        return one_line(errors)
    return None if _mtmd().mtmd_support_vision(pointer) else NO_IMAGES


def main(text: str) -> None:
    """Run the child process. `text` is JSON with the path."""
    sandbox.report(error=load_error(Path(json.loads(text)["path"])))
    os._exit(0)  # Freeing a damaged projector may crash.


if __name__ == "__main__":
    main(sys.argv[1])
