"""Measure in llama.cpp how often the draft heads agree with the demo model's greedy choice, without torch.

    python models/evaluate_heads.py [--head mtp|eagle3] [--file FILE.gguf] [--windows 30] [--output FILE.json]

Two measures, each on windows of the well-known modules (`stored`) and of the held-out ones:

- text: the first drafted token at every position of the file's own text, against the demo model's arg-max there.
- answer: the demo model continues the window's first half greedily. At positions of its answer the head drafts
  `DEPTH` tokens. The shares by depth are conditional: of the drafts whose earlier tokens were right. `accepted` is the
  mean number of right tokens a draft.

The MTP layer is measured on the demo model as `mimo2.py` rewrites it, from a file of its own. Decoding is greedy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as bindings
from numpy.typing import NDArray

from rest_local.bench.prompts import held_out_modules, standard_library, well_known_modules
from rest_local.llama import library  # noqa: F401  keeps llama.cpp's log off the terminal

HERE = Path(__file__).resolve().parent
DEPTH = 4  # tokens of a draft
WINDOW = 384  # tokens of a window
N_CTX = 1024
Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


def _function(name: str, mangled: str, arguments: list[Any], result: Any) -> Any:
    """A function of llama.cpp's extension header, by its C name or its C++ name."""
    symbols = bindings._lib
    function = getattr(symbols, name if hasattr(symbols, name) else mangled)
    function.argtypes, function.restype = arguments, result
    return function


_floats = ctypes.POINTER(ctypes.c_float)
_void = ctypes.c_void_p
_set_nextn = _function(
    "llama_set_embeddings_nextn",
    "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    [_void, ctypes.c_bool, ctypes.c_bool],
    None,
)
_get_nextn = _function("llama_get_embeddings_nextn", "_Z26llama_get_embeddings_nextnP13llama_context", [_void], _floats)
_set_layer = _function(
    "llama_set_embeddings_layer_inp",
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    [_void, ctypes.c_uint32, ctypes.c_bool],
    None,
)
_get_layer = _function(
    "llama_get_embeddings_layer_inp",
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    [_void, ctypes.c_uint32],
    _floats,
)
_layer_ids = _function(
    "llama_model_target_layer_ids",
    "_Z28llama_model_target_layer_idsPK11llama_model",
    [_void],
    ctypes.POINTER(ctypes.c_int32),
)


def _rows(pointer: Any, rows: int, width: int) -> Floats:
    """A copy of `rows` rows at `pointer`. Raises RuntimeError where llama.cpp has none."""
    if not pointer:
        raise RuntimeError("llama.cpp gave no rows")
    return np.array(np.ctypeslib.as_array(pointer, (rows, width)), np.float32)


class Network:
    """A model with one context of one sequence, which reads tokens, rows or both at given positions."""

    def __init__(self, path: Path, *, mtp: bool = False, other: Network | None = None) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.load_mtp = mtp
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = N_CTX
        settings.n_threads = settings.n_threads_batch = 1
        if mtp:
            settings.ctx_type = bindings.LLAMA_CONTEXT_TYPE_MTP
        elif other is not None:
            settings.ctx_other = other.context
        self.context: Any = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {path}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.width = int(llama_cpp.llama_model_n_embd(self.model))
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model)))

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def cut(self, position: int) -> None:
        """Forget all positions from `position` on."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, position, -1)

    def decode(self, tokens: Ids, position: int, rows: Floats | None = None, *, encode: bool = False) -> Floats:
        """Read tokens from `position` on, each with a row if there are rows. Returns the logits, [n, vocabulary].

        With `encode` it reads the rows alone, as the encoder of an EAGLE-3 head, and returns no rows.
        Raises RuntimeError if llama.cpp refuses.
        """
        n = len(tokens)
        ids = np.ascontiguousarray(tokens, np.int32)
        positions = np.arange(position, position + n, dtype=np.int32)
        counts, outputs, sequence = np.ones(n, np.int32), np.ones(n, np.int8), (ctypes.c_int32 * 1)(0)
        sequences = (ctypes.POINTER(ctypes.c_int32) * n)(*[ctypes.cast(sequence, ctypes.POINTER(ctypes.c_int32))] * n)
        data = None if rows is None else np.ascontiguousarray(rows, np.float32)
        batch = bindings.llama_batch(
            n_tokens=n,
            token=None if encode else ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None if data is None else data.ctypes.data_as(_floats),
            pos=positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=sequences,
            logits=outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        run = llama_cpp.llama_encode if encode else llama_cpp.llama_decode
        if code := run(self.context, batch):
            raise RuntimeError(f"llama.cpp returned {code} for {n} tokens at {position}")
        if encode:
            return np.empty((0, self.vocabulary), np.float32)
        return _rows(llama_cpp.llama_get_logits(self.context), n, self.vocabulary)

    def tokenize(self, text: str) -> Ids:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        n = llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, len(ids), False, False)
        return np.array(ids[:n], np.int32)


class MTP:
    """The MTP layer: it reads the token at a position and the hidden state of the position before it."""

    first = 0  # the first position it reads

    def __init__(self, target: Network, file: Path) -> None:
        self.target, self.network = target, Network(file, mtp=True)
        _set_nextn(target.context, True, False)
        _set_nextn(self.network.context, True, True)

    def features(self, n: int) -> Floats:
        """Of the target's last batch of `n` tokens: the row that belongs to each, [n, width]."""
        return _rows(_get_nextn(self.target.context), n, self.target.width)

    def read(self, tokens: Ids, rows: Floats, position: int) -> tuple[Floats, Floats]:
        """Logits and own states after tokens at `position` on, each with the row of the position before it."""
        logits = self.network.decode(tokens, position, rows)
        return logits, _rows(_get_nextn(self.network.context), len(tokens), self.network.width)


