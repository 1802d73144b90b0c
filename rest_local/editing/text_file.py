"""Read a text file with line feeds as line ends, and replace it as a whole.

Contract:

- UTF-8 only, with or without a byte order mark. Other text is refused, not guessed.
- The byte order mark, the line ends and the presence of a last line feed stay unchanged. In a file with mixed line ends
  an unchanged line keeps its own, and a new line gets the most common one.
- A file is replaced in one step: a reader, or a crash, finds the old or the new content. Permissions, owner and
  extended attributes stay. A symbolic link stays, its target is replaced.

Knows nothing about models.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rest_local.errors import InputInvalid

BOM = b"\xef\xbb\xbf"
_LINE = re.compile(r"([^\r\n]*(?:\r(?!\n)[^\r\n]*)*)(\r\n|\n|\Z)")  # A lone carriage return is a part of its line.


@dataclass(frozen=True)
class TextFile:
    """A file as it was read. `path` is as named; `target` is where symbolic links lead."""

    path: Path
    target: Path
    content: bytes
    text: str  # has no byte order mark, and line feeds as line ends

    @classmethod
    def read(cls, path: Path) -> TextFile:
        """Read a file. Raises InputInvalid if it is not a regular, writable file of UTF-8 text."""
        try:
            target = path.resolve(strict=True)
            if not stat.S_ISREG(target.stat().st_mode):
                raise InputInvalid("file", path, "is a directory" if target.is_dir() else "is not a regular file")
            content = target.read_bytes()
        except RuntimeError as error:  # Python 3.10 to 3.12 raise it for a loop of symbolic links.
            raise InputInvalid("file", path, "is a loop of symbolic links") from error
        except OSError as error:
            raise InputInvalid("file", path, error.strerror or str(error)) from error
        text = _decoded(path, content)
        if not os.access(target, os.W_OK) or not os.access(target.parent, os.W_OK):
            raise InputInvalid("file", path, "cannot be written (permissions); nothing was done")
        return cls(path, target, content, "".join(f"{line}\n" if end else line for line, end in lines_of(text)))

    def with_text(self, text: str) -> bytes:
        """Return the bytes of the file with another text, whose lines end in line feeds. The last line feed stays, or
        stays away; an empty file gets one. Raises UnicodeEncodeError for lone surrogates.
        """
        old = lines_of(self.content.removeprefix(BOM).decode("utf-8"))
        new = text.removesuffix("\n").split("\n") if text else []
        ends = _line_ends(old, new)
        if new and old and not old[-1][1]:
            ends[-1] = ""
        joined = "".join(line + end for line, end in zip(new, ends, strict=True))
        return (BOM if self.content.startswith(BOM) else b"") + joined.encode("utf-8")

    def is_unchanged(self) -> bool:
        """Return True if the path still leads to the bytes that were read."""
        try:
            return self.path.resolve(strict=True) == self.target and self.target.read_bytes() == self.content
        except (OSError, RuntimeError):
            return False


def lines_of(text: str) -> list[tuple[str, str]]:
    """Return the lines of a text, each with its end: LF or CR LF, or nothing at the end of the text."""
    return [(found[1], found[2]) for found in _LINE.finditer(text) if found[0]]


def _line_ends(old: list[tuple[str, str]], new: list[str]) -> list[str]:
    """Return the end of each new line: that of the same old line, else the most common one, else a line feed."""
    counts = Counter(end for _, end in old if end)
    usual = max(("\n", "\r\n"), key=lambda end: counts[end])
    ends = [usual] * len(new)
    if len(counts) > 1:
        from difflib import SequenceMatcher

        matcher = SequenceMatcher(None, [line for line, _ in old], new)
        for begin_old, begin_new, count in matcher.get_matching_blocks():
            for place in range(count):
                ends[begin_new + place] = old[begin_old + place][1] or usual
    return ends


def _decoded(path: Path, content: bytes) -> str:
    try:
        text = content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        place = error.start + (len(BOM) if content.startswith(BOM) else 0)
        raise InputInvalid("file", path, f"is not UTF-8 text at byte {place}; convert it to UTF-8 first") from error
    if "\0" in text:
        raise InputInvalid("file", path, "holds a NUL character, so it is not text")
    return text


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file, whose permissions, owner and extended attributes stay. Content and name are synced
    (`paths.replacing`). Raises InputInvalid; then the file is unchanged.
    """
    from rest_local.paths import replacing  # --help does not need it

    try:
        with replacing(path, durable=True) as file:
            file.write(content)
            _copy_attributes(path, Path(file.name))
    except OSError as error:
        cause = error.strerror or str(error)
        raise InputInvalid("file", path, f"cannot be written: {cause}; it is as it was") from error


def _copy_attributes(source: Path, target: Path) -> None:
    """Copy the owner first, because its change clears bits of the mode. Forbidden changes are left out."""
    status = source.stat()
    for owner, group in ((status.st_uid, -1), (-1, status.st_gid)):
        with contextlib.suppress(PermissionError):
            os.chown(target, owner, group)
    if hasattr(os, "listxattr"):  # macOS lacks it; access control lists are among them
        for name in os.listxattr(source):
            with contextlib.suppress(OSError):  # some belong to the system
                os.setxattr(target, name, os.getxattr(source, name))
    os.chmod(target, stat.S_IMODE(status.st_mode))
