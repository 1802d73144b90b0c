"""A conversation and its session on the disk.

Messages are in OpenAI's form, so they go to `Engine.chat` and into a session file as they are. A session NAME has

- `NAME.json`, written whole after each answer: the format, the model's name, the system message, the messages.
- `NAME.lock`, which the one process that has the session open has locked.

Its KV cells are kept like those of a server (`kv_cache.sessions`).
A damaged JSON file is refused, because going on would overwrite it. The module knows no engine and no terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from rest_local.cli.terminal import warn
from rest_local.errors import InputInvalid, OptionError
from rest_local.stop import Closing

Message = dict[str, Any]


@dataclass(frozen=True)
class Attachment:
    """A text that is sent with a question. `name` is its file name, or empty for the standard input."""

    name: str
    text: str

    def __str__(self) -> str:
        """Return the name, and the text in a code block that nothing in it can end."""
        from rest_local.editing.edit import fence_for

        fence = fence_for(self.text)
        heading = f"{self.name}:\n" if self.name else ""
        return f"{heading}{fence}{PurePath(self.name).suffix[1:]}\n{self.text.rstrip()}\n{fence}"


@dataclass
class Conversation:
    """The messages of user and model, without the system's. The last is the user's while the answer is missing."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)
    images: list[Message] = field(default_factory=list)  # They are content parts of the next question.

    @property
    def prompt(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    @property
    def question(self) -> str | None:
        return next((text_of(message) for message in reversed(self.messages) if message["role"] == "user"), None)

    def ask(self, text: str) -> None:
        """Add a question with all attachments. It replaces a question that was not answered."""
        self.take_back()
        whole = with_attachments(text, self.attachments)
        content: str | list[Message] = [{"type": "text", "text": whole}, *self.images] if self.images else whole
        self.messages.append({"role": "user", "content": content})
        self.attachments, self.images = [], []

    def take_back(self) -> bool:
        """Drop a question that has no answer. Return True if there was one."""
        if not self.messages or self.messages[-1]["role"] != "user":
            return False
        self.messages.pop()
        return True

    def drop_answer(self) -> bool:
        """Drop the newest answer, so that its question waits for another. Return True if a question waits now."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def undo(self) -> bool:
        """Drop the newest question and its answer. Return True if there was one."""
        return self.drop_answer() and self.take_back()

    def clear(self) -> None:
        self.messages, self.attachments, self.images = [], [], []


def text_of(message: Message) -> str:
    content = message["content"]
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def is_content(content: object) -> bool:
    """Return True if a message can have this content: a text, or one with images."""
    if not isinstance(content, list):
        return isinstance(content, (str, type(None)))
    return all(
        isinstance(part, dict) and (part.get("type") != "text" or isinstance(part.get("text"), str)) for part in content
    )


def with_attachments(text: str, attachments: Iterable[Attachment]) -> str:
    """Join a question and its attachments to one message."""
    return "\n\n".join(part for part in (text, *map(str, attachments)) if part.strip())


FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_ROLES = ("user", "assistant", "system", "tool")


def session_names() -> list[str]:
    return _names("*.json")


def forget_sessions() -> None:
    """Delete all sessions and leftovers of killed processes. Raises OSError, and InputInvalid if one is open."""
    from rest_local.paths import delete_unfinished

    for name in {*_names("*.json"), *_names("*.cells")}:
        with NamedSession(name) as session:
            session.path.unlink(missing_ok=True)
            session.path.with_suffix(".cells").unlink(missing_ok=True)  # An early build kept the KV cells there.
    delete_unfinished(_home())


def _names(pattern: str) -> list[str]:
    return sorted(path.stem for path in _home().glob(pattern) if not path.name.startswith("."))


class NamedSession(Closing):
    """An open session, which no other process can open until `close`.

    Raises OptionError for a name that is not a plain word, InputInvalid if another process has it open, OSError.
    """

    def __init__(self, name: str) -> None:
        from filelock import FileLock, Timeout

        if not _NAME.fullmatch(name):
            raise OptionError(f"session {name!r}: give a name of letters, digits, '-', '_' and '.'")
        self.name = name
        self.path = _home() / f"{name}.json"
        self._lock = FileLock(self.path.with_suffix(".lock"), timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            cause = "open in another process; close it there, or give another name"
            raise InputInvalid("session", name, cause) from None

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def read(self) -> Conversation:
        """Read the conversation, or return an empty one if there is no file. Raises InputInvalid."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Conversation()
        except OSError as error:
            raise InputInvalid("session", self.path, error.strerror or str(error)) from error
        except (ValueError, RecursionError) as error:
            raise InputInvalid("session", self.path, f"not JSON ({error}); repair it, or move it away") from error
        if problem := _problem(data):
            raise InputInvalid("session", self.path, f"{problem}; repair it, or move it away")
        return Conversation(system=data.get("system"), messages=data["messages"])

    def write(self, conversation: Conversation, model: str) -> None:
        """Replace the file. A failure prints a warning, and the conversation goes on."""
        from rest_local.paths import write_atomically

        held = {"system": conversation.system, "messages": conversation.messages}
        text = json.dumps({"format": FORMAT, "model": model, **held}, ensure_ascii=False, indent=1) + "\n"
        try:
            write_atomically(self.path, text.encode("utf-8", "replace"), durable=True)
        except OSError as error:
            warn(f"session {self.name} is not saved: {self.path}: {error.strerror or error}")

    def close(self) -> None:
        """Let other processes open it. A second call does nothing."""
        self._lock.release()


def _problem(data: Any) -> str:
    """Return what is wrong with the content of a session file, or an empty string."""
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        return "not a session"
    if data.get("format") != FORMAT:
        return f"format {data.get('format')!r}, this version reads {FORMAT}"
    if not isinstance(data.get("system"), (str, type(None))):
        return "the system message is not a text"
    for number, message in enumerate(data["messages"], 1):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return f"message {number} has no role"
        if not is_content(message.get("content")):
            return f"the content of message {number} is not a text"
    return ""


def _home() -> Path:
    """Return the folder of sessions. Raises OSError if it cannot be made."""
    from rest_local.paths import data_dir

    path = data_dir() / "sessions"
    path.mkdir(mode=0o700, exist_ok=True)
    return path