class Eagle3(MTP):
    """The EAGLE-3 head: like `MTP`, but its rows come from its encoder, and its first position has none."""

    first = 1

    def __init__(self, target: Network, file: Path) -> None:
        self.target, self.network = target, Network(file, other=target)
        self.layers = list(_layer_ids(self.network.model)[:3])
        for layer in self.layers:
            _set_layer(target.context, layer, True)
        _set_nextn(self.network.context, True, True)

    def features(self, n: int) -> Floats:
        width = self.target.width
        inputs = [_rows(_get_layer(self.target.context, layer), n, width) for layer in self.layers]
        self.network.decode(np.zeros(n, np.int32), 0, np.concatenate(inputs, 1), encode=True)
        return _rows(_get_nextn(self.network.context), n, self.network.width)


HEADS = {"mtp": MTP, "eagle3": Eagle3}


def shifted(rows: Floats) -> Floats:
    """The row of the position before each one; zeros at the first."""
    return np.concatenate((np.zeros_like(rows[:1]), rows[:-1]))


@dataclass
class Counts:
    """Sums over windows: first tokens on given text, and drafts by depth in greedy answers."""

    text_hits: int = 0
    text_all: int = 0
    hits: list[int] = field(default_factory=lambda: [0] * DEPTH)
    tried: list[int] = field(default_factory=lambda: [0] * DEPTH)

    def to_dict(self) -> dict[str, object]:
        return {
            "text": round(self.text_hits / max(self.text_all, 1), 3),
            "text_tokens": self.text_all,
            "answer_by_depth": [round(a / max(b, 1), 3) for a, b in zip(self.hits, self.tried, strict=True)],
            "answer_drafts": self.tried[0],
            "accepted": round(sum(self.hits) / max(self.tried[0], 1), 2),
        }


def on_text(target: Network, head: MTP, tokens: Ids, counts: Counts) -> None:
    """Count the first drafted tokens that are the target's choice, at every position of `tokens`."""
    target.cut(0)
    head.network.cut(0)
    choices = target.decode(tokens, 0).argmax(1)
    rows, first = shifted(head.features(len(tokens))), head.first
    logits, _ = head.read(tokens[first:], rows[first:], first)
    counts.text_hits += int((logits.argmax(1) == choices[first:]).sum())
    counts.text_all += len(tokens) - first


def greedy(target: Network, prompt: Ids, n: int) -> Ids:
    """The prompt and the `n` tokens that the target says after it."""
    target.cut(0)
    logits = target.decode(prompt, 0)
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(logits[-1].argmax()))
        logits = target.decode(np.array(tokens[-1:], np.int32), len(tokens) - 1)
    return np.array(tokens, np.int32)


def on_answer(target: Network, head: MTP, prompt: Ids, n: int, counts: Counts) -> None:
    """Count by depth the drafts that continue the target's greedy answer of `n` tokens, at every third position."""
    tokens = greedy(target, prompt, n)
    target.cut(0)
    head.network.cut(0)
    target.decode(tokens, 0)
    rows, first = shifted(head.features(len(tokens))), head.first
    head.read(tokens[first:], rows[first:], first)
    for at in range(len(tokens) - DEPTH - 1, len(prompt) - 1, -3):  # backwards: each draft cuts the cache at its start
        head.network.cut(at)
        token, row = tokens[at : at + 1], rows[at : at + 1]
        for depth in range(DEPTH):
            logits, row = head.read(token, row, at + depth)
            token = logits.argmax(1).astype(np.int32)
            counts.tried[depth] += 1
            if token[0] != tokens[at + depth + 1]:
                break
            counts.hits[depth] += 1


def windows_of(target: Network, names: tuple[str, ...], count: int) -> list[Ids]:
    """`count` windows of WINDOW tokens, spread over the modules."""
    texts = [standard_library() / name for name in names]
    streams = [target.tokenize(path.read_text("utf-8")) for path in texts if path.exists()]
    found = []
    for number in range(count):
        stream = streams[number % len(streams)]
        begin = (len(stream) - WINDOW) * (number * 7 % 10 + 1) // 11
        if begin >= 0:
            found.append(stream[begin : begin + WINDOW])
    return found


def measure(kind: str, model: Path, file: Path, windows: int) -> dict[str, dict[str, object]]:
    """The counts of one head on both kinds of text. `model`: the demo model; for MTP, rewritten by `mimo2.py`."""
    target = Network(model)
    head = HEADS[kind](target, file)
    report = {}
    for name, modules in (("stored", well_known_modules()), ("held out", held_out_modules())):
        counts = Counts()
        for tokens in windows_of(target, modules, windows):
            on_text(target, head, tokens, counts)
            on_answer(target, head, tokens[: WINDOW // 2], WINDOW // 2, counts)
        report[name] = counts.to_dict()
    head.network.close()
    target.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "demo.gguf")
    parser.add_argument("--head", choices=sorted(HEADS), action="append")
    parser.add_argument("--file", type=Path, help="the head's file; default: demo-HEAD.gguf in this folder")
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report = {}
    for kind in args.head or sorted(HEADS):
        file = args.file or HERE / f"demo-{kind}.gguf"
        if kind == "mtp":
            from mimo2 import convert  # the only part that needs the package gguf

            with tempfile.TemporaryDirectory() as folder:
                model = Path(folder) / "demo-mimo2.gguf"
                convert(args.model, model)
                report[kind] = measure(kind, model, file, args.windows)
        else:
            report[kind] = measure(kind, args.model, file, args.windows)
        print(json.dumps({kind: report[kind]}), flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
