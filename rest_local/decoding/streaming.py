"""What a caller of `Engine.generate` and `Engine.chat` holds: the pieces of an answer as they come, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rest_local.decoding.chat import Chat
from rest_local.decoding.generation import Statistics
from rest_local.decoding.job import Job
from rest_local.decoding.stream import Piece, Result

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine


class Stream:
    """Iterate it for the pieces of the answer. `result` holds what has come so far and is complete afterwards.

    The iterator does the forward passes, in the thread of the caller. Raises what the request ended with.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self.job = engine, job
        self._pieces = self._run()

    @property
    def result(self) -> Result:
        return self.job.result

    @property
    def statistics(self) -> Statistics:
        return self.job.answer.statistics

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End the answer now. Its text so far stays in `result`."""
        self._engine.cancel(self.job)

    def _run(self) -> Iterator[Piece]:
        try:
            while True:
                yield from self.job.take()
                if self.job.done:
                    yield from self.job.take()
                    break
                self._engine.step()
        finally:
            self.cancel()
        if self.job.error:
            raise self.job.error


class ChatStream(Stream):
    """The stream of an answer in a conversation. Pieces hold the text as the model writes it, tool calls included."""

    def __init__(self, engine: Engine, job: Job, chat: Chat) -> None:
        super().__init__(engine, job)
        self._chat = chat

    @property
    def message(self) -> dict[str, Any]:
        """The finished answer in OpenAI's form, to append to the messages: role, content, reasoning_content,
        tool_calls.
        """
        return self._chat.message(self.result)
