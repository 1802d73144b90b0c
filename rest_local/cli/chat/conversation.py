"""A conversation: the system message, the messages, and the files that wait for the next question.

Messages are in OpenAI's form, so they go to `Engine.chat` and into a session file as they are. Knows nothing about
models, terminals and files on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Attachment:
    """A text that is sent with a question. `name`: of the file; empty for the standard input."""

    name: str
    text: str

    def __str__(self) -> str:
        """As it stands in the message: the name, and the text in a code block that nothing in it ends."""
        ticks = max((len(run) for run in re.findall("^`{3,}", self.text, re.MULTILINE)), default=2)
        fence = "`" * (ticks + 1)
        heading = f"{self.name}:\n" if self.name else ""
        return f"{heading}{fence}{PurePath(self.name).suffix[1:]}\n{self.text.rstrip()}\n{fence}"


@dataclass
class Conversation:
    """`messages`: of the user and of the model in turn, without the system message. The last one is the user's while an
    answer is missing.
    """

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)
    images: list[Message] = field(default_factory=list)  # content parts that go with the next question

    @property
    def prompt(self) -> list[Message]:
        """The messages for the model."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    @property
    def question(self) -> str | None:
        """The text of the newest message of the user."""
        return next((text_of(message) for message in reversed(self.messages) if message["role"] == "user"), None)

    @property
    def question_images(self) -> list[Message]:
        """The images of that message."""
        content = next((each["content"] for each in reversed(self.messages) if each["role"] == "user"), None)
        return content[1:] if isinstance(content, list) else []

    def ask(self, text: str) -> None:
        """Add a question, with all that was attached; one that was not answered is replaced."""
        self.take_back()
        whole = with_attachments(text, self.attachments)
        content: str | list[Message] = [{"type": "text", "text": whole}, *self.images] if self.images else whole
        self.messages.append({"role": "user", "content": content})
        self.attachments, self.images = [], []

    def answer(self, message: Message) -> None:
        """Add the model's answer to the newest question."""
        self.messages.append(message)

    def take_back(self) -> bool:
        """Drop a question that has no answer; whether there was one."""
        if not self.messages or self.messages[-1]["role"] != "user":
            return False
        self.messages.pop()
        return True

    def drop_answer(self) -> bool:
        """Drop the newest answer, so that its question waits for another; whether a question waits now."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def undo(self) -> bool:
        """Drop the newest question and its answer; whether there was one."""
        return self.drop_answer() and self.take_back()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages, self.attachments, self.images = [], [], []


def text_of(message: Message) -> str:
    """The text of a message, without its images."""
    content = message["content"]
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def is_content(content: object) -> bool:
    """Whether a message can have this content: a text, or one and images."""
    if not isinstance(content, list):
        return isinstance(content, (str, type(None)))
    return all(
        isinstance(part, dict) and (part.get("type") != "text" or isinstance(part.get("text"), str)) for part in content
    )


def with_attachments(text: str, attachments: Iterable[Attachment]) -> str:
    """A question and its attachments as one message."""
    return "\n\n".join(part for part in (text, *map(str, attachments)) if part.strip())
