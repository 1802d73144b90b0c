"""Move a datastore between machines as one checksummed file. docs/FORMAT.md has the format."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, BinaryIO

from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreExists
from rest_local.paths import replacing
from rest_local.retrieval.building.build import commit, write_parts
from rest_local.retrieval.files import FOLDER, Files, locked, unwritable
from rest_local.retrieval.format import MANIFEST, FileEntry, Manifest, file_name, sealed, unsealed
from rest_local.retrieval.home import MAX_MANIFEST, datastore_path, folder, indexes, manifests, read_manifest
from rest_local.retrieval.maintenance.checking import segment_faults
from rest_local.retrieval.staging import IMPORTING, Staged, clear_folder, writing

_ATTEMPTS = 5
_KEPT = ("kind", "description")  # the fields of a recipe without its paths
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_LOCK_S = 1.0  # another import may lock the new directory for so long, as one of a killed import


@dataclass(frozen=True)
class Moved:
    """The result of an export or import."""

    path: Path
    manifests: tuple[Manifest, ...]  # the datastore's own index first
    bytes: int  # size of the export
    also: tuple[str, ...] = ()  # names of vocabularies that the datastore had before and keeps

    @property
    def tokens(self) -> int:
        return sum(manifest.tokens for manifest in self.manifests)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "tokens": self.tokens,
            "vocabularies": [manifest.vocabulary.name for manifest in self.manifests],
            "kept": list(self.also),
        }


def export(path: Path, directories: Sequence[Path], output: BinaryIO, *, recipe: bool = True) -> Moved:
    """Write these indexes of the datastore at `path` to `output`, which may be a pipe. `recipe` includes the recorded
    paths and the model; names of documents are always in it.

    Takes 4 MB of memory, needs no lock, and exports the commit that it found even if there is a new one meanwhile.
    Raises DatastoreCorrupt if a file does not fit its checksum (then `output` has no end, and no import takes it), and
    OSError from `output`.
    """
    with contextlib.ExitStack() as stack:
        held = [_opened(directory, stack) for directory in directories]
        found = tuple(
            changed(one, recipe={key: value for key, value in one.recipe.items() if recipe or key in _KEPT})
            for one, _ in held
        )
        folders = ["", *(folder(path, manifest.vocabulary.hash).name for manifest in found[1:])]
        content = [manifest.to_bytes() for manifest in found]
        writer = Writer(output)
        parts = [{"folder": where, "manifest": len(data)} for where, data in zip(folders, content, strict=True)]
        name = Path(os.path.abspath(path)).name.lstrip(".") or ROOT
        writer.add(HEAD, sealed({"magic": MAGIC, "format": 1, "name": name, "indexes": parts}))
        for where, manifest, data, (_, opened) in zip(folders, found, content, held, strict=True):
            writer.add(member(where, MANIFEST), data)
            for name, wanted in manifest.files.items():
                writer.copy(member(where, name), opened[name], wanted, path / where / name)
        writer.end()
        return Moved(path, found, writer.written)


def export_file(
    path: Path, directories: Sequence[Path], file: Path, *, recipe: bool = True, overwrite: bool = False
) -> Moved:
    """Export to a file, which appears as a whole when it is durable. Raises DatastoreError if it cannot be written, and
    if it exists without `overwrite`.
    """
    if not overwrite and os.path.lexists(file):
        raise DatastoreError(f"export {file}: exists already; replace it (`replace`) or give another file")
    try:
        with replacing(file, durable=True) as output:
            return export(path, directories, output, recipe=recipe)
    except OSError as error:
        raise DatastoreError(f"export {file}: cannot be written: {error.strerror or error}") from error


def import_datastore(
    source: BinaryIO,
    name: str | os.PathLike[str] | None = None,
    *,
    replace: bool = False,
    files: Files | None = None,
    label: str = "",
) -> Moved:
    """Make the datastore that was exported to `source`, perhaps a pipe. `name` is a name or path; None keeps its own.

    Everything is read, compared with its checksums and looked at as by `checking` before anything becomes visible. A
    new datastore appears as a whole. `replace` replaces the index for the same vocabulary, in one commit each; indexes
    for other vocabularies stay. Errors call the source `label`.

    Raises OptionError for a name that is none, DatastoreExists, DatastoreUnwritable, and DatastoreError if the source
    is damaged, ends early or is no export. Then nothing has changed.
    """
    reader = Reader(source, label or "from the standard input")
    old_name, parts = reader.head()
    path = Path(os.path.realpath(datastore_path(old_name if name is None else name)))
    if indexes(path) and not replace:
        raise DatastoreExists(path, "each of its own")
    files = files or Files()
    with _workplace(path.parent, files) as place:
        received = [_receive(reader, place.path, where, size, files) for where, size in parts]
        reader.end()
        _check(received, reader)
        found = tuple(manifest for _, manifest in received)
        if os.path.lexists(path):
            return Moved(path, found, reader.read, _put_in(path, received, replace, files))
        _publish(place, path, received, files)
    return Moved(path, found, reader.read)


@dataclass
class _Place:
    """The directory in which an import is put together. It is deleted unless it is `kept`."""

    path: Path
    kept: bool = False


# The directory of an index in the place, and its manifest with new names of the segments.
_Received = tuple[Path, Manifest]


@contextlib.contextmanager
def _workplace(parent: Path, files: Files) -> Iterator[_Place]:
    """Yield a locked directory next to the datastore. Delete it at the end unless kept, and those of killed imports."""
    clear_folder(parent, files)
    place = _Place(parent / f"{IMPORTING}{secrets.token_hex(8)}")
    with locked(place.path, _LOCK_S, make=files):
        try:
            yield place
        finally:
            if not place.kept:
                with contextlib.suppress(OSError):
                    files.unlink_tree(place.path)


def _receive(reader: Reader, place: Path, where: str, size: int, files: Files) -> _Received:
    """Read an index into the place. Segments get new names, because those of the export may be in use."""
    data = b"".join(reader.content(member(where, MANIFEST), size))
    try:
        manifest = Manifest.parse(data, Path(where or ROOT))
    except DatastoreCorrupt as error:
        raise reader.damaged(error.what) from error
    if not _HASH.match(manifest.vocabulary.hash):
        raise reader.damaged("the hash of its vocabulary is none")
    if where not in ("", folder(place, manifest.vocabulary.hash).name):
        raise reader.damaged("an index is not in the folder of its vocabulary")
    directory, entries = place / where, []
    with unwritable(place):
        files.make_directory(directory)
    for entry in manifest.segments:
        entries.append(changed(entry, name=secrets.token_hex(8)))
        for kind, file in entry.files.items():
            parts = reader.content(member(where, file_name(entry.name, kind)), file.size)
            _write(directory / file_name(entries[-1].name, kind), parts, files)
    return directory, changed(manifest, segments=tuple(entries))


def _write(path: Path, parts: Iterator[bytes], files: Files) -> None:
    with unwritable(path):
        write_parts(files, path, parts)


def _check(received: list[_Received], reader: Reader) -> None:
    """Compare every file with its checksum, and look at its content."""
    hashes = [manifest.vocabulary.hash for _, manifest in received]
    if len({*hashes}) < len(hashes):
        raise reader.damaged("it has two indexes for one vocabulary")
    for directory, manifest in received:
        for entry in manifest.segments:
            for fault in segment_faults(directory, entry, manifest.vocabulary):
                raise reader.damaged(f"a file of {fault.part} {fault.what}")


def _publish(place: _Place, path: Path, received: list[_Received], files: Files) -> None:
    """Rename the place, so that it becomes the new datastore."""
    for directory, manifest in received:
        _write(directory / MANIFEST, iter([manifest.to_bytes()]), files)
    with unwritable(path):
        for directory, _ in reversed(received):
            files.sync_directory(directory)
        place.kept = True
        try:
            files.rename(place.path, path)
            files.sync_directory(path.parent)
        except OSError:
            # Either name may be on the disk, so nothing is deleted if the rename was done (docs/FORMAT.md, Commit).
            place.kept = os.path.lexists(path)
            with contextlib.suppress(OSError):
                files.rename(path, place.path)
            raise


def _put_in(path: Path, received: list[_Received], replace: bool, files: Files) -> tuple[str, ...]:
    """Commit each index in an existing datastore, the oldest first. Return the names of the other vocabularies."""
    for directory, manifest in sorted(received, key=lambda one: one[1].revision):
        with writing(path, manifest.vocabulary.hash, files) as target:
            if not replace and (target / MANIFEST).exists():
                raise DatastoreExists(path, manifest.vocabulary.name)
            staged = Staged(directory, manifest.segments)
            commit(target, vocabulary=manifest.vocabulary, recipe=manifest.recipe, staged=staged, files=files)
    given = {manifest.vocabulary.hash for _, manifest in received}
    held = [one.vocabulary for one in manifests(path).values() if isinstance(one, Manifest)]
    return tuple(vocabulary.name for vocabulary in held if vocabulary.hash not in given)


def _opened(directory: Path, stack: contextlib.ExitStack) -> tuple[Manifest, dict[str, BinaryIO]]:
    """Return a commit, and its open files by name. So a later commit cannot delete them."""
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(directory)
        with contextlib.ExitStack() as attempt:
            try:
                opened = {name: attempt.enter_context((directory / name).open("rb")) for name in manifest.files}
            except FileNotFoundError as error:
                missing = error
            except OSError as error:
                raise DatastoreCorrupt(directory, f"a file cannot be read: {error.strerror or error}") from error
            else:
                stack.push(attempt.pop_all())
                return manifest, dict(opened)
        if read_manifest(directory) == manifest:
            break
    raise DatastoreCorrupt(directory, f"{Path(missing.filename).name} is missing") from missing


HEAD = "rest-local-export-1.json"
TAIL = "rest-local-export.sha256"
MAGIC = "rest-local export"
ROOT = "datastore"
_BLOCK = 512
_CHUNK = 4 << 20
_MAX_HEAD = 1 << 20
_END = bytes(2 * _BLOCK)
_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,199}\Z")


class Writer:
    """A writer of the parts of an export. `written` counts bytes."""

    def __init__(self, output: BinaryIO) -> None:
        self._output, self._digest, self.written = output, hashlib.sha256(), 0

    def add(self, name: str, data: bytes) -> None:
        self._write(_header(name, len(data)))
        self._write(data + _padding(len(data)))

    def copy(self, name: str, file: BinaryIO, wanted: FileEntry, path: Path) -> None:
        """Add an open file. Raises DatastoreCorrupt if it differs from the manifest."""
        if os.fstat(file.fileno()).st_size != wanted.size:
            raise DatastoreCorrupt(path, "it has another size than the manifest says")
        digest, left = hashlib.sha256(), wanted.size
        self._write(_header(name, wanted.size))
        while left:
            try:
                chunk = file.read(min(_CHUNK, left))
            except OSError as error:
                raise DatastoreCorrupt(path, f"it cannot be read: {error.strerror or error}") from error
            if not chunk:
                break
            digest.update(chunk)
            self._write(chunk)
            left -= len(chunk)
        if digest.hexdigest() != wanted.sha256:
            raise DatastoreCorrupt(path, "it does not match its checksum")
        self._write(_padding(wanted.size))

    def end(self) -> None:
        self.add(TAIL, f"{self._digest.hexdigest()}\n".encode())
        self._write(_END)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._output.write(data)
        self.written += len(data)


class Reader:
    """A reader of the parts of an export in their order, and of nothing else. `read` counts bytes."""

    def __init__(self, source: BinaryIO, label: str) -> None:
        self._source, self._label, self._digest, self.read = source, label, hashlib.sha256(), 0

    def damaged(self, what: str) -> DatastoreError:
        return DatastoreError(f"import {self._label}: {what}; nothing was changed; copy it or export it again")

    def head(self) -> tuple[str, list[tuple[str, int]]]:
        """Return the datastore's old name, and the folder and the size of the manifest of each index."""
        block = self._take(_BLOCK, may_end=True)
        name = block[:100].rstrip(b"\0").decode("ascii", "replace")
        if not name.startswith(HEAD[:18]):
            raise self.damaged("this is no datastore that `rest-local index export` wrote")
        if name != HEAD:
            raise self.damaged(f"the export is of another format ({name[:40]!r}, this version reads {HEAD!r})")
        try:
            size = tarfile.TarInfo.frombuf(block, "utf-8", "strict").size
        except tarfile.TarError as error:
            raise self.damaged("its head is damaged") from error
        if len(block) < _BLOCK or block != _header(HEAD, size) or not 0 < size <= _MAX_HEAD:
            raise self.damaged("its head is damaged")
        data = self._take(size)
        self._skip_padding(size)
        try:
            return _parse_head(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.damaged(f"its head is damaged: {error}") from error

    def content(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of the next part, which must have this name and size."""
        if self._take(_BLOCK) != _header(name, size):
            raise self.damaged(f"{name} is not where it has to be")
        for start in range(0, size, _CHUNK):
            yield self._take(min(_CHUNK, size - start))
        self._skip_padding(size)

    def end(self) -> None:
        """Compare the checksum of everything, and check that nothing follows."""
        wanted = f"{self._digest.hexdigest()}\n".encode()
        if b"".join(self.content(TAIL, len(wanted))) != wanted:
            raise self.damaged("it does not match its checksum")
        if self._take(len(_END)) != _END or self._take(1, may_end=True):
            raise self.damaged("it does not end where it has to")

    def _skip_padding(self, size: int) -> None:
        padding = _padding(size)
        if padding and self._take(len(padding)) != padding:
            raise self.damaged("there are bytes between its parts")

    def _take(self, count: int, may_end: bool = False) -> bytes:
        parts, left = [], count
        while left:
            try:
                part = self._source.read(left)
            except OSError as error:
                raise self.damaged(f"it cannot be read: {error.strerror or error}") from error
            if not part:
                break
            parts.append(part)
            left -= len(part)
        data = b"".join(parts)
        if left and not may_end:
            raise self.damaged(f"it ends early, after {self.read + len(data)} bytes")
        self._digest.update(data)
        self.read += len(data)
        return data


def member(where: str, name: str) -> str:
    return "/".join(part for part in (ROOT, where, name) if part)


def _header(name: str, size: int) -> bytes:
    """Make the header block of a part. Its fields hold nothing of this machine or user."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def _parse_head(data: bytes) -> tuple[str, list[tuple[str, int]]]:
    fields = unsealed(data)
    if fields["magic"] != MAGIC or fields["format"] != 1:
        raise ValueError("is of another format")
    parts = [(part["folder"], part["manifest"]) for part in fields["indexes"]]
    right = all(type(size) is int and 0 < size <= MAX_MANIFEST for _, size in parts)
    folders = [where for where, _ in parts]
    orderly = folders[:1] == [""] and len({*folders}) == len(folders)
    if not right or not orderly or not all(FOLDER.match(where) for where in folders[1:]):
        raise ValueError("its list of indexes is none")
    if not isinstance(fields["name"], str) or not _NAME.match(os.fsdecode(os.fsencode(fields["name"]))):
        raise ValueError("its name is none")
    return fields["name"], parts
