"""The side "llama-cpp-python": its generator with its prompt lookup, in this process, on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rest_local.bench.comparing.sides import Run, SideFailed, Task, TaskLeftOut

if TYPE_CHECKING:
    from rest_local.llama.prompt_lookup import PromptLookup

LARGEST = 4 << 30  # bytes of logits that it may keep


class PromptLookupSide:
    """`ends`: tokens that end an answer. `n_vocab` decides whether the logits of the context fit."""

    name = "llama-cpp-python prompt lookup"

    def __init__(
        self, path: Path, *, n_ctx: int, threads: int, n_gpu_layers: int, n_vocab: int, ends: frozenset[int]
    ) -> None:
        from rest_local.llama.prompt_lookup import GRAM, TOKENS

        self.options: dict[str, Any] = {"max_ngram_size": GRAM, "num_pred_tokens": TOKENS, "n_ctx": n_ctx}
        self._path, self._n_ctx, self._threads, self._layers = path, n_ctx, threads, n_gpu_layers
        self._n_vocab, self._ends = n_vocab, ends
        self._lookup: PromptLookup | None = None

    def open(self) -> None:
        from rest_local.llama.prompt_lookup import PromptLookup

        if (needed := 4 * self._n_ctx * self._n_vocab) > LARGEST:
            raise SideFailed(self.name, f"it would keep {needed / 2**30:.1f} GB of logits; give a shorter context")
        try:
            self._lookup = PromptLookup(self._path, n_ctx=self._n_ctx, threads=self._threads, n_gpu_layers=self._layers)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            raise SideFailed(self.name, str(error) or type(error).__name__) from error

    def run(self, task: Task) -> Run:
        if task.schema is not None:
            raise TaskLeftOut(self.name, "its prompt lookup is measured without grammars")
        if task.temperature:
            raise TaskLeftOut(self.name, "it draws other random numbers")
        if self._lookup is None:
            raise SideFailed(self.name, "it is not open")
        try:
            done = self._lookup.generate(task.prompt, task.max_tokens, self._ends)
        except (ValueError, OSError, MemoryError, RuntimeError, IndexError) as error:
            self.close()
            raise SideFailed(self.name, str(error) or type(error).__name__) from error
        accepted = max(len(done.tokens) - 1 - done.passes, 0)
        return Run(done.tokens, done.ms, done.passes, done.drafted, accepted)

    def close(self) -> None:
        if self._lookup is not None:
            lookup, self._lookup = self._lookup, None
            lookup.close()
