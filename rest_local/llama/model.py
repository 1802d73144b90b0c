"""Open a GGUF model safely, describe it, and close it.

A `Model` holds the weights and the metadata of the file. Evaluation is in `context`, text in `vocabulary`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rest_local.errors import ModelError, ModelInvalid
from rest_local.llama import library
from rest_local.llama.gguf import check_headers, identity_of, vocabulary_file
from rest_local.llama.loaded import bindings, llama_cpp, set_fields
from rest_local.llama.loading import Adapters, LoadParameters, ensure_loadable, one_line
from rest_local.llama.options import ModelOptions, Override
from rest_local.llama.vocabulary import Vocabulary
from rest_local.stop import Closing

_ALL_LAYERS = -1


class Model(Closing):
    """An open model. Make one with `Model.open`, and use `with` or `close`. Attributes stay valid after that.

    Attributes:
        name: the file's own name, else its stem
        description: architecture, size and quantization
        size_bytes: bytes of all tensors
        n_ctx_train: trained context in tokens
        n_swa: sliding window in tokens, 0 = none
        metadata: every key of the file, arrays shortened by llama.cpp
        chat_template: Jinja source, or None
        template_variables: names for the template
        n_gpu_layers: -1 = all
        with_mtp: True if the MTP layers were loaded
        adapters: LoRA adapters that the contexts apply
        cache_key: paths, sizes and times of all its files
    """

    def __init__(
        self, pointer: int, path: Path, *, vocab_only: bool, n_gpu_layers: int, options: ModelOptions, cache_key: object
    ) -> None:
        self._pointer: int | None = pointer
        self.path, self.vocab_only, self.n_gpu_layers = path, vocab_only, n_gpu_layers
        self.options, self.cache_key = options, cache_key
        self.with_mtp = False
        self.metadata = _metadata(pointer)
        self.name = self.metadata.get("general.name") or path.stem
        self.description = _string(lambda buffer, size: bindings.llama_model_desc(pointer, buffer, size))
        self.n_params: int = bindings.llama_model_n_params(pointer)
        self.size_bytes: int = bindings.llama_model_size(pointer)
        self.n_ctx_train: int = bindings.llama_model_n_ctx_train(pointer)
        self.n_embd: int = bindings.llama_model_n_embd(pointer)
        self.n_layer: int = bindings.llama_model_n_layer(pointer)
        self.n_swa: int = bindings.llama_model_n_swa(pointer)
        self.is_recurrent: bool = bool(bindings.llama_model_is_recurrent(pointer))
        self.is_hybrid: bool = bool(bindings.llama_model_is_hybrid(pointer))
        self.has_encoder: bool = bool(bindings.llama_model_has_encoder(pointer))
        template = bindings.llama_model_chat_template(pointer, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        self.template_variables: dict[str, object] = {}
        self.vocabulary = Vocabulary(
            bindings.llama_model_get_vocab(pointer),
            self._vocabulary_name(),
            (cache_key, options.override_kv),  # overrides can change the tokenizer
            lambda: VocabularyOpener(vocabulary_file(path.absolute()), options.override_kv),
        )
        self.n_vocab = self.vocabulary.size
        self.adapters = Adapters(pointer, () if vocab_only else options.lora)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int | None = None,
        options: ModelOptions | None = None,
        vocab_only: bool = False,
        mtp: bool = False,
        is_head: bool = False,
    ) -> Model:
        """Load a model.

        When a file is opened for the first time, a child process tries it first, which takes half a second, because a
        broken file can crash the process that loads it.

        Args:
            path: the file; for a model in several files (`NAME-00001-of-00003.gguf`) the first
            n_gpu_layers: layers on the GPU, -1 = all; None = all if there is a GPU, else none
            options: all other load options, including LoRA adapters
            vocab_only: read no weights, which suffices to tokenize
            mtp: load the MTP layers, too, if the file has them
            is_head: the file is not evaluated by itself, so only its vocabulary is tried
                (`rest_local.drafting.models.opening`)

        Raises:
            ModelNotFound: there is no such file
            ModelInvalid: the file is a directory, truncated, foreign, hostile or unsupported
            AdapterInvalid: an adapter is damaged, or belongs to another model
            OptionError: this llama.cpp does not have an option
        """
        file = Path(path).expanduser()
        options = options or ModelOptions()
        files = check_headers(file)
        if options.numa:
            library.use_numa(options.numa)
        if n_gpu_layers is None:
            n_gpu_layers = _ALL_LAYERS if library.supports_gpu() else 0
        parameters = LoadParameters.of(options, n_gpu_layers, vocab_only=vocab_only)
        set_fields(parameters.struct, load_mtp=mtp)
        ensure_loadable(files, vocab_only or is_head, options)
        with library.log_lines.collected_errors() as errors:
            pointer = llama_cpp.llama_model_load_from_file(os.fsencode(file), parameters.struct)
        if not pointer:
            raise ModelInvalid(file, one_line(errors))
        key = identity_of(files)
        try:
            model = cls(pointer, file, vocab_only=vocab_only, n_gpu_layers=n_gpu_layers, options=options, cache_key=key)
            model.with_mtp = mtp
            return model
        except BaseException:
            llama_cpp.llama_model_free(pointer)
            raise

    @property
    def pointer(self) -> int:
        """Return the llama_model_p.

        Raises:
            ModelError: `close` was called
        """
        if self._pointer is None:
            raise ModelError(f"model {self.path}: is closed; open it again")
        return self._pointer

    @property
    def closed(self) -> bool:
        """Return True if `close` was called."""
        return self._pointer is None

    def close(self) -> None:
        """Free the weights now. A second call does nothing. The contexts of the model must be closed before."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self.vocabulary.lease.end()
            self.adapters.close()
            llama_cpp.llama_model_free(pointer)

    def __repr__(self) -> str:
        return f"<Model {self.name!r} {self.description}{' closed' if self.closed else ''}>"

    def _vocabulary_name(self) -> str:
        """Name the tokenizer, not the model, because models with one tokenizer share datastores."""
        kind = self.metadata.get("tokenizer.ggml.model", "unknown")
        pre = self.metadata.get("tokenizer.ggml.pre")
        count = bindings.llama_vocab_n_tokens(bindings.llama_model_get_vocab(self.pointer))
        return f"{kind}{f'/{pre}' if pre else ''} of {count} tokens"


