"""The pool of models: what is loaded, started again and unloaded, and when; with processes that are none."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local.api.errors import ApiError
from rest_local.errors import QueueFull
from rest_local.router.memory import Need
from rest_local.router.pool import Entry, Pool
from rest_local.router.process import ModelProcessFailed
from tests.router.fake_processes import PATIENCE, FakeProcess, looped, served, turns, use

PoolOf = Callable[..., Pool]


@looped
async def test_a_pool_that_closes_while_a_need_is_read_refuses_the_requests(
    fakes: list[FakeProcess], tmp_path: Path
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def need() -> Need:
        reading.set()
        assert go_on.wait(PATIENCE)
        return Need(1, 0, 0)

    pool = Pool([served("one", tmp_path, need)], limit=10)
    using = asyncio.create_task(use(pool, pool.entries[0]))
    await asyncio.to_thread(reading.wait, PATIENCE)
    closing = asyncio.create_task(pool.close())
    await turns()
    go_on.set()
    await closing
    with pytest.raises((ModelProcessFailed, ApiError)):
        await using
    assert all(each.is_ended for each in fakes)


@looped
async def test_a_pool_closes_although_a_request_never_ends(pool_of: PoolOf) -> None:
    """Its client does not read, the stop is forced, and another model waits for its room."""
    pool = pool_of("one", "two", limit=1)
    one, two = pool.entries
    async with pool.using(one):
        waiting = asyncio.create_task(use(pool, two))
        while not one.leaving:
            await asyncio.sleep(0.001)
        await pool.close()
    with pytest.raises((ModelProcessFailed, ApiError)):
        await waiting


@looped
async def test_a_process_that_ends_while_it_was_to_be_unloaded_stays_so(
    pool_of: PoolOf, fakes: list[FakeProcess]
) -> None:
    """It is not started again, which would unload the model that got its room."""
    pool = pool_of("one", "two", limit=1)
    one, two = pool.entries
    async with pool.using(one) as process:
        waiting = asyncio.create_task(use(pool, two))
        while not one.leaving:
            await asyncio.sleep(0.001)
        process.end()  # type: ignore[attr-defined]
    await waiting
    await turns()
    assert (one.status, two.status) == ("unloaded", "loaded")
    assert len(fakes) == 2
    await pool.close()


@looped
async def test_a_process_that_has_ended_is_started_again_by_a_request(
    pool_of: PoolOf, fakes: list[FakeProcess]
) -> None:
    pool = pool_of("one")
    await use(pool, pool.entries[0])
    fakes[0].end()
    await turns()
    assert (pool.entries[0].status, len(fakes)) == ("unloaded", 1)
    await use(pool, pool.entries[0])
    assert (pool.entries[0].status, len(fakes)) == ("loaded", 2)
    await pool.close()


@looped
async def test_as_many_requests_wait_for_a_load_as_the_queue_holds(pool_of: PoolOf) -> None:
    FakeProcess.gate.clear()

    pool = pool_of("one", queue=3)
    waiting = [asyncio.create_task(use(pool, pool.entries[0])) for _ in range(3)]
    await turns()
    with pytest.raises(QueueFull):
        await use(pool, pool.entries[0])
    FakeProcess.gate.set()
    await asyncio.gather(*waiting)
    await use(pool, pool.entries[0])
    await pool.close()


@looped
async def test_a_look_is_no_use(pool_of: PoolOf) -> None:
    """A model that a monitor looks at is idle all the same."""
    pool = pool_of("one")
    entry = pool.entries[0]
    await use(pool, entry)
    entry.used_at = 7.0
    async with pool.using(entry, load=False):
        assert entry.users == 1, "not unloaded meanwhile"
    assert entry.used_at == 7.0
    await use(pool, entry)
    assert entry.used_at > 7.0
    await pool.close()


@looped
async def test_room_is_made_by_models_that_are_not_in_use(pool_of: PoolOf) -> None:
    """They were used later, but otherwise the request would wait for a running answer."""
    pool = pool_of("one", "two", "three", limit=2)
    one, two, three = pool.entries
    async with pool.using(one):
        await use(pool, two)
        await use(pool, three)
        assert [entry.status for entry in pool.entries] == ["loaded", "unloaded", "loaded"]
    await pool.close()


@looped
async def test_a_model_in_use_is_not_idle_however_long_that_takes(pool_of: PoolOf, fakes: list[FakeProcess]) -> None:
    """Its new requests would wait for its running answers, and for another load."""
    pool = pool_of("one", idle=0.001)
    pool.start()
    entry = pool.entries[0]
    async with pool.using(entry):
        for _ in range(20):  # each longer than the time between two looks, and than `idle`
            await asyncio.sleep(0.002)
            assert entry.status == "loaded"
        await use(pool, entry)
    while entry.status != "unloaded":
        await asyncio.sleep(0.001)
    assert len(fakes) == 1
    await pool.close()


@looped
async def test_requests_that_waited_for_a_load_come_before_the_next_load(
    pool_of: PoolOf, fakes: list[FakeProcess]
) -> None:
    """Models that take turns in the same room serve a request each time, so that none waits for ever."""
    answered: list[str] = []

    async def ask(pool: Pool, entry: Entry) -> None:
        async with pool.using(entry):
            answered.append(entry.setup.name)

    pool = pool_of("one", "two", "three", limit=1)
    await asyncio.gather(*(ask(pool, entry) for _ in range(4) for entry in pool.entries))
    assert answered == ["one"] * 4 + ["two"] * 4 + ["three"] * 4
    assert len(fakes) == 3
    await pool.close()


@looped
async def test_the_least_recently_used_model_makes_room(pool_of: PoolOf) -> None:
    pool = pool_of("one", "two", "three", limit=2)
    one, two, three = pool.entries
    for entry in (one, two, one, three):
        await use(pool, entry)
    assert [entry.status for entry in pool.entries] == ["loaded", "unloaded", "loaded"]
    await use(pool, two)
    assert [entry.status for entry in pool.entries] == ["unloaded", "loaded", "loaded"]
    await pool.close()


@looped
async def test_a_model_in_use_is_unloaded_when_its_answer_has_ended(pool_of: PoolOf, fakes: list[FakeProcess]) -> None:
    """Its process is told nothing before; requests that come meanwhile wait until it is loaded again."""
    pool = pool_of("one", "two", limit=1)
    one, two = pool.entries
    async with pool.using(one):
        other = asyncio.create_task(use(pool, two))
        while not one.leaving:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(use(pool, one))
        await turns()
        assert (one.waiting, one.users, fakes[0].stopping) == (1, 1, False)
    await asyncio.gather(other, late)
    assert (one.status, two.status, len(fakes)) == ("loaded", "unloaded", 3)
    await pool.close()


@looped
async def test_a_model_that_can_never_fit_is_refused_with_the_figures(
    pool_of: PoolOf, fakes: list[FakeProcess], tmp_path: Path
) -> None:
    pool = pool_of("one", limit=2 << 30)
    pool.entries.append(served("large", tmp_path, lambda: Need(3 << 30, 0, 0)))
    await use(pool, pool.entries[0])
    with pytest.raises(ApiError, match=r"3\.2 GB.*2\.1 GB") as caught:
        await use(pool, pool.entries[1])
    assert (caught.value.status, caught.value.code) == (400, "model_too_large")
    assert [entry.status for entry in pool.entries] == ["loaded", "unloaded"], "nothing was unloaded for it"
    await pool.close()


@looped
@pytest.mark.parametrize("another_waits", [False, True])
async def test_a_model_that_has_room_does_not_wait_for_the_answer_of_another(
    pool_of: PoolOf, another_waits: bool
) -> None:
    """The other one is to be unloaded, or another model waits for its room."""
    pool = pool_of("busy", "large", "small", limit=3)
    busy, large, small = pool.entries
    large.need = lambda: Need(3, 0, 0)
    async with pool.using(busy):
        waiting = asyncio.create_task(use(pool, large) if another_waits else pool.unload(busy))
        while not busy.leaving:
            await asyncio.sleep(0.001)
        await use(pool, small)
        assert busy.users == 1
    await waiting
    if another_waits:
        assert [entry.status for entry in pool.entries] == ["unloaded", "loaded", "unloaded"]
    await pool.close()
