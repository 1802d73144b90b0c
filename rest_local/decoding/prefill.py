"""Cut prompts into the parts of passes: chunked prefill.

Contract:

- Long prompts are evaluated in parts, so that they do not hold up requests that generate. Of several, the one that has
  the fewest tokens left is first, and the oldest always makes progress.
- Images are evaluated in passes of their own, and no two of these follow each other while others could progress. A
  request whose image is not encoded yet waits for it, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rest_local.calibration.cost import CostCurve, per_token
from rest_local.decoding.core import Part, Pass, RequestState
from rest_local.kv_cache.backend import Backend

STALL_MS = 100.0  # A part of a prompt may add so much to a step of requests that generate.
# Two prompts that take turns are both complete late, and their clients may have given up by then. So the shortest goes
# first, and in one of so many passes the oldest, however many short ones come.
OLDEST_FIRST = 4
LEAST_PART = 16  # A part has at least so many tokens. A smaller one takes no time of its own in a pass.


class Prefill:
    """Chooses the parts of prompts for each pass, by how long the parts before took.

    `stall_ms`: what a part may add to a step of requests that generate. `shares`: cells can be shared between slots,
    and no checkpoints are needed where prompts are cut.

    `joins`: whether the last `n` tokens of a prompt, up to position `end`, and the first step of its answer are one
    pass, which saves a plain step before the first token. None where an answer must not depend on how much of its
    prompt the cells held, and the number of rows in a pass can change a bit.
    """

    def __init__(
        self, backend: Backend, curve: CostCurve, shares: bool, joins: Callable[[int, int], bool] | None
    ) -> None:
        self.stall_ms = STALL_MS
        self.was_image = False  # The newest pass evaluated an image.
        self._backend, self._curve, self._shares, self._joins = backend, curve, shares, joins
        # What a token of a prompt added to the newest pass with LEAST_PART of them or more; 0: there was none.
        self._ms_per_token = 0.0
        self._plain_pass_ms = 0.0  # The newest pass without a part of a prompt took so long.
        self._turn = 0  # Counts passes with parts of prompts.

    def per_token(self, cells: int) -> float:
        """Return the milliseconds that a token of a prompt takes; by the cost curve as long as none was measured."""
        return self._ms_per_token or per_token(self._curve, cells)

    def plan(self, states: list[RequestState], idle_cells: int, with_parts: bool = True) -> Pass | None:
        """Plan a pass for these requests. Return None if there is nothing to do. `idle_cells`: as of `Pass`.

        All of them make progress, so a pass without parts of prompts (`with_parts`) needs a request that generates.
        """
        was_image, self.was_image = self.was_image, False
        # Asked anew: a request that has failed may have taken cells.
        running = [each for each in states if not each.text.is_prefilling]
        prompts = [each for each in states if each.text.is_prefilling] if len(running) < len(states) else ()
        if not prompts or (running and not with_parts):
            return Pass(running, (), idle_cells, with_parts) if running else None
        texts = [each for each in prompts if not each.text.at_image]
        image = None if was_image and (running or texts) else self._image_part(prompts, running)
        if image is not None:
            self.was_image = True
            return Pass([], [image], idle_cells, with_parts)
        parts = self._parts(texts, running) if texts else []
        if self._joins is not None:
            ends = [(state, n) for state, n in parts if n == state.text.n_pending and state.request.max_tokens]
            whole = [state for state, n in ends if self._joins(n, len(state.text.tokens) - 1)]
            running += whole
            parts = [(state, n) for state, n in parts if state not in whole]
        return Pass(running, parts, idle_cells, with_parts) if running or parts else None

    def _image_part(self, prompts: Sequence[RequestState], running: Sequence[RequestState]) -> Part | None:
        """Take rows of one image that is ready, each time of another request."""
        ready = [each for each in prompts if each.text.at_image and each.text.images.ready_at(each.text.slot.n_past)]
        if not ready:
            return None
        self._turn += 1
        state = ready[self._turn % len(ready)]
        most = min(self._largest_part(prompts, running), self._backend.n_batch)
        return state, state.text.images.next_rows(state.text.slot.n_past, most)

    def _parts(self, prompts: Sequence[RequestState], running: Sequence[RequestState]) -> list[Part]:
        """Take parts of prompts: first of the one that is complete soonest, in one of OLDEST_FIRST passes of the
        oldest.

        They get the rest of the batch: each of the `running` has a root in it, and tokens that are evaluated again.
        """
        taken = sum(1 + state.text.slot.n_again for state in running)
        # Each prompt that ends in this pass has a root in it. However many wait, half of the batch is left for parts.
        roots = min(len(prompts), (self._backend.n_batch + 1) // 2) if self._joins else 0
        left = min(self._largest_part(prompts, running), self._backend.n_batch - taken - roots)
        self._turn += 1
        in_order = sorted(prompts, key=lambda state: state.text.n_pending)
        if not self._turn % OLDEST_FIRST:
            in_order = [prompts[0], *(state for state in in_order if state is not prompts[0])]
        parts: list[Part] = []
        for state in in_order:
            if left > 0:
                text = state.text
                n_pending = text.n_pending if self._shares else text.n_before_cut
                parts.append((state, text.images.text_before(text.slot.n_past, min(left, n_pending))))
                left -= parts[-1][1]
        return parts

    def _largest_part(self, prompts: Sequence[RequestState], running: Sequence[RequestState]) -> int:
        """Return a whole batch if no request generates, else the number of tokens that add `stall_ms`."""
        if not running:
            return self._backend.n_batch
        ms = self.per_token(sum(len(state.text.tokens) for state in (*running, *prompts)))
        return max(LEAST_PART, int(min(self.stall_ms / ms, self._backend.n_batch)))

    def learn(self, n_prompts: int, ms: float, others: bool, n_decodes: int) -> None:
        """Learn from a pass with so many tokens of prompts. `others`: requests generated in it as well."""
        if not n_prompts:
            self._plain_pass_ms = ms / n_decodes
        elif n_prompts >= LEAST_PART:  # A few tokens take as long as the pass takes without them.
            alone = self._plain_pass_ms if others else 0.0
            self._ms_per_token = max(ms - alone, 0.1 * ms) / n_prompts
