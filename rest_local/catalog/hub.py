"""Download models from a hub with the API of the Hugging Face Hub, into the cache of `huggingface_hub`.

Contract:

- Requests, tokens, redirects and the layout of the cache are those of `huggingface_hub`, with its environment:
  `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`. Its downloads are not fetched again.
- A download that ended early goes on where it stopped, also in another process. `huggingface_hub` itself deletes the
  part it has and begins anew (2.0 on), so the part is kept here, next to the blob that it becomes.
- Every file is compared with the sha256 that the hub names before it gets its name. Other bytes are deleted.
- No error of the library or of the network leaves this module: each is a HubError or DownloadFailed, one line.

The only module that reaches the network. It is imported when something is downloaded, which takes 0.3 s.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
)
from huggingface_hub.utils.sha import sha_fileobj

from rest_local import __version__
from rest_local.catalog.quantization import in_bytes, is_meant, is_model_file, label_of, preferred, stem_of
from rest_local.catalog.stores import HubName, hub_name, is_projector_file
from rest_local.errors import DownloadFailed, HubError
from rest_local.llama.gguf import part_of

TIMEOUT_S = 20.0  # limit of a question about a repository; the library has its own limits for files
LARGEST = constants.MAX_HTTP_DOWNLOAD_SIZE  # a file with more bytes comes only through the library's other protocol

# Called with the bytes that are there and the bytes of all files, about every 10 MB.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    size: int
    sha256: str  # hexadecimal, empty if the hub does not name it


@dataclass(frozen=True)
class ModelFiles:
    """One model of a repository: its files in order, several if it comes in parts."""

    label: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Repository:
    """The models of a repository at one commit, the smallest first, and its `projectors` for images."""

    name: str
    commit: str
    choices: tuple[ModelFiles, ...]
    projectors: tuple[ModelFiles, ...] = ()

    def choose(self, label: str | None) -> tuple[ModelFiles, str]:
        """Return the model of a quantization or file name, or the projector of a file name, and the reason if none was
        named. Raises HubError, which lists all models, if there is none or several are meant.
        """
        if label is not None:
            return self._named(label), ""
        if len(self.choices) == 1:
            return self.choices[0], "the only model there"
        usual = preferred(choice.label for choice in self.choices)
        if usual is None:
            raise HubError(self.name, f"none of its models is a usual choice: {self._listed()}", self._way_out())
        return self._named(usual), "the usual choice, about 5 bits a weight"

    def _named(self, label: str) -> ModelFiles:
        meant = [choice for choice in self.choices if is_meant(label, choice.files[0].name)]
        exact = [choice for choice in meant if choice.label.casefold() == label.casefold()] or meant
        exact = exact or [choice for choice in self.projectors if choice.label == stem_of(label)]
        if len({stem_of(choice.files[0].name) for choice in exact}) == 1:
            return min(exact, key=lambda choice: len(choice.files))  # One file is preferred to parts.
        if exact:
            files = ", ".join(choice.files[0].name for choice in exact)
            raise HubError(self.name, f"{label} is the name of {len(exact)} models: {files}", "give a file's name")
        raise HubError(self.name, f"has no {label}; it has {self._listed()}", self._way_out())

    def _listed(self) -> str:
        return ", ".join(f"{choice.label} ({in_bytes(choice.size)})" for choice in self.choices)

    def _way_out(self) -> str:
        return f"name one, as in {self.name}:{self.choices[0].label}"


class Hub:
    """A hub and the cache for its files, by default those of the environment."""

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.cache = cache or Path(constants.HF_HUB_CACHE).expanduser()

    def repository(self, name: str) -> Repository:
        """Ask for the models of a repository, in one request. Raises HubError."""
        with _explained(name, self.endpoint):
            about = HfApi(endpoint=self.endpoint).model_info(name, files_metadata=True, timeout=TIMEOUT_S)
            files = [
                RemoteFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "")
                for each in about.siblings or ()
            ]
        choices = _choices(files)
        if not choices:
            raise HubError(name, "has no GGUF file", "look for a repository of the same model whose name ends in GGUF")
        seeing = (file for file in files if is_projector_file(file.name))
        projectors = tuple(ModelFiles(stem_of(file.name), (file,)) for file in seeing)
        return Repository(name, about.sha or "", choices, projectors)

    def missing(self, repository: Repository, choice: ModelFiles) -> int:
        return sum(file.size - self._present(repository.name, file) for file in choice.files)

    def download(
        self,
        repository: Repository,
        choice: ModelFiles,
        progress: Progress = lambda done, total: None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> Path:
        """Download missing files, and return the path of the (first) file. `notice` gets warnings of the library, for
        example about a lost connection. KeyboardInterrupt leaves the part that is there. Raises HubError,
        DownloadFailed.
        """
        name, missing = repository.name, self.missing(repository, choice)
        folder = next(folder for folder in (self.cache, *self.cache.parents) if folder.is_dir())
        free = shutil.disk_usage(folder).free
        if missing > free:
            cause = f"needs {in_bytes(missing)} and {folder} has {in_bytes(free)} free"
            raise DownloadFailed(name, cause, "make room, or set HF_HOME to a directory of another disk")
        paths, before = [], 0
        with _forwarded(notice), _explained(name, self.endpoint):
            for file in choice.files:

                def advance(done: int, before: int = before) -> None:
                    progress(before + done, choice.size)

                paths.append(self._file(name, file, advance))
                before += file.size
        if len({path.parent for path in paths}) > 1:
            raise DownloadFailed(name, "changed on the hub while it was downloaded", "pull it again")
        return paths[0]

    def _file(self, repo: str, file: RemoteFile, progress: Callable[[int], None]) -> Path:
        if file.sha256 and file.size <= LARGEST:
            self._fetch(repo, file, progress)
        found = hf_hub_download(  # it finds the blob by its sha256, and makes the snapshot that names it
            repo,
            file.name,
            cache_dir=self.cache,
            endpoint=self.endpoint,
            library_name="rest-local",
            library_version=__version__,
        )
        progress(file.size)
        return Path(found)

    def _fetch(self, repo: str, file: RemoteFile, progress: Callable[[int], None]) -> None:
        """Make the blob of a file, from the part that is there. Raises DownloadFailed, and the library's errors."""
        blob, part = self._blob(repo, file), self._part(repo, file)
        if blob.exists():
            return
        part.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(repo, file), part.open("ab") as opened:
            if opened.tell() > file.size:
                opened.seek(0)
                opened.truncate()
            http_get(
                hf_hub_url(repo, file.name, endpoint=self.endpoint),
                _Counted(opened, progress),  # type: ignore[arg-type]  # the library uses no more of a file
                resume_size=opened.tell(),
                headers=build_hf_headers(library_name="rest-local", library_version=__version__),
                expected_size=file.size,
            )
            opened.flush()
            with part.open("rb") as written:
                digest = sha_fileobj(written).hex()
            if digest != file.sha256:
                part.unlink()
                cause = f"{file.name} has another sha256 than the hub names, so it was deleted"
                raise DownloadFailed(
                    repo, cause, "pull it again; if it happens again, the network changes what it carries"
                )
            os.replace(part, blob)

    @contextmanager
    def _locked(self, repo: str, file: RemoteFile) -> Iterator[None]:
        """Hold the library's lock of the same file."""
        path = self.cache / ".locks" / _folder(repo) / f"{file.sha256}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(path, timeout=0, mode=0o664):
                yield
        except Timeout as error:
            raise DownloadFailed(repo, f"another process downloads {file.name}", "wait for it, or end it") from error

    def _present(self, repo: str, file: RemoteFile) -> int:
        """Return the bytes of a file that need no download."""
        if not file.sha256:
            return 0
        for path in (self._blob(repo, file), self._part(repo, file)):
            if path.exists():
                return min(path.stat().st_size, file.size)
        return 0

    def _blob(self, repo: str, file: RemoteFile) -> Path:
        return self.cache / _folder(repo) / "blobs" / file.sha256

    def _part(self, repo: str, file: RemoteFile) -> Path:
        """Return the path of a part, as older versions of the library called it, which go on from there as well."""
        return self.cache / _folder(repo) / "blobs" / f"{file.sha256}.incomplete"


