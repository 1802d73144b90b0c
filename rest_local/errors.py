"""All errors, as one tree. Each message names what failed, the cause and the way out.

    RestLocalError                     exit 1
    ├── OptionError                    exit 2: a wrong option or argument
    ├── InputInvalid                   a file that was named is missing, unreadable, or not what it should be
    ├── ConfigInvalid                  the configuration file is damaged, or has an unknown key or a wrong value
    ├── OutputInvalid                  an output of a batch contains something else; it was not changed
    ├── OutputUnwritable               disk full, permission; what was written stays
    ├── LibraryUnfit                   llama-cpp-python cannot be loaded, or lacks something
    ├── ClusterFailed                  no Ray, no cluster, no room in it, or no replica that stays alive
    ├── ModelError
    │   ├── ModelNotFound              no file at that path, and no model of that name
    │   │   └── ModelNotHere           a name of a hub that is not on the disk
    │   ├── ModelInvalid               truncated, foreign, hostile or unsupported GGUF
    │   ├── AdapterInvalid             not a LoRA adapter, damaged, or of another model
    │   ├── ProjectorInvalid           not a projector for images, damaged, or of another model
    │   └── HubError                   the hub has no such model, refuses it, or cannot be reached
    │       └── DownloadFailed         broken off, no room on the disk, or not what the hub names
    ├── GenerationError
    │   ├── PromptTooLong              with both numbers
    │   ├── PromptEmpty                there is no token to start from
    │   ├── TemplateFailed             the chat template is broken, or refused the messages
    │   │   └── TemplateTooCostly      it takes too much time or memory
    │   ├── QueueFull                  too many requests wait
    │   ├── GrammarsBusy               grammars of other requests are compiled
    │   ├── ServiceClosed              the engine's thread takes no more requests
    │   ├── ReaderTooSlow              the reader of a stream lags too far
    │   ├── DecodeFailed               llama_decode refused or broke, with its code
    │   ├── EditRefused                what came of an edit is not written
    │   └── Unexpected                 a fault of this program or of what it uses, of any kind
    └── DatastoreError
        ├── DatastoreNotFound          no datastore of that name or path
        ├── DatastoreCorrupt           path and what is wrong with it
        ├── DatastoreVersion           newer, older or foreign format
        ├── DatastoreVocabulary        no index for this vocabulary
        ├── DatastoreExists            not replaced without being asked to
        ├── DatastoreLocked            another process is writing
        ├── DatastoreUnwritable        disk full, permission, failed fsync: the old commit is intact
        ├── HistoryNotFound            no history of that name
        ├── CorpusEmpty                nothing in the given paths could be indexed
        └── CorpusTooLarge             a segment holds fewer than 2^31 tokens

Messages name parameters of the Python API in backticks (`n_ctx`). The command line and the server write the option in
their place (`in_options`). The command line prints the message as one line and exits with `exit_code`: 2 for what is
wrong by the command line alone, 1 for what a look at the files, the model or the machine finds.
"""

from __future__ import annotations

import re
from os import PathLike

OPTIONS = {
    "cells": "--cells",
    "exact": "--exact",
    "exclude": "--exclude",
    "flash_attention": "--flash-attn",
    "include": "--include",
    "max_tokens": "--tokens",
    "memory": "--memory",
    "missing=True": "--missing",
    "mmproj": "--mmproj",
    "n_ctx": "--ctx",
    "n_gpu_layers": "--gpu-layers",
    "repack=False": "--no-repack",
    "replace": "--replace",
    "rope": "--rope-scaling",
    "slots": "--slots",
    "threads": "--threads",
}


def in_options(message: str) -> str:
    """Replace parameters that a message of the library names by the options of the command line."""
    return re.sub(r"`([\w=]+)`", lambda found: OPTIONS.get(found[1], found[0]), message)


def printable(text: str) -> str:
    """Replace control characters and lone surrogates by U+FFFD, for terminals, logs and UTF-8 files."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


class RestLocalError(Exception):
    """The root of all errors. `exit_code` is 1 for what fails at run time, 2 for wrong usage.

    `str` gives one line without control characters, because a message may quote a damaged or hostile file.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(" ".join(super().__str__().splitlines()))


# A place in nested input, such as `("messages", 2, "content")` for `messages[2].content`.
Place = tuple[str | int, ...]


