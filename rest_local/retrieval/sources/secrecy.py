"""What looks like a secret: names of files with keys or passwords, and strings in the form of access tokens.

A datastore returns its text, so no secret may enter it. To skip a harmless file is better than to index a key.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

SECRET_NAMES = (
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
"""Names of files that are never read. Upper and lower case do not matter."""

_RUN = rb"[0-9A-Za-z_-]"
_MIXED = rb"(?=%b{0,40}[0-9])" % _RUN  # random, unlike words with dashes in a style sheet or an address
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
    rb"|eyJ%(run)b{10,300}\.eyJ%(run)b{10,4000}\.%(run)b{20}"  # a JSON web token; bounded, because input is arbitrary
    rb"|Account[Kk]ey=[0-9A-Za-z+/]{40}"
    rb")" % {b"run": _RUN, b"mixed": _MIXED}
)


def secret_name(name: str) -> bool:
    """Whether a file name (without directory) is on the deny-list. `id_*` is denied if it has no extension."""
    name = name.lower()
    return any(fnmatchcase(name, pattern) for pattern in SECRET_NAMES) or (name.startswith("id_") and "." not in name)


def secret_content(data: bytes) -> bool:
    """Whether the bytes of a file contain a string in the form of a key or an access token. O(n)."""
    return _SHAPES.search(data) is not None
