"""Which slot a prompt gets, what is saved before it is lost, and what freed cells leave."""

from __future__ import annotations

from support.fake_backend import FakeBackend

from rest_local.kv_cache.slot import BatchBuilder, Slot
from rest_local.kv_cache.slots import LEAST_SHARED, Slots


def slots_of(*texts: list[int]) -> tuple[Slots, list[list[int]]]:
    """Idle slots with these texts, and what is told about before it is lost."""
    slots = Slots(FakeBackend(n_ctx=1000, n_slots=len(texts)), shares=True)
    lost: list[list[int]] = []
    slots.before_loss = lambda slot: lost.append(slot.tokens[: slot.n_past])
    for slot, tokens in zip(slots.slots, texts, strict=True):
        fill(slot, tokens)
    return slots, lost


def fill(slot: Slot, tokens: list[int]) -> None:
    for begin in range(0, len(tokens), slot.backend.n_batch):
        batch, part = BatchBuilder(), tokens[begin : begin + slot.backend.n_batch]
        slot.add_prompt(batch, part)
        batch.load(slot.backend.batch)
        assert slot.backend.decode() == 0
        slot.tokens = [*slot.tokens[: slot.n_past], *part]
        slot.commit(len(part))


def take(slots: Slots, prompt: list[int]) -> Slot:
    return slots.take(slots.match(prompt, keep=True))


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
    slot.own("a", is_kept=True)
    slot.n_saved = 40
    slot.own("a", is_kept=True)
    assert slot.n_saved == 40
    slot.own("b", is_kept=True)
    assert slot.n_saved == 0


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
    kept = slots.slots[1]
    slots.hold(kept)
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
