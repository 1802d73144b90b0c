"""llama-cpp-python's own generator with its prompt lookup, as a program that uses that library has it.

`PromptLookup.generate` gives token ids and what they cost. It serves to compare: nothing of this project is in it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 10  # drafted at a time, the library's default
GRAM = 2


@dataclass(frozen=True)
class Looked:
    """One answer. ms: from the first token to the last; passes: forward passes in that time."""

    tokens: tuple[int, ...]
    ms: float
    passes: int
    drafted: int


class PromptLookup:
    """Greedy decoding with `LlamaPromptLookupDecoding`. Close it at the end.

    Loads the weights; the library keeps the logits of the whole context: 4 bytes * n_ctx * vocabulary. Raises
    ValueError, OSError, MemoryError.
    """

    def __init__(self, path: Path, *, n_ctx: int, threads: int, n_gpu_layers: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        lookup = LlamaPromptLookupDecoding(max_ngram_size=GRAM, num_pred_tokens=TOKENS)
        self._passes = self._drafted = 0
        self._llama = Llama(
            str(path),
            n_ctx=n_ctx,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=n_gpu_layers,
            draft_model=lookup,
            logits_all=True,  # else version 0.3.36 has room for the logits of one batch, and fails beyond
            verbose=False,
        )
        evaluate = self._llama.eval

        def counted(tokens: Sequence[int]) -> None:
            self._passes += 1
            self._drafted += max(len(tokens) - 1, 0)
            evaluate(tokens)

        self._llama.eval = counted

    def generate(self, prompt: Sequence[int], max_tokens: int, ends: Collection[int]) -> Looked:
        """At most `max_tokens` tokens, up to the first of `ends`. Raises RuntimeError where llama.cpp refuses."""
        tokens: list[int] = []
        begun = latest = 0.0
        stream: Any = self._llama.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
        for token in stream:
            latest = time.perf_counter()
            if not tokens:
                begun, self._passes, self._drafted = latest, 0, 0
            if token in ends:
                break
            tokens.append(int(token))
            if len(tokens) == max_tokens:
                break
        stream.close()
        return Looked(tuple(tokens), 1e3 * (latest - begun), self._passes, self._drafted)

    def close(self) -> None:
        self._llama.close()
