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
    "credentials*",
)
"""Names of files that are never read, whatever the case of their letters."""

_RUN = rb"[0-9A-Za-z_-]"
_MIXED = rb"(?=%b{0,40}[0-9])" % _RUN  # random, not words with dashes, as a style sheet or an address has them
_SHAPES = re.compile(
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"
    rb"|\b(?:"
    rb"(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    rb"|AIza%(run)b{35}"
    rb"|GOCSPX-%(run)b{20}"
    rb"|gh[opsur]_[0-9A-Za-z]{36}"
    rb"|github_pat_[0-9A-Za-z_]{40}"
    rb"|glpat-%(run)b{20}"
    rb"|xox[abprs]-[0-9A-Za-z-]{10}"
    rb"|sk-(?:ant-|proj-)?[0-9A-Za-z_]{20}"
    rb"|sk-(?:ant|proj|svcacct|admin|or)-%(mixed)b%(run)b{20}"
    rb"|[rs]k_live_[0-9A-Za-z]{20}"
    rb"|hf_[0-9A-Za-z]{34}"
    rb"|npm_[0-9A-Za-z]{36}"
    rb"|pypi-%(mixed)b%(run)b{40}"
    rb"|eyJ%(run)b{10,300}\.eyJ%(run)b{10,4000}\.%(run)b{20}"  # a JSON web token; bounded: any text is searched
    rb"|Account[Kk]ey=[0-9A-Za-z+/]{40}"
    rb")" % {b"run": _RUN, b"mixed": _MIXED}
)


def secret_name(name: str) -> bool:
    """Whether a file of that name (without directory) is on the deny-list. `id_*` is denied without an extension."""
    name = name.lower()
    return any(fnmatchcase(name, pattern) for pattern in NAMES) or (name.startswith("id_") and "." not in name)


def secret_content(data: bytes) -> bool:
    """Whether anything in a file's bytes is shaped like a key or an access token. O(n)."""
    return _SHAPES.search(data) is not None