class OptionError(RestLocalError):
    """A wrong option or argument. The message begins with `place`, where in nested input the fault is."""

    exit_code = 2

    def __init__(self, message: str, place: Place = ()) -> None:
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
        super().__init__(f"{where}: {message}" if place else message)
        self.message, self.place = message, place


class InputInvalid(RestLocalError):
    """An input file or directory cannot be used. `what` is its role, such as "grammar file"."""

    def __init__(self, what: str, path: str | PathLike[str], cause: str) -> None:
        super().__init__(f"{what} {path}: {cause}")
        self.path, self.cause = path, cause


class ConfigInvalid(RestLocalError):
    """The configuration file cannot be used. `line` counts from 1; None concerns the whole file."""

    def __init__(self, path: str | PathLike[str], line: int | None, cause: str) -> None:
        super().__init__(f"configuration {path}{f':{line}' if line else ''}: {cause}")
        self.path, self.line, self.cause = path, line, cause


class OutputInvalid(RestLocalError):
    def __init__(self, path: str | PathLike[str], cause: str, way_out: str = "") -> None:
        way_out = way_out or "give another output, or `replace` to write it anew"
        super().__init__(f"output {path} {cause}; {way_out}")
        self.path, self.cause = path, cause


class OutputUnwritable(RestLocalError):
    def __init__(self, path: str | PathLike[str], cause: str, way_out: str = "") -> None:
        way_out = way_out or "the answers in it are whole, and the same command goes on with them"
        super().__init__(f"output {path}: {cause}; {way_out}")
        self.path, self.cause = path, cause


class LibraryUnfit(RestLocalError):
    """llama-cpp-python cannot be loaded, or lacks something that is used."""


class ClusterFailed(RestLocalError):
    """A batch cannot run on a cluster. The answers that were written before stay."""


