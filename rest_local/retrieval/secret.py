"""What looks like a secret: file names that hold keys and passwords, and strings shaped like access tokens.

A datastore gives its text back, so what must not be read must not get in. Better one file too many than one key.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

NAMES = (
    ".env*",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.kdbx",
    "*.keystore",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".npmrc",
    ".netrc",
    "_netrc",
    ".pypirc",
    ".git-credentials",
    ".htpasswd",
    "credentials",
    "credentials.*",
)
"""Names of files that are never read, whatever the case of their letters."""

_SHAPES = re.compile(
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"
    rb"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    rb"|\bAIza[0-9A-Za-z_-]{35}"
    rb"|\bgh[opsur]_[0-9A-Za-z]{36}"
    rb"|\bgithub_pat_[0-9A-Za-z_]{40}"
    rb"|\bglpat-[0-9A-Za-z_-]{20}"
    rb"|\bxox[abprs]-[0-9A-Za-z-]{10}"
    rb"|\bsk-(?:ant-|proj-)?[0-9A-Za-z_]{20}"
    rb"|\bsk_live_[0-9A-Za-z]{20}"
    rb"|\bhf_[0-9A-Za-z]{34}"
    rb"|\bnpm_[0-9A-Za-z]{36}"
)


def secret_name(name: str) -> bool:
    """Whether a file of that name (without directory) is on the deny-list. `id_*` is denied without an extension."""
    name = name.lower()
    return any(fnmatchcase(name, pattern) for pattern in NAMES) or (name.startswith("id_") and "." not in name)


def secret_content(data: bytes) -> bool:
    """Whether anything in a file's bytes is shaped like a key or an access token. O(n)."""
    return _SHAPES.search(data) is not None
