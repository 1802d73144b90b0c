"""A backend with scripted logits and llama.cpp's cells: what a token sees is decided by its first sequence id.

It asserts what llama.cpp refuses (ids of one token that end at different positions), and what it does not: that every
token sees exactly one cell at each earlier position.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from rest_local.llama.context import Batch

N_VOCAB = 24
END = N_VOCAB - 1


def _noise(tokens: bytes) -> np.ndarray:
    digest = hashlib.blake2b(tokens, digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(N_VOCAB)


@lru_cache(maxsize=N_VOCAB**2)
def _noise_of_two(tokens: bytes) -> np.ndarray:
    return 3.0 * _noise(tokens)


@lru_cache(maxsize=100_000)
def _logits_of(history: bytes) -> np.ndarray:
    row = _noise_of_two(history[-2:]) + 0.5 * _noise(history)
    row[END] -= 4.0
    logits = row.astype(np.float32)
    logits.flags.writeable = False
    return logits


def logits_of(history: Sequence[int]) -> np.ndarray:
    """float32 [N_VOCAB], read-only: mostly decided by the last two tokens, so that text repeats, a little by all of
    them."""
    return _logits_of(bytes(history))


class Cell:
    def __init__(self, pos: int, token: int, ids: set[int]) -> None:
        self.pos, self.token, self.ids = pos, token, ids


class FakeBackend:
    """`failures`: call number (from 1) -> code to return, or an exception to raise after the cells were filled."""

    def __init__(
        self, n_ctx: int = 256, n_branches: int = 8, n_batch: int = 64, removable: bool = True, n_slots: int = 1
    ) -> None:
        self.n_slots = n_slots
        self.n_cells = n_ctx
        self.n_ctx, self.n_branches, self.n_batch, self.n_vocab = n_ctx, n_branches, n_batch, N_VOCAB
        self.max_outputs = min(64, n_batch)
        self.n_swa = 0
        self.threads = self.threads_used = 1
        self.batch = Batch(n_batch, n_branches)
        self.cells: list[Cell] = []
        self.failures: dict[int, int | BaseException] = {}
        self.calls = 0
        self.removable = removable
        self.evaluated = 0
        self.compute: Callable[[Sequence[int], int], np.ndarray] = lambda history, n: logits_of(history)
        self._rows = np.zeros((0, N_VOCAB), np.float32)

    def decode(self) -> int:
        self.calls += 1
        failure = self.failures.pop(self.calls, None)
        if failure in (1, -1):
            return int(failure)
        n = self.batch.n_tokens
        if len(self.cells) + n > self.n_ctx:
            return 1
        if isinstance(failure, int):  # partly applied
            self._place(range(n // 2 + 1))
            return failure
        self._place(range(n))
        if isinstance(failure, BaseException):
            raise failure
        self.evaluated += n
        seen: dict[int, list[tuple[int, int]]] = {}
        self._rows = np.array([self._row(i, n, seen) for i in range(n) if self.batch.output[i]], np.float32)
        return 0

    def _place(self, numbers: range) -> None:
        last: dict[int, int] = {}
        for cell in self.cells:
            for seq in cell.ids:
                if cell.pos > last.get(seq, -1):
                    last[seq] = cell.pos
        for i in numbers:
            ids = set(self.batch.ids[i, : self.batch.n_ids[i]].tolist())
            assert all(0 <= s < self.n_branches * self.n_slots for s in ids)
            assert len({last.get(seq, -1) for seq in ids}) == 1, "ids of one token that end at different positions"
            self.cells.append(Cell(int(self.batch.pos[i]), int(self.batch.token[i]), ids))

    def _row(self, i: int, n: int, seen: dict[int, list[tuple[int, int]]]) -> np.ndarray:
        """`seen`: (position, token) of all cells of a sequence, by sequence, kept for the other rows of the pass."""
        seq, pos = int(self.batch.ids[i, 0]), int(self.batch.pos[i])
        if seq not in seen:
            seen[seq] = sorted((cell.pos, cell.token) for cell in self.cells if seq in cell.ids)
        visible = seen[seq][: bisect_left(seen[seq], (pos + 1,))]
        assert [p for p, _ in visible] == list(range(pos + 1)), f"sequence {seq} sees {visible}"
        return self.compute([t for _, t in visible], n)

    def use_threads(self, n: int) -> None:
        assert 1 <= n <= self.threads
        self.threads_used = n

    def synchronize(self) -> None:
        pass

    def logits(self, n_outputs: int) -> np.ndarray:
        assert n_outputs == len(self._rows)
        return self._rows

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        if not self.removable and p0 > 0:
            return False
        for cell in self.cells:
            if cell.pos >= p0 and (p1 < 0 or cell.pos < p1):
                cell.ids -= {seq} if seq >= 0 else cell.ids.copy()
        self.cells = [c for c in self.cells if c.ids]
        return True

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        for cell in self.cells:
            if source in cell.ids and p0 <= cell.pos < p1:
                cell.ids.add(target)

    def clear(self) -> None:
        self.cells = []


class Recurrent(FakeBackend):
    """Memory that says it has removed a tail, and then holds a state that is wrong until one is restored."""

    def __init__(self, n_ctx: int = 256) -> None:
        super().__init__(n_ctx, n_branches=1)
        self.is_right = True
        self.restored: list[int] = []

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        self.is_right &= not any(cell.pos >= p0 > 0 for cell in self.cells)
        return super().remove(seq, p0, p1)

    def save(self, seq: int, *, partial: bool = False) -> bytes:
        assert self.is_right
        return bytes(cell.token for cell in self.cells)

    def restore(self, seq: int, state: bytes | memoryview, *, partial: bool = False) -> bool:
        self.cells = [Cell(pos, token, {0}) for pos, token in enumerate(bytes(state))]
        self.restored.append(len(state))
        self.is_right = True
        return True


class Greedy:
    def sample(self, logits: np.ndarray) -> int:
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        pass


class Draws:
    """Seeded sampling: one draw a call, as llama.cpp's `dist`."""

    def __init__(self, seed: int, temperature: float = 1.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._temperature = temperature
        self.accepted: list[int] = []

    def sample(self, logits: np.ndarray) -> int:
        p = np.exp((logits - logits.max()) / self._temperature, dtype=np.float64)
        return int(np.searchsorted(np.cumsum(p / p.sum()), self._rng.random()))

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def plain(prompt: Sequence[int], chooser: Greedy | Draws, n: int) -> list[int]:
    """The oracle: one token at a time over the whole history, no cells."""
    history = list(prompt)
    for _ in range(n):
        token = chooser.sample(logits_of(history))
        chooser.accept(token)
        history.append(token)
        if token == END:
            break
    return history[len(prompt) :]
