"""`Stream` and `ChatStream` are what callers of `Engine` and `Service` hold: the pieces of an answer
as they come, and its result.

The module knows neither slots nor scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rest_local.chat.tools import AnswerParser
from rest_local.decoding.chat import Chat
from rest_local.decoding.core import RequestState
from rest_local.decoding.results import Statistics, Timings
from rest_local.decoding.stream import Piece, Result
from rest_local.errors import RestLocalError

Advance = Callable[[Callable[[], bool], "float | None"], bool]
"""`advance(until, timeout)` lets the answer go on until `until()` is true; False where `timeout` seconds were over."""


class Stream:
    """The answer to one request while it is made. Iterate it once for its pieces; `result` is complete afterwards.

    A stream of `Engine` goes on only while it is iterated or waited for, in the thread of the caller. One of
    `Service.submit` goes on in the thread of the service, and any thread may hold it. An iteration that is closed ends
    the answer.
    """

    def __init__(self, state: RequestState, advance: Advance, cancel: Callable[[RequestState], None]) -> None:
        self.state = state
        self._advance, self._cancel = advance, cancel
        self._pieces = self._run()

    @property
    def result(self) -> Result:
        """Return what has come so far; it is complete when `done`."""
        return self.state.result

    @property
    def statistics(self) -> Statistics:
        return self.state.statistics

    @property
    def timings(self) -> Timings:
        """Return tokens and times so far, once the prompt is evaluated. Any thread."""
        return self.state.answer.timings

    @property
    def done(self) -> bool:
        return self.state.done

    @property
    def error(self) -> RestLocalError | None:
        """Return the error that ended it, if any."""
        return self.state.error

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces as they come. Raises the error that ended the answer, at the end."""
        return self._pieces

    def poll(self) -> list[Piece]:
        """Return the pieces since the last call, without waiting. If `done` was True before, nothing follows."""
        return self.state.outbox.read()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end of the answer.

        Args:
            timeout: seconds; None waits as long as it takes

        Raises:
            TimeoutError: the answer goes on; it can be waited for again
            RestLocalError: the error that ended the answer
        """
        if not self._advance(lambda: self.done, timeout):
            raise TimeoutError(f"the answer is not done after {timeout} s")
        if self.error:
            raise self.error
        return self.result

    def cancel(self) -> None:
        """End the answer, before the next forward pass. Its text so far stays in `result`."""
        self._cancel(self.state)

    def _run(self) -> Iterator[Piece]:
        try:
            while True:
                done = self.done
                yield from self.poll()
                if done:
                    break
                self._advance(lambda: self.done or bool(self.state.outbox.pieces), None)
        finally:
            if not self.done:
                self.cancel()
        if self.error:
            raise self.error


class ChatStream(Stream):
    """The stream of an answer in a conversation. Pieces hold the text as the model writes it, tool calls included."""

    def __init__(
        self, state: RequestState, advance: Advance, cancel: Callable[[RequestState], None], chat: Chat
    ) -> None:
        super().__init__(state, advance, cancel)
        self._chat = chat

    def parser(self) -> AnswerParser:
        """Return a parser that splits the text of the pieces into reasoning, text and calls while they come."""
        return self._chat.parser()

    @property
    def message(self) -> dict[str, Any]:
        """Return the finished answer in OpenAI's form: role, content, reasoning_content, tool_calls."""
        return self._chat.message(self.result)
