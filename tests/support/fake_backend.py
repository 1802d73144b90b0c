"""A backend with scripted logits and llama.cpp's cells: what a token sees is decided by its first sequence id.

It asserts what llama.cpp refuses (ids of one token that end at different positions), and what it does not: that every
token sees exactly one cell at each earlier position.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np

from rest_local.llama.context import ANY, Batch

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
    """Return float32 [N_VOCAB], read-only. The last two tokens decide most, so that text repeats."""
    return _logits_of(bytes(history))


class Cell:
    """`mask`: bit s is set if sequence s holds the cell."""

    __slots__ = ("mask", "pos", "token")

    def __init__(self, pos: int, token: int, mask: int) -> None:
        self.pos, self.token, self.mask = pos, token, mask

    @property
    def ids(self) -> set[int]:
        return {seq for seq in range(self.mask.bit_length()) if self.mask >> seq & 1}


def cells_of(cells: Sequence[Cell]) -> Callable[[int], list[tuple[int, int]]]:
    """Return a function that gives (position, token) of a sequence's cells, sorted, and fast by grouping equal ids."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for cell in cells:
        groups[cell.mask].append((cell.pos, cell.token))

    def of(seq: int) -> list[tuple[int, int]]:
        return sorted(chain.from_iterable(group for mask, group in groups.items() if mask >> seq & 1))

    return of


class Text:
    """What the cells of a sequence hold: (position, token), sorted."""

    def __init__(self, cells: list[tuple[int, int]]) -> None:
        self.cells, self.tokens = cells, [token for _, token in cells]
        self.whole = next((i for i, (pos, _) in enumerate(cells) if pos != i), len(cells))

    def until(self, pos: int) -> list[int]:
        """Return the tokens at 0 to `pos`. There is exactly one cell at each."""
        more = self.cells[pos + 1][0] if pos + 1 < len(self.cells) else None
        assert self.whole > pos != more, f"position {pos} sees {self.cells}"
        return self.tokens[: pos + 1]


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
        self.rollback = ANY
        self.threads = 1
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
            self._place(n // 2 + 1)
            return failure
        self._place(n)
        if isinstance(failure, BaseException):
            raise failure
        self.evaluated += n
        seen = cells_of(self.cells)
        texts: dict[int, Text] = {}
        self._rows = np.array([self._row(i, n, seen, texts) for i in range(n) if self.batch.output[i]], np.float32)
        return 0

    def _place(self, n: int) -> None:
        """Put the first n tokens of the batch into cells."""
        last: dict[int, int] = {}  # the last position of cells with the same ids
        for cell in self.cells:
            if cell.pos > last.get(cell.mask, -1):
                last[cell.mask] = cell.pos
        ends: dict[int, int] = {}
        rows = (each[:n].tolist() for each in (self.batch.ids, self.batch.n_ids, self.batch.pos, self.batch.token))
        for all_ids, n_ids, pos, token in zip(*rows, strict=True):
            ids = set(all_ids[:n_ids])
            assert min(ids) >= 0
            assert max(ids) < self.n_branches * self.n_slots
            for seq in ids.difference(ends):
                ends[seq] = max((pos for mask, pos in last.items() if mask >> seq & 1), default=-1)
            assert len({ends[seq] for seq in ids}) == 1, "ids of one token that end at different positions"
            self.cells.append(Cell(pos, token, sum(1 << seq for seq in ids)))

    def _row(self, i: int, n: int, seen: Callable[[int], list[tuple[int, int]]], texts: dict[int, Text]) -> np.ndarray:
        """Return a row. `texts` has those of each sequence, kept for the other rows of the pass."""
        seq, pos = int(self.batch.ids[i, 0]), int(self.batch.pos[i])
        if seq not in texts:
            texts[seq] = Text(seen(seq))
        return self.compute(texts[seq].until(pos), n)

    def synchronize(self) -> None:
        pass

    def logits(self, n_outputs: int) -> np.ndarray:
        assert n_outputs == len(self._rows)
        return self._rows

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        if not self.removable and p0 > 0:
            return False
        gone = 1 << seq if seq >= 0 else -1
        for cell in self.cells:
            if cell.pos >= p0 and (p1 < 0 or cell.pos < p1):
                cell.mask &= ~gone
        self.cells = [c for c in self.cells if c.mask]
        return True

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        for cell in self.cells:
            if cell.mask >> source & 1 and p0 <= cell.pos < p1:
                cell.mask |= 1 << target

    def begin(self, seq: int) -> int:
        return min((cell.pos for cell in self.cells if cell.mask >> seq & 1), default=-1)

    def save(self, seq: int, *, partial: bool = False, on_device: bool = False) -> bytes:
        return json.dumps([(cell.pos, cell.token) for cell in self.cells if cell.mask >> seq & 1]).encode()

    def restore(self, seq: int, state: bytes | memoryview, *, partial: bool = False, on_device: bool = False) -> bool:
        held = json.loads(bytes(state))
        if len(self.cells) + len(held) > self.n_ctx:
            return False
        self.cells += [Cell(pos, token, 1 << seq) for pos, token in held]
        return True

    def clear(self) -> None:
        self.cells = []


class Recurrent(FakeBackend):
    """Memory with a recurrent state beside its cells, one for each sequence.

    It says that it has removed a tail, and keeps the state, which is wrong until one is restored or nothing is left.
    """

    def __init__(self, n_ctx: int = 256, n_batch: int = 64, n_slots: int = 1) -> None:
        super().__init__(n_ctx, 1, n_batch, n_slots=n_slots)
        self.rollback = 0
        self.states = dict.fromkeys(range(n_slots), b"")  # the tokens that each has taken in
        self.restored: list[int] = []

    def is_right(self, seq: int = 0) -> bool:
        """Return True if the state is that of the cells."""
        return self.states[seq] == self._tokens(seq)

    def _tokens(self, seq: int) -> bytes:
        return bytes(token for _, token in cells_of(self.cells)(seq))

    def _place(self, n: int) -> None:
        for seq, pos, token in zip(self.batch.ids[:n, 0], self.batch.pos[:n], self.batch.token[:n], strict=True):
            if len(self.states[int(seq)]) == pos:  # else it is wrong, and stays so
                self.states[int(seq)] += bytes([token])
        super()._place(n)

    def _row(self, i: int, n: int, seen: Callable[[int], list[tuple[int, int]]], texts: dict[int, Text]) -> np.ndarray:
        assert self.is_right(int(self.batch.ids[i, 0]))
        return super()._row(i, n, seen, texts)

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        if p0 <= 0:
            self.states[seq] = b""
        return super().remove(seq, p0, p1)

    def clear(self) -> None:
        super().clear()
        self.states = dict.fromkeys(self.states, b"")

    def save(self, seq: int, *, partial: bool = False, on_device: bool = False) -> bytes:
        assert self.is_right(seq)
        return self.states[seq]

    def restore(self, seq: int, state: bytes | memoryview, *, partial: bool = False, on_device: bool = False) -> bool:
        self.states[seq] = bytes(state)
        self.restored.append(len(state))
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
    """Decode one token at a time over the whole history, without cells: the oracle."""
    history = list(prompt)
    for _ in range(n):
        token = chooser.sample(logits_of(history))
        chooser.accept(token)
        history.append(token)
        if token == END:
            break
    return history[len(prompt) :]
