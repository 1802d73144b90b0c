"""Read the hidden states of a model that MTP layers, EAGLE-3 heads and block drafters draft from.

Contract: one function for each call of llama.cpp, without decisions. These functions are experimental, C++, and not in
every llama.cpp: `missing` names those that this one lacks, and their call raises ModelError. A context that gives
features away for a layer that its architecture does not report aborts the process, so a child process tries it first
(`rest_local.drafting.models.opening`).

The features of a batch are float32 [n_tokens, width], one row for each token in the order of the batch, in memory of
the context: the next decode overwrites them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import ModelError
from rest_local.llama.context import Context
from rest_local.llama.loaded import bindings, llama_cpp
from rest_local.llama.model import Model

_PTR, _UINT, _BOOL = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool
# Name -> the end of its symbol (Itanium ABI), the result, the arguments.
_SIGNATURES: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "llama_set_embeddings_nextn": ("P13llama_contextbb", None, (_PTR, _BOOL, _BOOL)),
    "llama_get_embeddings_nextn": ("P13llama_context", _PTR, (_PTR,)),
    "llama_set_embeddings_layer_inp": ("P13llama_contextjb", None, (_PTR, _UINT, _BOOL)),
    "llama_get_embeddings_layer_inp": ("P13llama_contextj", _PTR, (_PTR, _UINT)),
    "llama_set_nextn_layer_offset": ("P13llama_contexti", None, (_PTR, ctypes.c_int32)),
    "llama_model_target_layer_ids": ("PK11llama_model", _PTR, (_PTR,)),
    "llama_model_target_layer_ids_n": ("PK11llama_model", _UINT, (_PTR,)),
}  # fmt: skip
NEXTN = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn")
OFFSET = "llama_set_nextn_layer_offset"
LAYERS = tuple(name for name in _SIGNATURES if name not in (*NEXTN, OFFSET))


def _find(name: str) -> Callable[..., Any] | None:
    ending, result, arguments = _SIGNATURES[name]
    for symbol in (name, f"_Z{len(name)}{name}{ending}"):
        function = getattr(bindings._lib, symbol, None)
        if function is not None:
            address = ctypes.cast(function, _PTR).value
            assert address is not None
            return ctypes.CFUNCTYPE(result, *arguments)(address)
    return None


_functions = {name: _find(name) for name in _SIGNATURES}


def missing(names: Sequence[str]) -> list[str]:
    """Return those of the functions that this llama.cpp does not have."""
    return [name for name in names if _functions[name] is None]


def _call(name: str, *arguments: Any) -> Any:
    function = _functions[name]
    if function is None:
        raise ModelError(f"this llama.cpp has no {name}; install a newer llama-cpp-python")
    return function(*arguments)


def n_mtp_layers(model: Model) -> int:
    """Return the number of MTP layers (NextN blocks) that the file declares."""
    count = getattr(bindings, "llama_model_n_layer_nextn", None)
    return int(count(model.pointer)) if count else 0


def target_layers(head: Model) -> list[int]:
    """Return the layers of the target whose inputs a head reads."""
    count = int(_call("llama_model_target_layer_ids_n", head.pointer))
    address = _call("llama_model_target_layer_ids", head.pointer)
    return list((ctypes.c_int32 * count).from_address(address)) if count and address else []


def give_nextn(context: Context, every_token: bool) -> None:
    """Let a context give its last hidden states, of every token of a batch or only of those with outputs."""
    _call("llama_set_embeddings_nextn", context.pointer, True, not every_token)


def use_mtp_layer(context: Context, layer: int) -> None:
    """Let a context of MTP layers compute with layer `layer` from now on. Each layer has separate contents in the
    cells, and a decode writes only those of this layer.
    """
    _call(OFFSET, context.pointer, layer)


def give_layers(context: Context, layers: Sequence[int]) -> None:
    """Let a context give the inputs of these layers for every token. The last may be the number of layers."""
    for layer in layers:
        _call("llama_set_embeddings_layer_inp", context.pointer, layer, True)


def attend_both_ways(context: Context) -> None:
    """Let each token of a batch attend to the later ones, too. A batch then has at most `n_ubatch` tokens."""
    llama_cpp.llama_set_causal_attn(context.pointer, False)


def nextn_rows(context: Context, n: int, width: int) -> NDArray[np.float32]:
    """Return the last hidden states of the last batch, a view of float32 [n, width]. Waits for the device."""
    context.synchronize()
    return _view(_call("llama_get_embeddings_nextn", context.pointer), n, width)


def layer_rows(context: Context, layer: int, n: int, width: int) -> NDArray[np.float32]:
    """Return the inputs of one layer in the last batch, a view of float32 [n, width]. Waits for the device."""
    context.synchronize()
    return _view(_call("llama_get_embeddings_layer_inp", context.pointer, layer), n, width)


def _view(address: int | None, n: int, width: int) -> NDArray[np.float32]:
    if not address:
        raise ModelError("llama.cpp gives no hidden states for this model")
    return np.ctypeslib.as_array((ctypes.c_float * (n * width)).from_address(address)).reshape(n, width)


def encode(context: Context, rows: NDArray[np.float32]) -> int:
    """Evaluate rows of embeddings, float32 [n, width], with the model's encoder. Return the code of `llama_encode`. `n`
    is at most `n_ubatch`: llama.cpp aborts beyond.
    """
    if not 0 < len(rows) <= context.n_ubatch:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {context.n_ubatch}")
    rows = np.ascontiguousarray(rows, np.float32)
    data = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    output = (ctypes.c_int8 * len(rows))(*([1] * len(rows)))  # llama.cpp would warn otherwise
    batch = llama_cpp.llama_batch(len(rows), None, data, None, None, None, output)
    with context.breaker:
        return int(llama_cpp.llama_encode(context.pointer, batch))
