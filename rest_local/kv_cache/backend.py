"""The part of llama.cpp that decoding uses, as a protocol. Tests have a fake of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rest_local.llama.context import Batch

LONGEST_CHAIN = 63  # Drafted tokens and the root are a batch of 64, the largest that is priced.


@dataclass(frozen=True)
class Capability:
    """The drafts that a model can verify: `tree`, `chain` of at most `longest` nodes, or `none`, and why."""

    kind: Literal["tree", "chain", "none"]
    reason: str
    longest: int = LONGEST_CHAIN
    shares: bool = True  # several sequences can hold the same cells
    copies: bool = True  # a part of a sequence can be copied to another one


class Backend(Protocol):
    """`rest_local.llama.context.Context`, or a fake of the same behaviour. See there for each member."""

    n_ctx: int  # tokens of one sequence
    n_cells: int  # tokens of all sequences together
    n_batch: int
    n_branches: int  # sequence ids of one slot
    n_slots: int
    n_vocab: int
    n_swa: int  # tokens of a sliding window; 0: there is none
    max_outputs: int
    rollback: int  # tokens of the last decode that can be removed again; ANY where these are cells of attention alone
    batch: Batch

    def decode(self) -> int: ...
    def synchronize(self) -> None: ...
    def logits(self, n_outputs: int) -> NDArray[np.float32]: ...
    def remove(self, seq: int, p0: int, p1: int = -1) -> bool: ...
    def begin(self, seq: int) -> int: ...
    def copy(self, source: int, target: int, p0: int, p1: int) -> None: ...
    def state_size(self, seq: int) -> int: ...
    def save(self, seq: int, *, partial: bool = False, on_device: bool = False) -> bytes: ...
    def restore(
        self, seq: int, state: bytes | memoryview, *, partial: bool = False, on_device: bool = False
    ) -> bool: ...
    def clear(self) -> None: ...


@runtime_checkable
class EvaluatesRows(Protocol):
    """A backend that evaluates images: `Context`, with a projector. Only requests with images need it."""

    def decode_rows(
        self, rows: NDArray[np.float32], pos: NDArray[np.int32], first_id: int, n_ids: int, *, causal: bool = True
    ) -> int: ...


def remove_tail(backend: Backend, p0: int) -> bool:
    """Remove the cells from position `p0` on from every sequence id. Return False if the model cannot do that.

    Recurrent state cannot be rolled back for all sequence ids at once. It has only one.
    """
    return backend.remove(-1 if backend.n_branches > 1 else 0, p0, -1)
