"""Whatever was drafted and accepted: the cells hold what a slot says, and the rest is freed by a call for each leaf."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_backend import END, FakeBackend, Recurrent

from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.kv_cache.cell_states import share_prefix
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot import BatchBuilder, Slot, count_cells
from rest_local.kv_cache.slots import LEAST_SHARED, Slots


class Counting(FakeBackend):
    """How often llama.cpp would pass over its cells."""

    removed = copied = 0

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        self.removed += 1
        return super().remove(seq, p0, p1)

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        assert p0 < p1, "nothing to copy"
        self.copied += 1
        super().copy(source, target, p0, p1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    """Return a tree, and the nodes of it that are accepted."""
    tree = DraftTree(8)
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(ROOT, len(tree) - 1))
        if tree.can_add(parent):
            tree.add(draw(st.integers(0, END)), parent, 0.5, 0)
    path: list[int] = []
    while (children := tree.children_of(path[-1] if path else ROOT)) and draw(st.booleans()):
        path.append(draw(st.sampled_from(children)))
    return tree, path


def step(slot: Slot, tree: DraftTree, path: Sequence[int]) -> None:
    layout = tree.layout() if len(tree) else None
    slot.tokens = [*slot.tokens[: slot.n_past], 1, *(tree.token[node] for node in path)]
    protect(slot, len(tree))
    batch = BatchBuilder()
    batch.add_step(slot, tree, layout)
    batch.load(slot.backend.batch)
    assert slot.backend.decode() == 0
    assert slot.accept(tree, layout, path)


def protect(slot: Slot, n: int) -> int:
    return slot.checkpoints.protect(n, slot.n_past, slot.n_again)


def prompt(slot: Slot, n: int) -> None:
    batch = BatchBuilder()
    batch.add_prompt(slot, [2] * n)
    batch.load(slot.backend.batch)
    assert slot.backend.decode() == 0
    slot.tokens = [*slot.tokens[: slot.n_past], *[2] * n]
    slot.commit(n)


def check(slot: Slot) -> None:
    """Check that the first id holds all tokens, the others a beginning of them, and no id anything else."""
    assert isinstance(slot.backend, FakeBackend)
    for branch in range(slot.branches.n):
        seq = slot.branches.first_id + branch
        held = sorted((cell.pos, cell.token) for cell in slot.backend.cells if seq in cell.ids)
        assert held == list(enumerate(slot.tokens[: slot.n_past]))[: len(held) if branch else None]


@pytest.mark.parametrize("n_slots", [1, 3])
@given(st.lists(st.one_of(steps(), st.integers(1, 9)), max_size=8), st.integers(0, 20))
def test_cells_are_those_of_the_committed_tokens(
    n_slots: int, doings: list[tuple[DraftTree, list[int]] | int], back: int
) -> None:
    backend = Counting(n_ctx=1000, n_slots=n_slots)
    slot = Slot(backend, n_slots - 1)
    for doing in doings:
        if isinstance(doing, int):
            prompt(slot, doing)
        else:
            tree, path = doing
            backend.removed = 0
            step(slot, tree, path)
            assert backend.removed <= tree.n_leaves
        check(slot)
    slot.rewind(max(0, slot.n_past - back))
    check(slot)
    step(slot, DraftTree(), [])
    other = Slot(backend, 0)
    if n_slots > 1:
        share_prefix(other, slot, slot.n_past)
        check(other)
        assert other.tokens[: other.n_past] == slot.tokens[: slot.n_past]
        slot.clear()
        check(other)


def chain(n: int) -> DraftTree:
    tree = DraftTree(8)
    for node in range(n):
        tree.add(3, node - 1, 0.5, 0)
    return tree


def test_a_step_passes_over_the_cells_as_often_as_it_must() -> None:
    backend = Counting(n_ctx=1000, n_slots=8)
    slot = Slot(backend, 1)
    prompt(slot, 20)
    step(slot, DraftTree(), [])
    assert (backend.removed, backend.copied) == (0, 0), "a plain step leaves nothing to free"
    step(slot, chain(5), [0, 1, 2, 3, 4])
    assert (backend.removed, backend.copied) == (0, 0), "nor does a chain that was right"
    step(slot, chain(5), [0])
    assert (backend.removed, backend.copied) == (1, 0)
    two = chain(1)
    two.add(4, ROOT, 0.5, 0)
    step(slot, two, [])
    assert (backend.removed, backend.copied) == (3, 1), "the second id missed what the chains gave"
    step(slot, two, [])
    assert (backend.removed, backend.copied) == (5, 1)
    step(slot, two, [1])
    assert (backend.removed, backend.copied) == (6, 2), "the first id gets what the second was right about"
    check(slot)


@pytest.mark.parametrize(("back_to", "kept"), [(15, 10), (19, 10), (10, 10), (20, 20), (9, 0)])
def test_recurrent_state_goes_back_to_a_checkpoint_where_tokens_are_taken_back(back_to: int, kept: int) -> None:
    """The memory has kept only the states of the last decode, whatever it says."""
    backend = Recurrent()
    slot = Slot(backend, checkpoints=True)
    prompt(slot, 10)
    prompt(slot, 10)
    slot.rewind(back_to)
    assert slot.n_past == len(backend.cells) == kept
    assert backend.is_right() or not kept
    assert backend.restored == ([kept] if 0 < kept < 20 else [])


def test_a_rejected_draft_goes_back_to_the_state_before_the_step() -> None:
    """What was accepted is evaluated again with the next step, before its root; a plain step is not protected."""
    backend = Recurrent()
    slot = Slot(backend, checkpoints=True)
    prompt(slot, 10)
    assert protect(slot, 0) == 0
    step(slot, DraftTree(), [])
    assert (slot.n_past, slot.n_again, backend.restored) == (11, 0, [])
    assert protect(slot, 5) == 5
    step(slot, chain(5), [0, 1])
    assert (slot.n_past, slot.n_again, backend.restored) == (14, 3, [11])
    assert protect(slot, 4) == 4
    step(slot, chain(4), [0, 1])
    assert (slot.n_past, slot.n_again, backend.restored) == (17, 6, [11, 11]), "of the same state"
    assert [slot.reusable(slot.tokens[:n]) for n in (17, 12, 11, 10, 9)] == [11, 11, 11, 10, 0], (
        "no more than the cells hold"
    )
    step(slot, DraftTree(), [])
    assert (slot.n_past, slot.n_again) == (18, 0)
    assert backend.is_right()
    protect(slot, 2)
    step(slot, chain(2), [0])
    assert slot.n_again == 2
    slot.rewind(20)
    assert (slot.n_past, slot.n_again, len(backend.cells)) == (18, 0, 18), "what is not in the cells is not kept"


def test_what_a_slot_evaluates_again_leaves_the_others_their_places_in_the_batch() -> None:
    """Four slots and 16 places: at most three such tokens and the root. More are evaluated as a prompt is."""
    backend = Recurrent(n_batch=16, n_slots=4)
    slot = Slot(backend, checkpoints=True)
    prompt(slot, 10)
    again = []
    for _ in range(4):
        protect(slot, 2)
        step(slot, chain(2), [])
        again.append(slot.n_again)
    assert again == [1, 2, 3, 0]
    assert slot.n_past == len(backend.cells) == 10


def test_a_draft_is_no_longer_than_what_can_be_taken_back_where_no_checkpoint_can_be_made() -> None:
    backend = Recurrent()
    backend.rollback = 3
    backend.save = lambda *_, **how: b""  # type: ignore[method-assign]
    slot = Slot(backend, checkpoints=False)
    prompt(slot, 10)
    assert (protect(slot, 3), protect(slot, 9)) == (3, 3)


class Window(FakeBackend):
    """Has the cells of its sliding window from `first` on."""

    n_swa, first = 8, 0

    def __init__(self) -> None:
        super().__init__()
        self.n_swa = 8

    def begin(self, seq: int) -> int:
        return self.first if self.cells else -1


@pytest.mark.parametrize(
    ("first", "back_to", "kept"), [(12, 20, 20), (13, 20, 0), (11, 19, 19), (12, 19, 0), (0, 5, 5), (1, 5, 0)]
)
def test_a_text_whose_sliding_window_is_gone_is_given_up(first: int, back_to: int, kept: int) -> None:
    """llama-server keeps a window of 8 before the next token, and one cell to spare."""
    backend = Window()
    slot = Slot(backend)
    prompt(slot, 20)
    backend.first = first
    slot.rewind(back_to)
    assert slot.n_past == len(backend.cells) == kept


def test_tokens_that_are_taken_back_are_not_saved_any_more() -> None:
    slot = Slot(FakeBackend())
    prompt(slot, 20)
    slot.owner.n_persisted = 16
    slot.rewind(18)
    assert slot.owner.n_persisted == 16
    slot.rewind(7)
    assert slot.owner.n_persisted == 7
    slot.clear()
    assert slot.owner.n_persisted == 0


def test_images_that_save_positions_count_from_their_end_on() -> None:
    """Rows 3 to 9 are an image of six rows that takes two positions; rows 12 to 16 one of four that takes one."""
    slot = Slot(FakeBackend())
    slot.image_offsets = [(9, 4), (16, 7)]
    assert [slot.position(n) for n in (0, 3, 8, 9, 10, 15, 16, 20)] == [0, 3, 8, 5, 6, 11, 9, 13]


def test_cells_after_a_shared_prefix_count_for_each_slot() -> None:
    backend = FakeBackend(n_slots=2)
    first, second = Slot(backend, 0), Slot(backend, 1)
    prompt(first, 30)
    share_prefix(second, first, 20)
    assert count_cells([(first, 30), (second, 20)]) == 30 == len(backend.cells)
    second.tokens = list(second.tokens[:20])
    prompt(second, 15)
    assert count_cells([(first, 30), (second, 35)]) == 45 == len(backend.cells)
    assert count_cells([(first, 30), (second, 60)]) == 70, "tokens to come take cells of their own"


# ---- Several slots -------------------------------------------------------------------------------------------------


def slots_of(*texts: list[int], in_order: bool = False) -> tuple[Slots, list[list[int]]]:
    """Return idle slots with these texts, and the list of texts that are about to be lost."""
    lost: list[list[int]] = []

    class Watching(Sessions):
        def __init__(self) -> None:
            pass

        def save_lost(self, slot: Slot) -> None:
            lost.append(slot.tokens[: slot.n_past])

    slots = Slots(FakeBackend(n_ctx=1000, n_slots=len(texts)), True, in_order=in_order, sessions=Watching())
    for slot, tokens in zip(slots.slots, texts, strict=True):
        fill(slot, tokens)
    return slots, lost


def fill(slot: Slot, tokens: list[int]) -> None:
    for begin in range(0, len(tokens), slot.backend.n_batch):
        batch, part = BatchBuilder(), tokens[begin : begin + slot.backend.n_batch]
        batch.add_prompt(slot, part)
        batch.load(slot.backend.batch)
        assert slot.backend.decode() == 0
        slot.tokens = [*slot.tokens[: slot.n_past], *part]
        slot.commit(len(part))


def take(slots: Slots, prompt: list[int]) -> Slot:
    return slots.take(slots.match(prompt, keep=True), len(prompt))


def test_another_text_takes_a_slot_only_after_its_text_was_saved() -> None:
    slots, lost = slots_of([1] * 40)
    slots.release(take(slots, [1] * 50))
    assert lost == [], "the conversation goes on"
    take(slots, [2] * 50)
    assert lost == [[1] * 40]


def test_a_shared_beginning_saves_the_text_that_gives_way() -> None:
    slots, lost = slots_of([1] * 100, [2] * 30)
    slots.release(take(slots, [1] * 120))  # the newest
    slot = take(slots, [*([1] * LEAST_SHARED), 3])
    assert slot.n_past == LEAST_SHARED
    assert slots.slots[0].n_past == 100
    assert lost == [[2] * 30]


def test_a_beginning_that_costs_more_to_share_than_to_evaluate_is_not_shared() -> None:
    slots, _ = slots_of([1] * 100, [2] * 30)
    slots.release(take(slots, [1] * 120))  # the newest
    assert slots.match([*([1] * LEAST_SHARED), 3], keep=True).source is slots.slots[0]
    assert slots.match([*([1] * (LEAST_SHARED - 1)), 3], keep=True).source is None


def test_what_was_saved_for_one_user_has_to_be_saved_for_the_next() -> None:
    (slot,) = slots_of([1] * 40)[0].slots
    slot.owner = slot.owner.passed_to("a", is_kept=True)
    slot.owner.n_persisted = 40
    slot.owner = slot.owner.passed_to("a", is_kept=True)
    assert slot.owner.n_persisted == 40
    slot.owner = slot.owner.passed_to("b", is_kept=True)
    assert slot.owner.n_persisted == 0


def test_evicted_and_forgotten_texts_are_saved_before() -> None:
    slots, lost = slots_of([1] * 20, [2] * 20, [3] * 20)
    assert slots.evict()
    assert lost == [[1] * 20]
    slots.forget()
    assert [text for text in lost[1:] if text] == [[2] * 20, [3] * 20]
    assert not slots.evict()


def test_cells_that_idleness_has_cost_are_freed_and_leave_holes() -> None:
    slots, lost = slots_of([1] * 20, [2] * 50)
    slots.release(take(slots, [2] * 50))
    for _ in range(2):
        slots.charge(per_cell=1.0, per_token=2.5)
        assert not slots.holes
    kept = take(slots, [2] * 50)
    slots.charge(per_cell=1.0, per_token=2.5)
    assert lost == [[1] * 20]
    assert slots.holes == 20
    assert slots.starts_anew(LEAST_SHARED - 1)
    assert not slots.starts_anew(50), "evaluating 50 tokens again costs more than the holes did"
    for _ in range(7):
        slots.charge(per_cell=1.0, per_token=2.5)
    assert slots.starts_anew(50), "7 passes over 20 holes cost 140 ms, 50 tokens 125"
    slots.release(kept)
    slots.forget()
    assert slots.holes == 0


def test_where_cells_are_in_order_idle_texts_are_freed_between_requests_only() -> None:
    slots, lost = slots_of([1] * 20, [2] * 50, [3] * 30, in_order=True)
    running = take(slots, [2] * 50)
    for _ in range(200):
        slots.charge(per_cell=1.0, per_token=2.5)
    assert lost == [], "the running answer would go on in the cells that are freed"
    slots.release(running)
    take(slots, [2] * 60)
    assert lost == [[1] * 20, [3] * 30]


def test_a_text_that_others_came_after_is_copied_with_its_tokens() -> None:
    slots, _ = slots_of([1] * 20, [2] * 50, in_order=True)
    slots.release(take(slots, [1] * 21))
    again = take(slots, [2] * 40 + [4] * 30)
    assert (again.n_past, again.tokens[:40]) == (40, [2] * 40)
    backend = again.backend
    assert isinstance(backend, FakeBackend)
    assert [(cell.pos, cell.token) for cell in backend.cells if cell.ids == {again.branches.first_id}] == [
        (pos, 2) for pos in range(40)
    ]
    other = take(slots, [*([2] * 30), 5])  # It copies from the slot that runs.
    assert (other.n_past, len(backend.cells)) == (30, 40 + 30)