class ModelError(RestLocalError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    def __init__(
        self,
        path: str | PathLike[str],
        cause: str = "no such file",
        way_out: str = "give the path of a GGUF file, or a name that `rest-local models` lists",
    ) -> None:
        super().__init__(f"model {path}: {cause}; {way_out}")


class ModelNotHere(ModelNotFound):
    """A model of a hub is not on the disk. `name` is user/repo:QUANT, `others` are names of the same repository."""

    def __init__(self, name: str, others: tuple[str, ...] = ()) -> None:
        here = f" ({', '.join(others)} is)" if len(others) == 1 else f" ({', '.join(others)} are)" if others else ""
        super().__init__(name, f"is not on this machine{here}", f"`rest-local pull {name}` downloads it")
        self.name, self.others = name, others


class ModelInvalid(ModelError):
    def __init__(self, path: str | PathLike[str], cause: str, way_out: str = "") -> None:
        way_out = way_out or "get the file again, or update llama-cpp-python if the model is newer"
        super().__init__(f"model {path}: {cause}; {way_out}")
        self.cause = cause


class AdapterInvalid(ModelError):
    def __init__(self, path: str | PathLike[str], cause: str) -> None:
        super().__init__(f"LoRA adapter {path}: {cause}; leave it out, or give one made for this very model")
        self.cause = cause


class ProjectorInvalid(ModelError):
    def __init__(self, path: str | PathLike[str], cause: str, way_out: str = "") -> None:
        way_out = way_out or "give another `mmproj`, one that was made for this very model, or none"
        super().__init__(f"projector {path}: {cause}; {way_out}")
        self.cause = cause


class HubError(ModelError):
    """The hub has no such model, refuses it, or cannot be reached. `name` is user/repo."""

    def __init__(self, name: str, cause: str, way_out: str) -> None:
        super().__init__(f"model {name}: {cause}; {way_out}")
        self.cause = cause


class DownloadFailed(HubError):
    """A download broke off, found no room on the disk, or gave other bytes than the hub names."""


class GenerationError(RestLocalError):
    """A generation was refused or broke off."""


class PromptTooLong(GenerationError):
    """The prompt and one token of answer do not fit. `estimated`: the prompt was not tokenized whole."""

    def __init__(self, n_prompt: int, n_ctx: int, estimated: bool = False) -> None:
        known = f"about {n_prompt}" if estimated else str(n_prompt)
        super().__init__(f"the prompt has {known} tokens and the context holds {n_ctx}; shorten it or raise `n_ctx`")
        self.n_prompt, self.n_ctx, self.estimated = n_prompt, n_ctx, estimated


class CannotGenerate(GenerationError):
    """The model generates no text: it makes embeddings."""

    def __init__(self) -> None:
        super().__init__("the model makes embeddings and generates no text; give one that does")


class PromptEmpty(GenerationError):
    def __init__(self) -> None:
        super().__init__("the prompt is empty and the model has no start token; give some text")


class TemplateFailed(GenerationError):
    def __init__(self, cause: str) -> None:
        super().__init__(f"the model's chat template: {' '.join(cause.split())}; check order and roles of the messages")
        self.cause = cause


class TemplateTooCostly(TemplateFailed):
    """The model's chat template takes too much time or memory, or gives too much text."""


class GrammarsBusy(GenerationError):
    def __init__(self) -> None:
        super().__init__("the grammars of other requests take long to compile; try again later")


class QueueFull(GenerationError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are waiting already; try again later")


class ServiceClosed(GenerationError):
    def __init__(self) -> None:
        super().__init__("the engine takes no more requests; start it again")


class ReaderTooSlow(GenerationError):
    def __init__(self) -> None:
        super().__init__("the answer was ended because its reader is too slow; read faster, or ask for fewer tokens")


class DecodeFailed(GenerationError):
    def __init__(self, code: int, n_tokens: int) -> None:
        super().__init__(f"llama_decode returned {code} for {n_tokens} tokens; the state was cleared, try again")
        self.code = code


class EditRefused(GenerationError):
    def __init__(self, path: str | PathLike[str], cause: str, way_out: str) -> None:
        super().__init__(f"file {path}: {cause}; nothing was written; {way_out}")
        self.path, self.cause = path, cause


class Unexpected(GenerationError):
    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the request ended with an unexpected error: {error!r}; the log says where")


class DatastoreError(RestLocalError):
    """A datastore cannot be read or written."""


class DatastoreNotFound(DatastoreError):
    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(f"datastore {path}: not found; `rest-local index list` shows what there is")


class DatastoreCorrupt(DatastoreError):
    def __init__(self, path: str | PathLike[str], what: str) -> None:
        super().__init__(f"datastore {path}: {what}; build it again with `rest-local index build`")
        self.path, self.what = path, what


class DatastoreVersion(DatastoreError):
    def __init__(self, path: str | PathLike[str], found: str, supported: str) -> None:
        super().__init__(
            f"datastore {path}: format {found}, this version reads {supported}; "
            "update rest-local, or build it again with `rest-local index build`"
        )
        self.found = found


class DatastoreVocabulary(DatastoreError):
    """The datastore has no index for this vocabulary. `found` lists its vocabularies, `command` builds an index."""

    def __init__(self, path: str | PathLike[str], found: str, wanted: str, command: str) -> None:
        super().__init__(f"datastore {path}: built for vocabulary {found}, the model has {wanted}; {command} adds it")
        self.path, self.found, self.command = path, found, command


class DatastoreExists(DatastoreError):
    def __init__(self, path: str | PathLike[str], vocabulary: str) -> None:
        super().__init__(
            f"datastore {path}: exists already for vocabulary {vocabulary}; replace it (`replace`) or give another name"
        )


class DatastoreLocked(DatastoreError):
    def __init__(self, path: str | PathLike[str], owner: str) -> None:
        super().__init__(f"datastore {path}: locked by {owner}; wait for it to finish or stop it")
        self.owner = owner


class DatastoreUnwritable(DatastoreError):
    def __init__(self, path: str | PathLike[str], cause: str, way_out: str = "") -> None:
        more = f"; {way_out}" if way_out else ""
        super().__init__(f"datastore {path}: cannot be written: {cause}; what was there before is intact{more}")
        self.cause = cause


class HistoryNotFound(DatastoreError):
    def __init__(self, name: str) -> None:
        super().__init__(f"history {name!r}: not found; `rest-local history list` shows what there is")


class CorpusEmpty(DatastoreError):
    def __init__(self, paths: str, skipped: str) -> None:
        super().__init__(f"corpus {paths}: no text to index ({skipped}); check the paths, `include` and `exclude`")


class CorpusTooLarge(DatastoreError):
    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"corpus of {n_tokens} tokens: a segment holds fewer than 2^31; build several datastores")
