"""The Python files of the running interpreter: its standard library, or the packages installed with it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rest_local.retrieval.documents import Text
from rest_local.retrieval.sources.source import Reading, Source
from rest_local.retrieval.sources.walk import Walk

TESTS = ("test/", "tests/", "testing/", "idle_test/")
PACKAGES = ("site-packages/", "dist-packages/")


@dataclass(frozen=True, slots=True)
class Python(Source):
    """Python files without tests, found when they are read: another interpreter gives its own."""

    kind: ClassVar[str] = "python"
    site_packages: bool = False

    def texts(self, reading: Reading) -> Iterator[Text]:
        return self._walk().texts(reading)

    def measure(self) -> tuple[int, int]:
        return self._walk().measure()

    def about(self) -> str:
        return "the installed Python packages" if self.site_packages else "the standard library of Python"

    def _walk(self) -> Walk:
        paths = sysconfig.get_paths()
        if self.site_packages:
            folders = dict.fromkeys((paths["purelib"], paths.get("platlib", paths["purelib"])))
            return Walk(tuple(folders), ("*.py",), TESTS)
        return Walk((paths["stdlib"],), ("*.py",), TESTS + PACKAGES)
