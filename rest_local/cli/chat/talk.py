"""A running chat: the engine, the conversation, the settings, and how answers are shown and kept.

`ask` and `retry` answer, and `commands` does the rest. Ctrl-C stops an answer, and its text so far stays. A question
that was refused, or stopped before the first token, waits for `/retry` and is replaced by the next one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from rest_local.cli import interrupt
from rest_local.cli.chat.conversation import Conversation, NamedSession, text_of
from rest_local.cli.chat.display import Display, DraftsDisplay, Plain, TerminalDisplay
from rest_local.cli.chat.prompt import is_dumb, quiet_keyboard
from rest_local.cli.terminal import REPEATS, counted, fitted, line_of
from rest_local.errors import OptionError
from rest_local.stop import Closing

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine, Result
    from rest_local.decoding.streaming import ChatStream

UNLIMITED = 2**31 - 1  # The answer ends by itself, or when the context is full.
LOOP_CHECK_TOKENS = 32


@dataclass(frozen=True)
class TalkOptions:
    """The settings that `/set` and `/drafts` change. `sampling` has the fields of `Sampling` that were set here."""

    sampling: Mapping[str, Any]
    tokens: int  # -1 means no limit.
    stop: tuple[str, ...] = ()
    drafts: bool = False


class Talk(Closing):
    """A running chat. Errors do not end an `interactive` one."""

    def __init__(
        self,
        engine: Engine,
        settings: TalkOptions,
        *,
        as_json: bool = False,
        quiet: bool = False,
        interactive: bool = False,
    ) -> None:
        self.engine, self.settings = engine, settings
        self.conversation = Conversation()
        self.session: NamedSession | None = None
        self.interactive = interactive
        self._as_json, self._quiet = as_json, quiet
        self._n_cached = 0  # The KV cache holds so many characters of the conversation.

    # Answers

    def ask(self, text: str) -> bool:
        """Answer a question, and return True if that was stopped. After an error the question waits."""
        self.conversation.ask(text)
        return self._answer()

    def attach_images(self, images: Sequence[bytes]) -> None:
        """Send images with the next question. Raises OptionError without a projector, and for data that is no image."""
        if not images:
            return
        from rest_local.chat.images import part_of
        from rest_local.decoding.decoder import NO_PROJECTOR_HERE

        projector = self.engine.projector
        if projector is None:
            raise OptionError(NO_PROJECTOR_HERE)
        for data in images:
            projector.image(data)
        self.conversation.images += map(part_of, images)

    def retry(self) -> bool:
        """Answer the newest or waiting question again. Raises OptionError if there is none."""
        before = list(self.conversation.messages)
        if not self.conversation.drop_answer():
            raise OptionError("there is no question yet")
        try:
            return self._answer()
        finally:
            if self.conversation.messages[-1]["role"] == "user":  # No other answer came, so the old one stays.
                self.conversation.messages = before

    def _answer(self) -> bool:
        display = self._display()
        with quiet_keyboard(prompts=self.interactive):
            display.wait(max(self._n_characters() - self._n_cached, 0))
            try:
                stream = self.engine.chat(
                    self.conversation.prompt,
                    max_tokens=UNLIMITED if self.settings.tokens < 0 else self.settings.tokens,
                    sampling=self.engine.sampling(**self.settings.sampling),
                    stop=self.settings.stop,
                    session=self.session.name if self.session else None,
                )
            except BaseException as error:
                display.finish([])
                if not isinstance(error, KeyboardInterrupt):
                    raise
                interrupt.reset()
                note("stopped")
                return True
            stopped = _show(stream, display)
        message = stream.message
        if stream.result.tokens:
            self._keep(stream.result, message)
        if self._as_json and (stream.result.tokens or not stopped):
            click.echo(json.dumps({**stream.result.to_dict(), "message": message}, ensure_ascii=False))
        elif not (self._as_json or stopped or message.get("content") or message.get("tool_calls")):
            what = "reasoned and gave no answer" if message.get("reasoning_content") else "gave an empty answer"
            note(f"the model {what}" + ("; /retry asks for another one" if self.interactive else ""))
        return stopped

    def _n_characters(self) -> int:
        return sum(len(text_of(message)) for message in self.conversation.prompt)

    def _display(self) -> Display:
        """Return the display of the next answer."""
        if self._as_json:
            return Display()
        if not sys.stdout.isatty() or is_dumb():
            return Plain()
        colours = not os.environ.get("NO_COLOR")
        if self.settings.drafts:
            return DraftsDisplay(self.engine, colours)
        return TerminalDisplay(colours)

    def _keep(self, result: Result, message: dict[str, object]) -> None:
        self.conversation.messages.append(message)
        self._n_cached = self._n_characters()
        self.write()
        if self._as_json:
            return
        if result.finish_reason == "length" and not self._quiet:
            full = not 0 <= self.settings.tokens <= result.timings.predicted_tokens
            way_out = "the context is full; /clear empties it" if full else "-n or /set tokens allows more"
            note(f"the answer was cut off: {way_out}")
        if not self._quiet and (self.interactive or sys.stderr.isatty()):
            note(f"[{line_of(self.engine, result)}]")

    # Sessions

    def resume(self, session: NamedSession, conversation: Conversation) -> None:
        """Go on with a session that holds this conversation, and close it in the end."""
        self.leave_session()
        self.session, self.conversation = session, conversation
        if not conversation.messages:
            return
        self._n_cached = 0
        if self.interactive and not self._as_json:
            note(f"session {session.name}: {counted(len(conversation.messages), 'message')}")

    def save_as(self, session: NamedSession) -> None:
        """Keep the conversation under another name from now on, in place of the one there."""
        self.leave_session()
        self.session = session
        self.write()

    def write(self) -> None:
        if self.session is not None:
            self.session.write(self.conversation, self.engine.model.name)

    def leave_session(self) -> None:
        """Let other processes have the session."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Leave the session and close the engine."""
        try:
            self.leave_session()
        finally:
            self.engine.close()


def _show(stream: ChatStream, display: Display) -> bool:
    """Show an answer while it comes, until it ends or Ctrl-C. Return True if it was stopped."""
    parser, fed, stopped = stream.parser(), 0, False
    looked_at = 0  # The number of tokens at the last look for a loop, or -1 once one was found.
    try:
        for piece in stream:
            fed += len(piece.text)
            display.show(piece, parser.feed(piece.text))
            if 0 <= looked_at <= len(stream.result.tokens) - LOOP_CHECK_TOKENS:
                looked_at = -1 if stream.result.loop else len(stream.result.tokens)
                if looked_at < 0:
                    note("\n" * sys.stdout.isatty() + f"[{REPEATS}; Ctrl-C stops it]")
    except KeyboardInterrupt:
        interrupt.reset()
        stopped = True
        stream.cancel()
    finally:  # Text that came before an error is shown as well.
        result = stream.result
        display.finish([*parser.feed(result.text[fed:]), *parser.finish(cut=result.cut)])
    return stopped


def note(text: str) -> None:
    """Print a note about the chat on stderr, broken between words, and dim at a terminal with colours."""
    sys.stdout.flush()
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty()
    text = "\n".join(fitted(line, sys.stderr) for line in text.split("\n"))
    click.echo(text if plain else click.style(text, dim=True), err=True)
