"""Damage to files."""

from __future__ import annotations

from pathlib import Path


def overwrite(file: Path, data: bytes) -> None:
    """Writes over the first bytes of a file in place, 3 us. A file that is truncated first, as `write_bytes` does, is
    flushed to the disk when it is closed: 2 ms on ext4.
    """
    with file.open("r+b") as opened:
        opened.write(data)
