"""Cells that are shared or copied between slots, and their states as bytes: parts of a text, and texts as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from rest_local.kv_cache.checkpoints import MOST_CHECKPOINTS
from rest_local.kv_cache.slot import Slot, lacks_window, run_numbers

SAVED_CHECKPOINTS = 6  # So many go to disk with the text.


def share_prefix(slot: Slot, other: Slot, n: int) -> None:
    """Begin anew with the first `n` tokens of another slot. The cells themselves are shared, nothing is evaluated.

    Costs a pass over the cells. Memory that cannot remove a tail needs a checkpoint of the other slot at `n`
    (`Slot.reusable`), whose state is copied.
    """
    slot.clear()
    slot.image_offsets = other.image_offsets
    branches, kept = slot.branches, [each for each in other.checkpoints.states if each[0] <= n]
    slot.backend.copy(other.branches.first_id, branches.first_id, 0, other.position(n))
    if slot.checkpoints.is_on:
        state = kept[-1][1] if kept and kept[-1][0] == n else b""
        restored = bool(state) and slot.backend.restore(branches.first_id, state, partial=True)
        if not restored or not branches.remove(slot.position(n)):
            slot.clear()
            return
        slot.checkpoints.states = kept
        slot.checkpoints.turns = {at for at in other.checkpoints.turns if at <= n}
    slot.tokens, slot.n_past = other.tokens, n
    slot.runs = [*(run for run in other.runs if run[0] < n), (n, next(run_numbers))]
    branches.attach_first()
    if slot.draft_text and other.draft_text:
        slot.draft_text.share(other.draft_text, n)
    if lacks_window(slot):
        slot.clear()


def begin_anew(slot: Slot, tokens: list[int]) -> None:
    """Free the cells, and make `tokens` the text. `load_part` or `load_states` come next."""
    slot.clear()
    slot.tokens, slot.image_offsets, slot.owner.n_persisted = tokens, (), 0


def part_of(slot: Slot, begin: int, end: int) -> bytes:
    """Return the state of the committed tokens at [begin, end) for `load_part`, for memory that can remove a tail.

    Return nothing if some of them have left a sliding window. The slot needs more than one sequence id.
    """
    slot.branches.release()
    backend, spare = slot.backend, slot.branches.spare
    try:
        backend.copy(slot.branches.first_id, spare, begin, end)
        # llama.cpp keeps all positions after the first one that it has, in a sliding window too.
        return backend.save(spare) if backend.begin(spare) == begin else b""
    finally:
        backend.remove(spare, 0, -1)


def load_part(slot: Slot, state: bytes | memoryview, end: int) -> bool:
    """Load the next tokens of the text, up to `end`, from a state of `part_of` into the cells.

    The state begins at `n_past` or before, and ends at `end` or later. Return False if there is no room for it, or if
    it is of another kind of context.
    """
    slot.branches.release()
    backend, spare = slot.backend, slot.branches.spare
    try:
        if not backend.restore(spare, state):
            return False
        backend.copy(spare, slot.branches.first_id, slot.n_past, end)
    finally:
        backend.remove(spare, 0, -1)
    slot.n_past = end
    return True


def states_of(slot: Slot, most: int) -> list[tuple[int, bytes]] | None:
    """Return what memory that cannot be cut back holds: the whole state with its number of tokens, then checkpoints.

    The newest checkpoint comes first, and there are as many as `most` bytes hold. None if these do not hold the state.
    """
    slot.settle()
    most -= slot.backend.state_size(slot.branches.first_id)
    if most < 0:
        return None
    states = [(slot.n_past, slot.backend.save(slot.branches.first_id))]
    for at, state in list(reversed(slot.checkpoints.states))[: SAVED_CHECKPOINTS + 1]:
        most -= len(state)
        if at < slot.n_past and most >= 0:
            states.append((at, state))
    return states[: SAVED_CHECKPOINTS + 1]


def load_states(slot: Slot, states: Sequence[tuple[int, bytes | memoryview]], n: int) -> bool:
    """Load one of such states in place of what the slot holds, cut back to the first `n` tokens of its text.

    These are the tokens of one of the states, and no image. Return False if that fails; the slot is then empty.
    """
    slot.clear()
    n_whole, state = states[0]
    if not slot.backend.restore(slot.branches.first_id, state):
        return False
    slot.n_past, slot.runs = n_whole, [(0, next(run_numbers))]
    slot.branches.attach_first()
    slot.checkpoints.states = [(at, bytes(each)) for at, each in reversed(states[1:])][-MOST_CHECKPOINTS:]
    if n_whole == n:
        slot.checkpoints.keep(n)
    else:
        slot.rewind(n)
    return slot.n_past == n


def copy_in_order(slot: Slot, source: Slot, n: int, moved: Sequence[Slot] = ()) -> bool:
    """Begin anew with copies of the first `n` cells of a slot, this one or another, and return True if that worked. The
    copies are in the order of the tokens, and no cell below them is free (`use_lowest_cells`). They may lie where the
    cells of `moved`, the source among them or not, are freed.

    Images and what a drafting model knows are not copied, nor texts that have left a sliding window: then this returns
    False, and the slot is as it was, or empty. Takes the time of copying the state twice.
    """
    tokens = source.tokens
    if slot.draft_text is not None or min(tokens[:n]) < 0:
        return False
    state, newest = part_of(source, 0, n), part_of(source, n - 1, n)
    if not state:
        return False
    n_persisted = min(slot.owner.n_persisted, n) if source is slot else 0
    begin_anew(slot, tokens)
    for each in moved:
        each.clear()
    use_lowest_cells(slot, newest)
    if not load_part(slot, state, n):
        slot.clear()
        return False
    slot.owner.n_persisted = n_persisted
    return True


def use_lowest_cells(slot: Slot, newest: bytes) -> None:
    """Make llama.cpp put the next tokens of this empty slot into the lowest free cells. `newest`: the state of one
    cell.

    llama.cpp looks for room after the last place, and from the lowest cell on only if the tokens that come at once
    are few for the free cells below. So a prompt may go above cells that its answer then fills, and attention adds up
    in another order than that of the tokens. A single cell goes to the lowest place, and freeing it again leaves that
    as the place where the next search begins.
    """
    slot.backend.restore(slot.branches.first_id, newest)
    slot.clear()
