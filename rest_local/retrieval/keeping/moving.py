"""Moves a datastore between machines as one checksummed file. The format is that of `archive`."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, BinaryIO

from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreExists
from rest_local.paths import replacing
from rest_local.retrieval.building.build import commit
from rest_local.retrieval.files import Files, locked, unwritable
from rest_local.retrieval.format import MANIFEST, FileEntry, Manifest, file_name
from rest_local.retrieval.home import (
    IMPORTING,
    clear_folder,
    datastore_path,
    folder,
    indexes,
    manifests,
    read_manifest,
    writing,
)
from rest_local.retrieval.keeping.archive import HEAD, ROOT, Reader, Writer, member, packed_head
from rest_local.retrieval.keeping.checking import segment_faults

_ATTEMPTS = 5
_KEPT = ("kind", "description")  # of a recipe without its paths
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_LOCK_S = 1.0  # for another import that takes the new directory for one of a killed import


@dataclass(frozen=True)
class Moved:
    """What was exported or imported. path: of the datastore; manifests: of its indexes, the datastore's own first;
    bytes: of the export; also: names of the vocabularies that the datastore had before and keeps.
    """

    path: Path
    manifests: tuple[Manifest, ...]
    bytes: int
    also: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for manifest in self.manifests for entry in manifest.segments)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "tokens": self.tokens,
            "vocabularies": [manifest.vocabulary.name for manifest in self.manifests],
            "paths": self.paths(),
            "kept": list(self.also),
        }

    def paths(self) -> list[str]:
        """The paths of the recipes, which an update or a rebuild on this machine reads."""
        return sorted({path for manifest in self.manifests for path in manifest.recipe.get("paths", ())})


def export(path: Path, directories: Sequence[Path], output: BinaryIO, *, recipe: bool = True) -> Moved:
    """Write these indexes of the datastore at `path` to `output`, which may be a pipe. recipe: with the recorded paths
    and the model; names of documents are always in it.

    Takes 4 MB of memory, needs no lock, and moves the commit that it found even if there is a new one meanwhile. Raises
    DatastoreCorrupt if a file does not fit its checksum (then `output` has no end, and no import takes it), and OSError
    from `output`.
    """
    with contextlib.ExitStack() as stack:
        held = [_opened(directory, stack) for directory in directories]
        found = tuple(_to_send(manifest, recipe) for manifest, _ in held)
        folders = ["", *(folder(path, manifest.vocabulary.hash).name for manifest in found[1:])]
        content = [manifest.to_bytes() for manifest in found]
        writer = Writer(output)
        writer.add(HEAD, packed_head(Path(os.path.abspath(path)).name.lstrip(".") or ROOT, folders, content))
        for where, manifest, data, (_, opened) in zip(folders, found, content, held, strict=True):
            writer.add(member(where, MANIFEST), data)
            for name, wanted in _files_of(manifest).items():
                writer.copy(member(where, name), opened[name], wanted, path / where / name)
        writer.end()
        return Moved(path, found, writer.written)


def export_file(
    path: Path, directories: Sequence[Path], file: Path, *, recipe: bool = True, overwrite: bool = False
) -> Moved:
    """`export` to a file, which appears as a whole when it is durable. Raises DatastoreError if it cannot be written,
    and if it exists without `overwrite`.
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
    """Make the datastore that was exported to `source`, which may be a pipe. name: a name or path, None: its old name.

    Everything is read, compared with its checksums and looked at as by `checking` before anything becomes visible. A
    new datastore appears as a whole. replace: put each index in the place of the one for the same vocabulary, in one
    commit each; indexes for other vocabularies stay. label: what errors call the source.

    Raises OptionError for a name that is none, DatastoreExists, DatastoreUnwritable, and
    DatastoreError if the source is damaged, ends early or is no export. Then nothing has changed.
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
    """The directory in which an import is put together. kept: it must not be deleted."""

    path: Path
    kept: bool = False


_Received = tuple[Path, Manifest]
"""The directory of an index in the place, and its manifest with new names of the segments."""


@contextlib.contextmanager
def _workplace(parent: Path, files: Files) -> Iterator[_Place]:
    """A locked directory next to the datastore, deleted at the end unless it has become the datastore. Deletes those of
    killed imports.
    """
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
        descriptor = files.create(path)
        try:
            for part in parts:
                files.write(descriptor, part)
            files.sync(descriptor)
        finally:
            os.close(descriptor)


def _check(received: list[_Received], reader: Reader) -> None:
    """Compare every file with its checksum, and look at what it holds."""
    hashes = [manifest.vocabulary.hash for _, manifest in received]
    if len({*hashes}) < len(hashes):
        raise reader.damaged("it has two indexes for one vocabulary")
    for directory, manifest in received:
        for entry in manifest.segments:
            for fault in segment_faults(directory, entry, manifest.vocabulary):
                raise reader.damaged(f"a file of {fault.part} {fault.what}")


def _publish(place: _Place, path: Path, received: list[_Received], files: Files) -> None:
    """The place becomes the new datastore, by a rename."""
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
    """Commit each index in a datastore that is there, the oldest first. Returns the names of the other vocabularies."""
    for directory, manifest in sorted(received, key=lambda one: one[1].age):
        with writing(path, manifest.vocabulary.hash, files) as target:
            if not replace and (target / MANIFEST).exists():
                raise DatastoreExists(path, manifest.vocabulary.name)
            with unwritable(target):
                for name in _files_of(manifest):
                    files.rename(directory / name, target / name)
            commit(
                target,
                (),
                vocabulary=manifest.vocabulary,
                recipe=manifest.recipe,
                keep=manifest.segments,
                files=files,
            )
    given = {manifest.vocabulary.hash for _, manifest in received}
    held = [one.vocabulary for one in manifests(path).values() if isinstance(one, Manifest)]
    return tuple(vocabulary.name for vocabulary in held if vocabulary.hash not in given)


def _opened(directory: Path, stack: contextlib.ExitStack) -> tuple[Manifest, dict[str, BinaryIO]]:
    """A commit, and its files by name, open, so that a later commit cannot delete them."""
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(directory)
        with contextlib.ExitStack() as attempt:
            try:
                opened = {name: attempt.enter_context((directory / name).open("rb")) for name in _files_of(manifest)}
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


def _to_send(manifest: Manifest, recipe: bool) -> Manifest:
    """A manifest of format 2, of which every revision is at least 1."""
    kept = manifest.recipe if recipe else {key: manifest.recipe[key] for key in _KEPT if key in manifest.recipe}
    return changed(manifest, revision=max(manifest.revision, 1), recipe=kept)


def _files_of(manifest: Manifest) -> dict[str, FileEntry]:
    return {file_name(entry.name, kind): file for entry in manifest.segments for kind, file in entry.files.items()}
