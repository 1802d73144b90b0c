"""Define sources of texts, count the files that they skip, and recognise secrets."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

from rest_local.errors import OptionError, printable
from rest_local.retrieval.documents import FileState, Text

UNWANTED = "not a wanted kind of file"
_NAMED = 20
_KINDS, _KINDS_SHOWN, _KIND_LENGTH = 100, 8, 20


@dataclass(slots=True)
class Skipped:
    """The files that a walk skipped. Its size does not depend on their number."""

    counts: Counter[str] = field(default_factory=Counter)  # reason -> files
    kinds: Counter[str] = field(default_factory=Counter)  # extension -> unwanted files; `other` after 100 extensions
    secrets: list[str] = field(default_factory=list)  # first names of files that looked like secrets

    def add(self, reason: str, name: str = "") -> None:
        self.counts[reason] += 1
        if reason == UNWANTED:
            kind = printable(os.path.splitext(name)[1].lower()[:_KIND_LENGTH]) or "no extension"
            self.kinds[kind if kind in self.kinds or len(self.kinds) < _KINDS else "other"] += 1
        elif reason == "secret" and len(self.secrets) < _NAMED:
            self.secrets.append(printable(name))

    def summary(self) -> str:
        """Return one line such as "12 binary, 9 not a wanted kind of file (6 .json, 3 .ipynb)", or "nothing"."""
        parts = [f"{count} {reason}" for reason, count in self.counts.most_common()]
        kinds = [f"{count} {kind}" for kind, count in self.kinds.most_common(_KINDS_SHOWN)]
        kinds += ["..."] if len(self.kinds) > _KINDS_SHOWN else []
        parts = [f"{part} ({', '.join(kinds)})" if kinds and part.endswith(UNWANTED) else part for part in parts]
        return ", ".join(parts) or "nothing"


# Files with these names are never read. Upper and lower case do not matter.
SECRET_NAMES = frozenset(
    """
    .env* *.pem *.key *.p12 *.pfx *.kdbx *.keystore id_rsa* id_dsa* id_ecdsa* id_ed25519* .npmrc .netrc _netrc .pypirc
    .git-credentials .htpasswd credentials*
    """.split()  # noqa: SIM905  a list literal would be one name a line
)

_RUN = rb"[0-9A-Za-z_-]"
_MIXED = rb"(?=%b{0,40}[0-9])" % _RUN  # a digit tells keys from words with dashes in a style sheet or an address
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
    """Return True if a file name (without directory) is denied. `id_*` is denied if it has no extension."""
    name = name.lower()
    return any(fnmatchcase(name, pattern) for pattern in SECRET_NAMES) or (name.startswith("id_") and "." not in name)


def secret_content(data: bytes) -> bool:
    """Return True if the bytes contain a string in the form of a key or an access token. O(n)."""
    return _SHAPES.search(data) is not None


# Returns True if the text of this name, size in bytes and time of change (ns, never 0) is known, so it is not read.
Unchanged = Callable[[str, int, int], bool]

AnySource = TypeVar("AnySource", bound="Source")


@dataclass(frozen=True, slots=True)
class Reading:
    """The way to read sources. `skipped` counts what is left out."""

    skipped: Skipped
    unchanged: Unchanged | None = None
    only: Collection[str] | None = None  # absolute paths: a walk looks at these alone
    looked_at: Callable[[int], None] = lambda size: None  # called with the size of each file, read or unchanged

    def text(self, name: str, text: str, mark: int, *, allow_secrets: bool = False) -> Iterator[Text]:
        """Yield the text of a row of a file, or nothing if it is skipped. `mark` is the file's time of change, or
        another number that is the same only while the text is the same, or 0.
        """
        data = text.encode("utf-8", "surrogatepass")
        reason = "empty" if not data else "binary" if "\0" in text else ""
        if not reason and mark and self.unchanged is not None and self.unchanged(name, len(data), mark):
            yield Text(name, None, FileState(name, len(data), mark, b""))
            return
        if not reason and not allow_secrets and secret_content(data):
            reason = "secret"
        if reason:
            self.skipped.add(reason, name)
        else:
            yield Text(name, text, FileState(name, len(data), mark, hashlib.sha256(data).digest()))


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """A source of texts. `kind` is its name in a recipe; a `repeatable` one can be read again."""

    kind: ClassVar[str] = ""
    repeatable: ClassVar[bool] = True

    @abstractmethod
    def texts(self, reading: Reading) -> Iterator[Text]:
        """Yield the texts.

        Raises:
            InputInvalid, OptionError: the source cannot be read. They come before the first text.
        """

    @abstractmethod
    def about(self) -> str:
        """Describe the source in a few words, for a person."""

    def prepared(self) -> Source:
        """Return the source to record: absolute paths, and the present meaning of a moving name.

        Raises:
            InputInvalid, OptionError: as of `texts`
        """
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and all fields, JSON-ready."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def made(kind: type[AnySource], raw: Mapping[str, Any]) -> AnySource:
    """Make a source from the fields of a recipe. Raises OptionError for a wrong, missing or unknown one."""
    known = {field.name: str(field.type) for field in fields(kind)}
    for name in raw.keys() - known.keys() - {"kind"}:
        way = "correct it, or update rest-local if the recipe is newer"
        raise OptionError(f"source of kind {kind.kind!r}: unknown field {name!r}; {way}; known: {', '.join(known)}")
    values = {name: _checked(kind.kind, name, known[name], raw[name]) for name in known.keys() & raw.keys()}
    try:
        return kind(**values)
    except TypeError as error:
        raise OptionError(f"source of kind {kind.kind!r}: {str(error).partition(' ')[2]}") from error


def _checked(kind: str, name: str, type_name: str, value: Any) -> Any:
    if type_name.startswith("tuple"):
        right = isinstance(value, (list, tuple)) and all(type(item) is str for item in value)
        value = tuple(value) if right else value
    else:
        right = type(value).__name__ == type_name  # isinstance takes a bool for an int
    if not right:
        wanted = "a list of strings" if type_name.startswith("tuple") else f"of type {type_name}"
        raise OptionError(f"source of kind {kind!r}: {name} is {str(value)[:40]!r}, not {wanted}")
    return value