def pull_model(name: str, *, progress: Progress = lambda done, total: None, hub: Hub | None = None) -> Path:
    """Download a model by its name on the hub, and return its (first) file. Files on the disk are not downloaded again.

    Args:
        name: `user/repo:QUANT`, or `user/repo`, which takes a usual quantization (about 5 bits a weight); QUANT may
            also be the name of a file
        progress: called with the bytes that are there and the bytes of all files
        hub: by default that of the environment

    Raises:
        HubError: the hub has no such model, refuses it, or cannot be reached
        DownloadFailed: the download broke off, found no room, or gave other bytes
    """
    hub, wanted = hub or Hub(), parsed(name)
    repository = hub.repository(wanted.repo)
    choice, _ = repository.choose(wanted.label)
    return hub.download(repository, choice, progress)


def parsed(name: str) -> HubName:
    """Parse a name with `hub_name`. Raises HubError if it is none."""
    wanted = hub_name(name)
    if wanted is None:
        raise HubError(name, "is no name of a hub", "give user/repo, or user/repo:QUANT")
    return wanted


class _Counted:
    """A file that the library writes to and may truncate. It reports its size after each change."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], None]) -> None:
        self._file, self._progress = file, progress
        self.tell, self.seek = file.tell, file.seek
        progress(file.tell())

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._progress(self._file.tell())
        return written

    def truncate(self) -> int:
        left = self._file.truncate()
        self._progress(left)
        return left


def _choices(files: Sequence[RemoteFile]) -> tuple[ModelFiles, ...]:
    """Return the complete models among the files, the smallest first."""
    parts: dict[tuple[str, int], list[RemoteFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        if is_model_file(file.name):
            part = part_of(file.name)
            parts.setdefault((part.name, part.total) if part else (file.name, 1), []).append(file)
    whole = [
        ModelFiles(label_of(group[0].name), tuple(group)) for (_, count), group in parts.items() if len(group) == count
    ]
    return tuple(sorted(whole, key=lambda choice: (choice.size, choice.label)))


def _folder(repo: str) -> str:
    return f"models--{repo.replace('/', '--')}"


@contextmanager
def _forwarded(notice: Callable[[str], None]) -> Iterator[None]:
    """Send warnings that the library logs to `notice`, in one line, and turn its progress bars off."""

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notice(" ".join(record.getMessage().split()))

    logger, handler = logging.getLogger("huggingface_hub"), Forward(logging.WARNING)
    others, propagates, bars = logger.handlers[:], logger.propagate, not are_progress_bars_disabled()
    logger.handlers[:], logger.propagate = [handler], False
    disable_progress_bars()
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = others, propagates
        if bars:
            enable_progress_bars()


@contextmanager
def _explained(name: str, endpoint: str) -> Iterator[None]:
    """Turn errors of the library, the network and the disk into HubError or DownloadFailed."""
    try:
        yield
    except HubError:
        raise
    except (HTTPError, OSError, ValueError) as error:
        raise _as_ours(name, endpoint, error) from error


def _as_ours(name: str, endpoint: str, error: BaseException) -> HubError:
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:  # the library wraps the cause
        return _as_ours(name, endpoint, error.__cause__)
    if isinstance(error, OfflineModeIsEnabled):
        return HubError(name, "HF_HUB_OFFLINE is set, so the hub is not asked", "unset it to download")
    if isinstance(error, HfHubHTTPError):
        return _refused(name, endpoint, error)
    if isinstance(error, HFValidationError):
        return HubError(name, "is no name of a repository", "give user/repo, or user/repo:QUANT")
    if isinstance(error, HTTPError):
        cause = f"{endpoint} cannot be reached: {_short(error)}"
        return HubError(name, cause, "check the network; the same command goes on where it stopped")
    if isinstance(error, OSError):
        return _failed(name, error)
    cause = f"{endpoint} does not answer as a hub does: {_short(error)}"  # no JSON, or another API
    return HubError(name, cause, "check HF_ENDPOINT")


def _refused(name: str, endpoint: str, error: HfHubHTTPError) -> HubError:
    response: Any = error.response
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    if code == "GatedRepo":
        way_out = f"accept them at {endpoint}/{name} and set HF_TOKEN to a token of that account"
        return HubError(name, "its owner asks for terms to be accepted first (gated)", way_out)
    if status == 401 and "credentials" in response.headers.get("X-Error-Message", ""):
        return HubError(name, f"{endpoint} does not know the token", "check HF_TOKEN, or unset it")
    if status in (401, 404):
        where = f"not found at {endpoint}"
        return HubError(name, where, "check the name; a private one needs HF_TOKEN, a token that may read it")
    if status == 403:
        return HubError(name, "the token may not read it", "set HF_TOKEN to one that may")
    if status == 429:
        after = response.headers.get("Retry-After", "")
        wait = f"wait {after} s" if after.isdigit() else "wait some minutes"
        return HubError(name, f"{endpoint} refuses more requests for now", f"{wait}; with HF_TOKEN it allows more")
    return HubError(name, f"{endpoint} answered with status {status}", "try again later")


def _failed(name: str, error: OSError) -> HubError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = "make room and pull again, which goes on where it stopped; or set HF_HOME to another disk"
        return DownloadFailed(name, "the disk is full", way_out)
    if error.errno is not None:
        return DownloadFailed(name, f"{error.filename or 'the cache'} is not writable: {error.strerror}", "set HF_HOME")
    return DownloadFailed(name, f"the download broke off: {_short(error)}", "pull it again, which goes on from there")


def _short(error: BaseException) -> str:
    """Return the first line of an error's text, without addresses of requests."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:120]
