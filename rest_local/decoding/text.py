"""The text of one request, prompt and answer, and how much of it the cells of a slot hold.

Contract:

- `Text` owns the list of tokens: only `extend` changes it. The slot reads the same list, and its `n_past`
  says how many of them are in the cells. The newest token is the *root*, which the next step evaluates.
- A text waits (no slot), or is in a slot: there its prompt is restored from disk or evaluated, part by part, then its
  answer grows. It can leave the slot and enter another one; the tokens stay.
- Long prompts are cut where later prompts are likely to differ, because memory that cannot be cut back keeps a
  checkpoint there.

Knows neither drafts nor scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rest_local.decoding.images import Encode, PromptImages
from rest_local.decoding.request import Request
from rest_local.kv_cache.restoring import Restoring, begin_restoring
from rest_local.kv_cache.slot import Slot
from rest_local.kv_cache.slots import Slots
from rest_local.llama.placeholders import common_prefix

LAST_PART = 32  # Tokens after the last cut of a prompt without messages: prompts of editors change at the end.
APART = 8  # Control tokens that are closer together stand between the same two messages.
SEARCHED = 4096  # So many of the newest tokens of a prompt, and of the first, are searched for messages.


class Text:
    """The tokens of one request, and their way into the cells of a slot.

    `encode`: computes the rows of images. `is_control`: whether a token begins or ends a message.
    """

    def __init__(self, request: Request, encode: Encode | None, is_control: Callable[[int], bool]) -> None:
        self.tokens = [int(token) for token in request.prompt]
        self.images = PromptImages(request.images, encode)
        self.images.find(self.tokens)
        self._slot: Slot | None = None
        self._restoring: Restoring | None = None
        self._is_control = is_control
        self._cuts: list[int] | None = None

    # Its slot

    @property
    def slot(self) -> Slot:
        assert self._slot is not None
        return self._slot

    @property
    def has_slot(self) -> bool:
        return self._slot is not None

    def is_in(self, slot: Slot) -> bool:
        return self._slot is slot

    def enter(self, slot: Slot) -> None:
        """Put the text into a slot. Call `follow` next."""
        self._slot = slot

    def follow(self, slots: Slots | None = None) -> int:
        """Make this the text of its slot, and return how many of its tokens the cells hold.

        If the disk holds more of it than any of `slots`, begin to read that; `restore` goes on.
        """
        self.slot.follow(self.tokens, self.images.offsets)
        self._restoring = begin_restoring(slots, self.slot) if slots else None
        return self.slot.n_past

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model has chosen."""
        self.tokens += tokens

    def leave(self) -> Slot | None:
        slot, self._slot = self._slot, None
        if self._restoring is not None:
            self._restoring.end()
            self._restoring = None
        return slot

    # What is left to evaluate

    @property
    def n_pending(self) -> int:
        """Return how many tokens have to be evaluated before the root."""
        slot = self._slot
        return len(self.tokens) - 1 - (0 if slot is None else slot.n_past)

    @property
    def is_prefilling(self) -> bool:
        """Return True if its prompt, or its text after a pause, is being evaluated in a slot. Any thread may ask."""
        slot = self._slot
        return slot is not None and slot.n_past < len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Return how many tokens can still be evaluated."""
        slot = self.slot
        return slot.backend.n_ctx - slot.n_past

    @property
    def n_before_cut(self) -> int:
        """Return the pending tokens before the next cut, or all of them."""
        if self._cuts is None:
            self._cuts = cuts_of(self.tokens, self._is_control)
        n_past, last = self.slot.n_past, len(self.tokens) - 1
        return next((cut for cut in self._cuts if cut > n_past), last) - n_past

    def ends_at_cut(self, n: int) -> bool:
        """Return True if the next `n` tokens end at a cut, or at the end of the prompt."""
        place = self.slot.n_past + n
        return place == len(self.tokens) - 1 or place in (self._cuts or ())

    @property
    def at_image(self) -> bool:
        slot = self._slot
        return bool(self.images) and slot is not None and self.tokens[slot.n_past] < 0

    @property
    def is_restoring(self) -> bool:
        """Return True if it waits for cells that are read from disk."""
        return self._restoring is not None

    def is_evaluated_for(self, tokens: Sequence[int]) -> bool:
        """Return True if a prompt of these tokens needs most of the part that is evaluated now. Any thread may ask."""
        slot = self._slot
        if slot is None:
            return False
        end = min(slot.n_past + slot.backend.n_batch, len(self.tokens) - 1)
        return slot.n_past < end and 2 * common_prefix(self.tokens, tokens) >= slot.n_past + end

    def restore(self, seconds: float, patient: bool) -> int:
        """Read more cells for about so many seconds, and return how many tokens came. `patient`: wait for the files."""
        assert self._restoring is not None
        before = self.slot.n_past
        if self._restoring.advance(seconds, patient):
            self._restoring = None
        return self.slot.n_past - before


def cuts_of(tokens: Sequence[int], is_control: Callable[[int], bool]) -> list[int]:
    """Return the places, ascending, where prompts that begin like this one are likely to differ from it.

    They are the end of its first message and the beginnings of its last ones, by the control tokens that begin and end
    messages. If none of these is near its end, a few tokens before its end are another one.
    """
    last = len(tokens) - 1
    found: list[int] = []
    for place in range(last - 1, max(0, last - SEARCHED), -1):
        if is_control(tokens[place]):
            if found and found[-1] - place <= APART:
                found[-1] = place
            elif len(found) == 2:
                break
            else:
                found.append(place)
    cuts = set(found)
    if last > 2 * LAST_PART and (not found or last - found[0] > LAST_PART):
        cuts.add(last - LAST_PART)
    first = next((place for place in range(APART, min(last, SEARCHED)) if is_control(tokens[place])), 0)
    return sorted({*cuts, first} - {0})
