"""Named sessions: a conversation as plain JSON in the data directory, and the cells of its evaluation next to it.

- `NAME.json` is written whole after each answer: the format, the model's name, the system message, the messages.
- `NAME.cells` is what the KV cache held when the session was left (`Engine.save_cells`). It may be deleted; then the
  conversation is evaluated again.
- One process at a time has a session open (`NAME.lock`).

A damaged JSON file is refused, because going on would overwrite it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rest_local.cli.chat.conversation import Conversation, is_content
from rest_local.cli.messages import warn
from rest_local.errors import InputInvalid, OptionError

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_ROLES = ("user", "assistant", "system", "tool")


def session_names() -> list[str]:
    """The names of all sessions, sorted."""
    return _names("*.json")


def forget_sessions() -> None:
    """Delete all sessions, and what killed processes left of them. Raises InputInvalid where another process has one
    open, OSError.
    """
    from rest_local.paths import delete_unfinished

    for name in {*_names("*.json"), *_names("*.cells"), *_names("*.cells.about")}:
        with NamedSession(name.removesuffix(".cells")) as session:
            for path in (session.path, session.cells, session.cells.with_name(f"{session.cells.name}.about")):
                path.unlink(missing_ok=True)
    delete_unfinished(_home())


def _names(pattern: str) -> list[str]:
    return sorted(path.stem for path in _home().glob(pattern) if not path.name.startswith("."))


class NamedSession:
    """One session, open: no other process can open it until `close`. Raises OptionError for a name that is not a plain
    word, InputInvalid where another process has it open, OSError.
    """

    def __init__(self, name: str) -> None:
        from filelock import FileLock, Timeout

        if not _NAME.fullmatch(name):
            raise OptionError(f"session {name!r}: give a name of letters, digits, '-', '_' and '.'")
        self.name = name
        self.path = _home() / f"{name}.json"
        self.cells = self.path.with_suffix(".cells")
        self._lock = FileLock(self.path.with_suffix(".lock"), timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            cause = "open in another process; close it there, or give another name"
            raise InputInvalid("session", name, cause) from None

    @property
    def exists(self) -> bool:
        """Whether it was written before."""
        return self.path.exists()

    def read(self) -> Conversation:
        """The conversation, empty where there is none. Raises InputInvalid."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Conversation()
        except OSError as error:
            raise InputInvalid("session", self.path, error.strerror or str(error)) from error
        except (ValueError, RecursionError) as error:
            raise InputInvalid("session", self.path, f"no JSON ({error}); repair it, or move it away") from error
        if problem := _problem(data):
            raise InputInvalid("session", self.path, f"{problem}; repair it, or move it away")
        return Conversation(system=data.get("system"), messages=data["messages"])

    def write(self, conversation: Conversation, model: str) -> None:
        """Replace the file. A failure costs a warning: the conversation goes on."""
        from rest_local.paths import write_atomically

        data = {
            "format": FORMAT, "model": model, "system": conversation.system, "messages": conversation.messages,
        }  # fmt: skip
        text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
        try:
            write_atomically(self.path, text.encode("utf-8", "replace"), durable=True)
        except OSError as error:
            warn(f"session {self.name} is not saved: {self.path}: {error.strerror or error}")

    def close(self) -> None:
        """Let other processes open it; again does nothing."""
        self._lock.release()

    def __enter__(self) -> NamedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _problem(data: Any) -> str:
    """What is wrong with the content of a session file; empty where nothing is."""
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
    """Raises OSError where it cannot be made."""
    from rest_local.paths import data_dir

    path = data_dir() / "sessions"
    path.mkdir(mode=0o700, exist_ok=True)
    return path
