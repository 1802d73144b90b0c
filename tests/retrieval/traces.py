"""A text that is looked for in every byte of every file, in all the forms that files of rest-local have."""

from pathlib import Path

UNIT = "Q7zK!x9w"
SECRET = UNIT * 12
"""Fifteen characters of it hold a rotation of UNIT, so that any part of it is found."""

_FORMS = ((1, "big"), (2, "big"), (2, "little"), (3, "big"), (3, "little"), (4, "little"), (8, "little"))


def _needles() -> set[bytes]:
    """Return all rotations, in both directions: as text, and as token ids (a byte each) of every width."""
    turned = [UNIT[start:] + UNIT[:start] for start in range(len(UNIT))]
    texts = [way.encode() for text in turned for way in (text, text[::-1])]
    return {b"".join(byte.to_bytes(width, order) for byte in text) for text in texts for width, order in _FORMS}


_NEEDLES = _needles()


def traces(folder: Path) -> list[str]:
    """List the files below a folder that hold some of SECRET."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path.relative_to(folder)) for path in files if _holds(path.read_bytes())]


def _holds(content: bytes) -> bool:
    return any(needle in content for needle in _NEEDLES) or ", ".join(map(str, UNIT.encode())).encode() in content