@dataclass(frozen=True)
class VocabularyOpener:
    """An opener of a vocabulary for machines without the model's file. `content` is the file of the vocabulary alone.
    Can be pickled.
    """

    content: bytes
    overrides: tuple[Override, ...] = ()

    @contextmanager
    def __call__(self) -> Iterator[Vocabulary]:
        """Yield the vocabulary in a context. Raises as `Model.open`, and OSError for a full disk."""
        import tempfile  # takes milliseconds

        with tempfile.TemporaryDirectory(prefix="rest-local-") as folder:
            file = Path(folder, "vocabulary.gguf")
            file.write_bytes(self.content)
            opened = Model.open(file, vocab_only=True, options=ModelOptions(override_kv=self.overrides))  # reads all
        with opened as model:
            yield model.vocabulary


def _metadata(pointer: int) -> dict[str, str]:
    def read(function: Callable[..., int], index: int) -> str:
        return _string(lambda buffer, size: function(pointer, index, buffer, size))

    indices = range(bindings.llama_model_meta_count(pointer))
    by_index = (bindings.llama_model_meta_key_by_index, bindings.llama_model_meta_val_str_by_index)
    return {read(by_index[0], i): read(by_index[1], i) for i in indices}


def _string(call: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    """Return a string from one of llama.cpp's snprintf-like calls, which return its full length."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = call(buffer, size)
        if length < size:
            return buffer.value.decode("utf-8", "replace") if length >= 0 else ""
        size = length + 1
