"""`rest-local bench report`: results in; one HTML page, or one Markdown document with its figures, out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePath
from urllib.parse import quote

from rest_local.bench.report import figures
from rest_local.bench.report.reading import Report, read
from rest_local.errors import OptionError
from rest_local.paths import write_atomically


def make(folder: Path) -> Report:
    """The report on a folder; without matplotlib it has tables only. Raises InputInvalid, ResultInvalid, OSError."""
    return replace(read(folder), figures=figures.why_none() or "")


def write_page(report: Report, path: Path) -> None:
    """Write the HTML page. Raises OSError."""
    from rest_local.bench.report.page import page

    write_atomically(path, page(report).encode("utf-8", "replace"))


def write_markdown(report: Report, path: Path, folder: Path) -> list[Path]:
    """Write the document, and its figures into `folder`, which is the folder of the results. Returns the figures.

    Raises OptionError if the document cannot name that folder by a relative path, OSError.
    """
    from rest_local.bench.report.markdown import document

    text, files = document(report, prefix(path, folder))
    written = [folder / name for name in files]
    for name, content in files.items():
        write_atomically(folder / name, content.encode("utf-8", "replace"))
    write_atomically(path, text.encode("utf-8", "replace"))
    return written


def prefix(path: Path, folder: Path) -> str:
    """What stands before the name of a figure in the document: "", or a relative path that ends in "/"."""
    try:
        relative = os.path.relpath(folder.resolve(), path.resolve().parent)
    except ValueError as error:  # another drive
        raise OptionError(
            f"{path}: put the Markdown document onto the drive of {folder}, which its figures are in"
        ) from error
    return "" if relative == "." else f"{quote(PurePath(relative).as_posix())}/"
