"""A column of Parquet files. Needs pyarrow, the extra `parquet`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rest_local.errors import InputInvalid, OptionError, printable
from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.fields import WRONG, dig, files_of, open_file, size_of
from rest_local.retrieval.sources.source import Reading, Source
from rest_local.retrieval.sources.walk import absolute

_ROWS = 64  # in memory at once
_BUFFER = 1 << 20  # bytes that are read at once


@dataclass(frozen=True, slots=True)
class Parquet(Source):
    """One document for each row, named `FILE:ROW`, rows from 1. path: a file or a glob; field: a column, with dots into
    nested ones as for `fields.dig`.
    """

    kind: ClassVar[str] = "parquet"
    path: str
    field: str
    allow_secrets: bool = False

    def texts(self, reading: Reading) -> Iterator[Text]:
        _pyarrow()
        files = files_of(self.path)
        return (text for file in files for text in self._texts(file, reading))

    def measure(self) -> tuple[int, int]:
        return size_of(self.path)

    def about(self) -> str:
        return f"{self.path}:{self.field}"

    def prepared(self) -> Parquet:
        return replace(self, path=absolute(self.path))

    def _texts(self, file: str, reading: Reading) -> Iterator[Text]:
        number = 0
        raw, mark = open_file(file)
        with raw:
            column, rest, batches = self._batches(file, raw)
            try:
                for batch in batches:
                    for value in batch.column(column).to_pylist():
                        number += 1
                        name, text = f"{file}:{number}", dig(value, rest)
                        if isinstance(text, str):
                            yield from reading.text(name, text, mark, allow_secrets=self.allow_secrets)
                        else:
                            reading.skipped.add(WRONG, name)
            except (_pyarrow().lib.ArrowException, OSError, UnicodeDecodeError):
                reading.skipped.add("damaged: the rest of a file", file)
        reading.looked_at(size_of(file)[1])

    def _batches(self, file: str, raw: Any) -> tuple[str, str, Iterator[Any]]:
        """The column, the field in it, and batches of rows with that column alone. Raises InputInvalid."""
        pyarrow = _pyarrow()
        try:
            table = pyarrow.parquet.ParquetFile(raw, buffer_size=_BUFFER, pre_buffer=False)
        except (pyarrow.lib.ArrowException, OSError) as error:
            cause = printable(str(error).split("\n")[0][:200])
            raise InputInvalid("Parquet file", printable(file), f"cannot be read: {cause}") from error
        names = table.schema_arrow.names
        for name in sorted(names, key=len, reverse=True):
            if names.count(name) == 1 and (self.field == name or self.field.startswith(f"{name}.")):
                return name, self.field[len(name) + 1 :], table.iter_batches(_ROWS, columns=[name])
        known = printable(", ".join(names))[:200]
        raise InputInvalid("Parquet file", printable(file), f"no column {self.field!r}; it has: {known}")


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet

        return pyarrow
    except ImportError as error:
        raise OptionError("Parquet files need pyarrow; install it: pip install 'rest-local[parquet]'") from error
