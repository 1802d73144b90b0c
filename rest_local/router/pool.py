"""The models of a server and their processes: loaded on demand, restarted after a crash, unloaded for room or idleness.

    async with pool.using("qwen") as process: ...

Contract:

- A model is loaded by the first request that names it; the others wait for the same load. Waiting requests are not
  users of the model, so no model is kept or unloaded because of them.
- The memory that a model needs is estimated before it is loaded. If that alone exceeds the limit, it is refused. Else
  the least recently used models are unloaded until there is room. One that is in use is unloaded when its running
  answers have ended, and its new requests wait until it is loaded again. Models for which there is room are loaded
  meanwhile, but not the one that made room, so the waiting model gets it in the end.
- Loading may fail although the file has a sane header, as on a GPU whose memory is full. If other models are loaded,
  those without users are unloaded and it is tried once more.
- The next request starts a process again that has ended by itself.

All methods must be called in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rest_local.api.errors import ApiError, loading, no_such_model
from rest_local.api.models import find_name
from rest_local.catalog.quantization import in_bytes
from rest_local.errors import QueueFull, RestLocalError
from rest_local.router.memory import Need
from rest_local.router.process import ModelProcess, ModelProcessFailed, Setup

log = logging.getLogger("rest_local.server")

LOOK_SECONDS = 1.0  # idle models are looked for at least this often


@dataclass
class Entry:
    """A model that can be served, and its process."""

    setup: Setup
    path: Path  # the first file
    need: Callable[[], Need]  # called before each load, because the file may have changed
    aliases: tuple[str, ...] = ()
    process: ModelProcess | None = None
    loading: asyncio.Task[ModelProcess] | None = None
    users: int = 0  # requests that use the process
    waiting: int = 0  # requests that wait until it is loaded
    used_at: float = 0.0  # the last request ended then
    leaving: bool = False  # it is to be unloaded, so new requests wait
    makes_room_for: Entry | None = None  # the model that takes its place
    taken: int = 0  # estimated bytes of the loaded model
    meta: dict[str, object] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return all names, aliases first."""
        return list(dict.fromkeys([*self.aliases, self.setup.name]))

    @property
    def status(self) -> str:
        """Return `loaded`, `loading`, `unloading` or `unloaded`."""
        if self.process is not None:
            return "unloading" if self.leaving else "loaded" if self.process.is_serving else "loading"
        return "loading" if self.loading is not None else "unloaded"


