"""Results of benchmarks as files, and the journal that lets an interrupted run go on.

A result is one JSON object: what was measured, by which command, which version, on which machine. `rest-local bench
report` reads a folder of them. A result of another format is refused with the reason.

A run consists of units (a prompt on one side, one experiment). After each unit the journal gets a line. The same
command reads these lines when it is run again, and measures only what is missing. A journal of other options, another
model or another version is refused: its figures would not belong together.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import rest_local
from rest_local.errors import ResultInvalid
from rest_local.paths import write_atomically

FORMAT = 1


@dataclass(frozen=True)
class Machine:
    """Where a result was measured. `load`: the mean number of running processes in the minute before, -1 if unknown.

    features   instruction sets that decide how fast a batch is: "avx2", "avx512f", "amx_tile" and so on
    libraries  name and version, llama-cpp-python first
    """

    processor: str
    cores: int
    memory_gb: float
    system: str
    python: str
    load: float
    features: tuple[str, ...] = ()
    accelerator: str = ""
    libraries: Mapping[str, str] | None = None

    def line(self) -> str:
        """For a table: processor, cores and load."""
        parts = [self.processor, f"{self.cores} cores", *([self.accelerator] if self.accelerator else [])]
        return ", ".join(parts) + (f"; load {self.load:.1f}" if self.load >= 0 else "")


FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_int8", "asimd", "i8mm", "sve")


def this_machine() -> Machine:
    """Takes 10 ms. Never fails: what the platform does not tell is left empty."""
    from importlib.metadata import PackageNotFoundError, version

    libraries = {}
    for name in ("llama-cpp-python", "numpy", "pydivsufsort"):
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            continue
    information = _cpuinfo()
    flags = information.get("flags", information.get("Features", "")).split()
    return Machine(
        processor=information.get("model name", platform.processor() or platform.machine()),
        cores=_cores(),
        memory_gb=round(_memory() / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0,
        features=tuple(name for name in FEATURES if name in flags),
        libraries=libraries,
    )


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty on other systems than Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    """Bytes of the machine's memory, 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


@dataclass(frozen=True)
class Result:
    """One measurement.

    kind      which section of the report shows it: "compare", or the name of an experiment
    command   makes it again, from a checkout or an installation
    version   of rest-local
    started   UTC, "2026-11-22T18:00:00Z"
    seconds   that the measurement took, over all parts of an interrupted run
    quick     measured on fewer prompts, for a first look
    data      figures by name; what they are is described where `kind` is measured
    """

    kind: str
    command: str
    machine: Machine
    version: str
    started: str
    seconds: float
    quick: bool
    data: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Raises OSError."""
        content = {"rest_local_result": FORMAT, **asdict(self)}
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Result:
        """Raises ResultInvalid for a file that is no result, or of another format; OSError."""
        try:
            content = json.loads(path.read_bytes())
            found = content.pop("rest_local_result", None) if isinstance(content, dict) else None
        except (ValueError, RecursionError) as error:
            raise ResultInvalid(path, f"not JSON ({error})") from error
        if found is None:
            raise ResultInvalid(path, "not a result of `rest-local bench`")
        if found != FORMAT:
            raise ResultInvalid(path, f"format {found!r}, and this version reads format {FORMAT}; measure it again")
        try:
            machine = dict(content.pop("machine"))
            machine["features"] = tuple(machine.get("features", ()))
            return _checked(cls(machine=Machine(**machine), **{name: content[name] for name in _NAMES}))
        except (KeyError, TypeError, ValueError) as error:
            raise ResultInvalid(path, f"a field is missing or wrong ({error})") from error


_NAMES = tuple(field.name for field in fields(Result) if field.name != "machine")
_TEXTS = ("kind", "command", "version", "started")
_NUMBERS = ("cores", "memory_gb", "load")


def _checked(result: Result) -> Result:
    """The result. Raises TypeError for a field of a wrong type, because every reader relies on them."""
    machine, texts = result.machine, (str,)
    wanted: list[tuple[str, object, tuple[type, ...]]] = [
        *((name, getattr(result, name), texts) for name in _TEXTS),
        *((name, getattr(machine, name), texts) for name in ("processor", "system", "python", "accelerator")),
        *((name, getattr(machine, name), (int, float)) for name in _NUMBERS),
        *(("features", feature, texts) for feature in machine.features),
        ("libraries", machine.libraries or {}, (dict,)),
        ("seconds", result.seconds, (int, float)),
        ("quick", result.quick, (bool,)),
        ("data", result.data, (dict,)),
    ]
    for name, value, types in wanted:
        if not isinstance(value, types):
            raise TypeError(f"{name} is {type(value).__name__}")
    return result


def now() -> str:
    """The time for `Result.started`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Journal:
    """The finished units of a run, in a file of JSON lines that begins with the run's key.

    key   everything the figures depend on (options, files by hash); the version of rest-local is added
    """

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        """Open or begin the journal. Raises ResultInvalid if it belongs to another run, OSError."""
        self.path = path
        self._key = {"rest_local_journal": FORMAT, "version": rest_local.__version__, **key}
        self._units: dict[str, Any] = {}
        self.started, self.seconds = now(), 0.0
        self._since = time.monotonic()
        if path.exists():
            self._read()
        else:
            self._append({**self._key, "started": self.started})

    def __contains__(self, unit: str) -> bool:
        return unit in self._units

    def __getitem__(self, unit: str) -> Any:
        """What was measured. Raises KeyError."""
        return self._units[unit]

    def __len__(self) -> int:
        return len(self._units)

    def put(self, unit: str, data: Any) -> None:
        """Record a finished unit. Raises OSError."""
        self._units[unit] = data
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        self.seconds += seconds
        self._append({"unit": unit, "seconds": round(seconds, 3), "data": data})

    def finish(
        self, path: Path, *, kind: str, command: str, machine: Machine, quick: bool, data: Mapping[str, Any]
    ) -> Result:
        """Save the result of the complete run at `path`, and remove the journal. Raises OSError."""
        result = Result(
            kind=kind,
            command=command,
            machine=machine,
            version=rest_local.__version__,
            started=self.started,
            seconds=round(self.seconds, 1),
            quick=quick,
            data=data,
        )
        result.save(path)
        self.path.unlink(missing_ok=True)
        return result

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        try:
            head = json.loads(lines[0])
            self.started = head.pop("started")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultInvalid(self.path, "not the journal of a run; remove it to begin anew") from error
        wanted = json.loads(json.dumps(self._key))
        if other := sorted(name for name in {*head, *wanted} if head.get(name) != wanted.get(name)):
            differing = ", ".join(f"{name} was {head.get(name)!r}, now {wanted.get(name)!r}" for name in other)
            raise ResultInvalid(self.path, f"begun by another run ({differing}); remove it to begin anew")
        whole = 0
        for line in lines[1:]:
            try:
                found = json.loads(line)
                self._units[found["unit"]] = found["data"]
                self.seconds += found["seconds"]
            except (ValueError, KeyError, TypeError):  # cut off in the middle of a line: that unit is measured again
                break
            whole += len(line) + 1
        with self.path.open("r+b") as file:
            file.truncate(len(lines[0]) + 1 + whole)
