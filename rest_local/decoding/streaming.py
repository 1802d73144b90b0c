"""What a caller of `Engine.generate` and `Engine.chat` holds: the pieces of an answer as they come, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rest_local.decoding.chat import Chat
from rest_local.decoding.counts import Statistics
from rest_local.decoding.sequence import Sequence
from rest_local.decoding.stream import Piece, Result

if TYPE_CHECKING:
    from rest_local.decoding.core import EngineCore


class Stream:
    """Iterate it for the pieces of the answer. `result` holds what has come so far and is complete afterwards.

    The iterator does the forward passes, in the thread of the caller. Raises what the request ended with.
    """

    def __init__(self, core: EngineCore, sequence: Sequence) -> None:
        self._core, self.sequence = core, sequence
        self._pieces = self._run()

    @property
    def result(self) -> Result:
        return self.sequence.result

    @property
    def statistics(self) -> Statistics:
        return self.sequence.statistics

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End the answer now. Its text so far stays in `result`."""
        self._core.cancel(self.sequence)

    def _run(self) -> Iterator[Piece]:
        try:
            while True:
                yield from self.sequence.read()
                if self.sequence.done:
                    yield from self.sequence.read()
                    break
                self._core.step()
        finally:
            self.cancel()
        if self.sequence.error:
            raise self.sequence.error


class ChatStream(Stream):
    """The stream of an answer in a conversation. Pieces hold the text as the model writes it, tool calls included."""

    def __init__(self, core: EngineCore, sequence: Sequence, chat: Chat) -> None:
        super().__init__(core, sequence)
        self._chat = chat

    @property
    def message(self) -> dict[str, Any]:
        """The finished answer in OpenAI's form, to append to the messages: role, content, reasoning_content,
        tool_calls.
        """
        return self._chat.message(self.result)