class Pool:
    """The models of one server, the default one first.

    Args:
        limit: bytes that all models may take together; None: any
        idle: seconds without a request after which a model is unloaded; None: never
        queue: requests that may wait for a model to be loaded
    """

    def __init__(
        self, entries: Sequence[Entry], *, limit: int | None = None, idle: float | None = None, queue: int = 64
    ) -> None:
        self.entries = list(entries)
        self.idle, self._limit, self._queue = idle, limit, queue
        self._changed = asyncio.Event()  # replaced at every change (`_tell_changed`)
        self._load_lock = asyncio.Lock()  # one model is loaded at a time, in the order of the requests
        self._waits_for_room: Entry | None = None  # the model that waits for room
        self._freed = 0  # bytes that were freed for it
        self._idle_task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        if self.idle is not None:
            self._idle_task = asyncio.create_task(self._unload_idle(self.idle))

    def entry(self, name: str | None, *, anything: bool = False) -> Entry:
        """Return the model of that name, or the default for None. Raises ApiError 404.

        With `anything`, an unknown name means the default, too.
        """
        if not name:
            return self.entries[0]
        for entry in self.entries:
            if find_name(name, entry.names):
                return entry
        if anything:
            return self.entries[0]
        raise no_such_model()

    @contextlib.asynccontextmanager
    async def using(self, entry: Entry, *, load: bool = True) -> AsyncIterator[ModelProcess]:
        """Yield the model's process, which is not unloaded meanwhile.

        Loads the model if need be. With `load` false it does not, and the call does not count as use: the model may be
        idle. Raises ModelProcessFailed, ApiError 400 (too large), 503 (stopping, or not loaded), QueueFull.
        """
        process = await self._process(entry, load)
        entry.users += 1
        try:
            yield process
        finally:
            entry.users -= 1
            if load:
                entry.used_at = time.monotonic()
            self._tell_changed()

    async def load(self, entry: Entry) -> None:
        """Load a model unless it is loaded. Raises what `using` raises."""
        await self._process(entry)

    async def unload(self, entry: Entry) -> None:
        """Unload a model when its running answers have ended. Does nothing if it is not loaded."""
        if entry.loading is not None and not entry.leaving:
            await asyncio.wait([entry.loading])
        await self._unload(entry)

    def begin_stop(self) -> None:
        """Let all processes end their running answers and take no other requests."""
        self._closing = True
        for entry in self.entries:
            if entry.process is not None:
                entry.process.begin_stop()
        self._tell_changed()

    def kill(self) -> None:
        self._closing = True
        for entry in self.entries:
            if entry.process is not None:
                entry.process.kill()

    async def close(self) -> None:
        """Stop all processes, let their running answers end, and wait for that.

        A load that is going on is not cancelled, because its process would outlive it. It fails by itself.
        """
        self.begin_stop()
        tasks: list[Awaitable[object]] = [entry.loading for entry in self.entries if entry.loading is not None]
        if self._idle_task is not None:
            self._idle_task.cancel()
            tasks.append(self._idle_task)
        stops = [entry.process.stop() for entry in self.entries if entry.process is not None]
        await asyncio.gather(*stops, *tasks, return_exceptions=True)

    async def _process(self, entry: Entry, load: bool = True) -> ModelProcess:
        while True:
            if self._closing:
                raise ApiError(503, "the server is stopping", code="busy", headers={"retry-after": "1"})
            process = entry.process
            if process is not None and process.is_serving and not entry.leaving:
                return process
            if not load:
                raise loading()
            if entry.waiting >= self._queue:
                raise QueueFull(self._queue)
            entry.waiting += 1
            try:
                await asyncio.shield(self._load_in_background(entry))
            finally:
                entry.waiting -= 1

    def _load_in_background(self, entry: Entry) -> asyncio.Task[ModelProcess]:
        """Return the load that is going on, or start a new one."""
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry))
            entry.loading.add_done_callback(lambda task: self._on_loaded(entry, task))
        return entry.loading

    def _on_loaded(self, entry: Entry, task: asyncio.Task[ModelProcess]) -> None:
        entry.loading = None
        error = None if task.cancelled() else task.exception()
        if error is not None and not entry.waiting and not self._closing:  # no waiting request reports it
            log.warning("%s", error)

    async def _load(self, entry: Entry) -> ModelProcess:
        if (first := entry.makes_room_for) is not None and first.loading is not None:
            await asyncio.wait([first.loading])
        entry.makes_room_for = None
        try:
            return await self._load_in_turn(entry)
        finally:
            if self._waits_for_room is entry:
                self._waits_for_room, self._freed = None, 0

    async def _load_in_turn(self, entry: Entry) -> ModelProcess:
        while True:
            async with self._load_lock:
                if entry.process is None:
                    other = await self._in_the_way(entry)
                elif entry.process.is_serving and not entry.leaving:
                    return entry.process
                else:
                    other = entry
                if other is None:
                    return await self._start_with_room(entry)
                first = None
                if self._waits_for_room is not None and self._waits_for_room is not entry and other is not entry:
                    first = self._waits_for_room.loading
                if first is None:
                    other.leaving = True
                    if other is not entry:
                        self._waits_for_room, other.makes_room_for = entry, entry
            # Answers may take minutes. Models that have room can be loaded meanwhile.
            await (self._unload(other) if first is None else asyncio.wait([first]))

    async def _start_with_room(self, entry: Entry) -> ModelProcess:
        """Start the model, and if that fails, unload the idle models and try once more."""
        try:
            return await self._start(entry)
        except ModelProcessFailed as error:
            idle = [each for each in self.entries if each.process is not None and not each.users]
            if not idle or self._closing:
                raise
            try:
                await asyncio.to_thread(entry.need)
            except (OSError, RestLocalError):  # no amount of room makes this file loadable
                raise error from None
            names = ", ".join(each.names[0] for each in idle)
            log.warning("model %s could not be loaded; it is tried without %s", entry.setup.name, names)
            for each in idle:
                await self._unload(each)
            return await self._start(entry)

    async def _start(self, entry: Entry) -> ModelProcess:
        """Start a process and wait until it has loaded the model. Raises ModelProcessFailed."""
        process = ModelProcess(entry.setup, lambda ended: self._on_end(entry, ended))
        entry.process, entry.leaving = process, False
        try:
            if self._closing:
                process.begin_stop()
            await process.start()
        except ModelProcessFailed:
            await process.stop()
            if entry.process is process:
                entry.process = None
            raise
        entry.meta, entry.used_at = process.meta, time.monotonic()
        log.info("model loaded", extra={"fields": {"event": "loaded", "model": entry.names[0]}})
        self._tell_changed()
        return process

    async def _in_the_way(self, entry: Entry) -> Entry | None:
        """Return the model that must leave to make room, or None if there is room. Raises ApiError 400, 500.

        It is the least recently used one, or the one that waits for room.
        """
        if self._limit is None:
            return None
        try:
            need = await asyncio.to_thread(entry.need)
        except (OSError, RestLocalError) as error:
            raise ModelProcessFailed(f"model {entry.setup.name}: {error}") from error
        entry.taken = need.total
        if need.total > self._limit:
            raise ApiError(
                400,
                f"model {entry.setup.name} needs {need}, and `memory` allows {in_bytes(self._limit)}",
                code="model_too_large",
                param="model",
            )
        loaded = [each for each in self.entries if each is not entry and each.process is not None]
        freed = 0 if self._waits_for_room is entry else self._freed
        if sum(each.taken for each in loaded) + freed + need.total <= self._limit:
            return None
        return min(loaded, key=lambda each: (each.users > 0, each.used_at), default=self._waits_for_room)

    async def _unload(self, entry: Entry) -> None:
        """Wait until no request uses the process, and stop it."""
        process = entry.process
        if process is None:
            return
        entry.leaving = True
        while entry.users and entry.process is process and not self._closing:
            await self._changed.wait()
        if entry.process is process:
            await process.stop()
            entry.process = None
            if entry.makes_room_for is not None and entry.makes_room_for is self._waits_for_room:
                self._freed += entry.taken
            log.info("model unloaded", extra={"fields": {"event": "unloaded", "model": entry.names[0]}})
        entry.leaving = False

    async def _unload_idle(self, idle: float) -> None:
        while True:
            await asyncio.sleep(min(idle / 4, LOOK_SECONDS))
            for entry in self.entries:
                if self._is_idle(entry, idle):
                    async with self._load_lock:
                        if self._is_idle(entry, idle):
                            await self._unload(entry)

    @staticmethod
    def _is_idle(entry: Entry, idle: float) -> bool:
        return entry.status == "loaded" and not entry.users and time.monotonic() - entry.used_at > idle

    def _on_end(self, entry: Entry, process: ModelProcess) -> None:
        """Note that a process has ended by itself. The next request starts another."""
        if process.stopping or entry.process is not process or not process.loaded_at:
            return
        entry.process, entry.leaving = None, False
        self._tell_changed()
        log.error(
            "the process of the model ended by itself",
            extra={"fields": {"event": "crash", "model": entry.names[0], "how": process.how_it_ended()}},
        )

    def _tell_changed(self) -> None:
        """Wake the tasks that wait until a model is no longer used."""
        self._changed.set()
        self._changed = asyncio.Event()
