"""Whose text a slot holds, for files on disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """`id`: only its texts are restored for it; empty where clients may know of each other's. `named`: a session with a
    name, whose text is kept however short.
    """

    id: str = ""
    named: bool = False
