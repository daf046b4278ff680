"""One suite for every `World`: what code may rely on, in production and in simulation alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
import trio

from p2p.errors import StorageError, WorkerNotStarted
from p2p.identity import PeerId
from p2p.machine import open_world
from p2p.sandbox import Confinement
from p2p.world import World, first_seqno
from roles.workers.calls import decode_reply, encode_request
from sim.errors import SimForbidden
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.world import SimWorld
from tests.conformance.conftest import law_of

Body = Callable[[World], Awaitable[Any]]
TICK = 0.002  # seconds: the only real time these tests wait, and only in the real world


def run_real(body: Body) -> Any:
    async def main() -> Any:
        async with open_world() as world:
            return await body(world)

    return trio.run(main)


def run_simulated(body: Body) -> Any:
    async def main(simulation: Simulation) -> Any:
        return await body(SimWorld(simulation, "node"))

    return run_simulation(main, seed=1).value


@pytest.fixture(params=[run_real, run_simulated], ids=["real", "simulated"])
def run(request: pytest.FixtureRequest) -> Callable[[Body], Any]:
    return request.param


@law_of("run")
async def test_time_passes_by_what_was_slept(world: World) -> None:
    before = world.now()
    await world.sleep(TICK)
    assert world.now() >= before + TICK


@law_of("run")
async def test_a_deadline_that_has_passed_is_no_wait(world: World) -> None:
    with trio.fail_after(1):
        await world.sleep_until(world.now() - 5)
        await world.sleep(0)
        await world.sleep(-1)


@law_of("run")
async def test_sleep_can_be_cancelled_also_if_it_would_never_end(world: World) -> None:
    for seconds in (3600.0, float("inf")):
        with trio.move_on_after(TICK) as scope:
            await world.sleep_until(world.now() + seconds)
        assert scope.cancelled_caught


@law_of("run")
async def test_sleep_is_a_checkpoint_even_when_it_has_passed(world: World) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await world.sleep(0)
        pytest.fail("a cancelled task must not get past a sleep")
    assert scope.cancelled_caught


@law_of("run")
async def test_timers_fire_in_order_at_their_time(world: World) -> None:
    fired: list[tuple[str, bool]] = []
    done = trio.Event()
    start = world.now()
    for name, delay in (("late", 2 * TICK), ("early", TICK)):
        due = start + delay
        world.call_at(due, lambda name=name, due=due: fired.append((name, world.now() >= due)))
    world.call_at(start + 3 * TICK, done.set)
    await done.wait()
    assert fired == [("early", True), ("late", True)]


@law_of("run")
async def test_a_cancelled_timer_does_not_fire(world: World) -> None:
    fired: list[str] = []
    done = trio.Event()
    timer = world.call_at(world.now() + TICK, lambda: fired.append("no"))
    timer.cancel()
    timer.cancel()
    last = world.call_at(world.now() + 2 * TICK, done.set)
    await done.wait()
    last.cancel()
    assert fired == []


@law_of("run")
async def test_a_timer_in_the_past_fires_soon(world: World) -> None:
    done = trio.Event()
    world.call_at(world.now() - 10, done.set)
    with trio.fail_after(1):
        await done.wait()


@law_of("run")
async def test_generators_have_a_purpose(world: World) -> None:
    assert [world.rng("a").random() for _ in range(3)] != [
        world.rng("b").random() for _ in range(3)
    ]
    assert len(world.entropy(32)) == 32
    assert world.entropy(32) != world.entropy(32)


@law_of("run")
async def test_blocking_work_returns_and_raises_what_it_does(world: World) -> None:
    assert await world.run_blocking(sum, (1, 2, 3), cost=TICK) == 6
    with pytest.raises(ZeroDivisionError):
        await world.run_blocking(divmod, 1, 0, cost=TICK)


@law_of("run")
async def test_blocking_work_is_shielded(world: World) -> None:
    result = None
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def work() -> None:
                nonlocal result
                result = await world.run_blocking(sum, (4, 5), cost=TICK)

            nursery.start_soon(work)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            scope.cancel()
    assert result == 9


@law_of("run")
async def test_the_signer_signs_for_its_peer(world: World) -> None:
    signature = world.signer.sign("/shoal/test/1.0.0", b"payload")
    peer = world.signer.peer_id
    assert isinstance(peer, PeerId)
    for _ in range(2):  # the second verdict may be remembered
        assert world.verify(peer, "/shoal/test/1.0.0", b"payload", signature)
        assert not world.verify(peer, "/shoal/other/1.0.0", b"payload", signature)
        assert not world.verify(peer, "/shoal/test/1.0.0", b"payloae", signature)


@law_of("run")
async def test_files_hold_what_was_written(world: World) -> None:
    disk = world.disk
    await disk.write("a/b", b"hello world")
    await disk.write("a/b", b"HELLO", 0)
    await disk.append("a/b", b"!")
    assert await disk.read("a/b") == b"HELLO world!"
    assert await disk.read("a/b", 6, 5) == b"world"
    assert await disk.read("a/b", 11, 50) == b"!"
    assert await disk.size("a/b") == 12
    await disk.write("a/b", memoryview(b"short"))
    assert await disk.read("a/b") == b"short"
    await disk.write("hole", b"x", 4)
    assert await disk.read("hole") == b"\0\0\0\0x"


@law_of("run")
async def test_folders_are_listed(world: World) -> None:
    disk = world.disk
    for path in ("f/2", "f/1", "f/sub/3"):
        await disk.replace(path, b"")
    assert await disk.list("f") == ["1", "2", "sub"]
    assert await disk.list("nowhere") == []
    await disk.remove("f/sub")
    await disk.remove("f/sub")
    assert await disk.list("f") == ["1", "2"]


@law_of("run")
async def test_files_can_be_replaced_and_moved(world: World) -> None:
    disk = world.disk
    await disk.replace("x", b"1")
    await disk.replace("x", b"22")
    await disk.write("y", b"333")
    await disk.fsync("y")
    await disk.rename("y", "x")
    assert await disk.read("x") == b"333"
    assert await disk.size("y") is None


@law_of("run")
async def test_room_is_reserved_and_what_was_there_stays(world: World) -> None:
    disk = world.disk
    assert await disk.free() > 1000
    await disk.reserve("a/room", 5)
    assert await disk.read("a/room") == bytes(5)
    await disk.write("a/room", b"xy", 1)
    await disk.reserve("a/room", 7)
    await disk.reserve("a/room", 3)
    assert await disk.read("a/room") == b"\0xy\0\0\0\0"
    await disk.reserve("a/empty", 0)
    assert await disk.size("a/empty") == 0


@law_of("run")
async def test_a_folder_can_be_moved_to_where_nothing_is(world: World) -> None:
    disk = world.disk
    for path in ("old/a", "old/b/c", "taken/x"):
        await disk.write(path, path.encode())
    await disk.rename("old", "new")
    assert await disk.read("new/b/c") == b"old/b/c"
    assert await disk.list("old") == []
    with pytest.raises(StorageError):
        await disk.rename("new", "taken")


@law_of("run")
async def test_a_walk_finds_all_files_but_hidden_ones(world: World) -> None:
    disk = world.disk
    for path in ("w/b/c", "w/a", "w/.hidden", "w/.git/x", "w/b/.y", "wide"):
        await disk.write(path, b"123")
    before = await disk.walk("w", 10)
    assert [(e.path, e.size, e.is_plain) for e in before] == [("a", 3, True), ("b/c", 3, True)]
    assert await disk.walk("w", 10) == before
    assert len(await disk.walk("w", 1)) == 1
    await disk.write("w/a", b"124")
    assert await disk.walk("w", 10) != before
    assert [e.path for e in await disk.walk("w/a", 10)] == [""]
    assert list(await disk.walk("nothing", 10)) == []


@law_of("run")
async def test_a_folder_that_is_held_is_free_again_after_the_block(world: World) -> None:
    for _ in range(2):
        with world.disk.holding("h/lock"):
            await world.disk.write("h/file", b"x")
    assert world.cores >= 1


@law_of("run")
async def test_what_is_not_there_is_not_found(world: World) -> None:
    for read in (world.disk.read("no"), world.disk.fsync("no"), world.disk.rename("no", "yes")):
        with pytest.raises(FileNotFoundError):
            await read
    assert await world.disk.size("no") is None


@law_of("run")
async def test_paths_stay_inside(world: World) -> None:
    for path in ("/etc/passwd", "../up", "a/../../b"):
        with pytest.raises(ValueError, match="inside"):
            await world.disk.read(path)


@law_of("run")
async def test_production_never_misbehaves_on_purpose(world: World) -> None:
    world.trace("something", count=1, peer=world.signer.peer_id)
    world.sometimes("it happens", True)
    assert not any(world.buggify("site") for _ in range(100))


def test_a_full_simulated_disk_says_so() -> None:
    async def main(simulation: Simulation) -> None:
        world = SimWorld(simulation, "node")
        world.sim_disk.limit(10)
        await world.disk.write("a", b"123456")
        for write in (world.disk.write("b", b"12345"), world.disk.replace("b", b"12345")):
            with pytest.raises(StorageError, match="full"):
                await write
        await world.disk.write("a", b"1")
        await world.disk.write("b", b"12345")

    run_simulation(main, seed=1)


@law_of("run")
async def test_a_world_says_how_it_contains_workers(world: World) -> None:
    containment = await world.containment()
    assert containment.holds or containment.reason
    assert await world.containment() == containment


@law_of("run")
async def test_a_worker_that_must_be_contained_runs_contained_or_not_at_all(
    world: World,
) -> None:
    confined = Confinement()
    if isinstance(world, SimWorld):
        with pytest.raises(SimForbidden, match="a worker process"):
            world.open_worker(["x"], name="x", confined=confined)
        return
    argv = ["tests.attacks.spies"]
    if not (await world.containment()).holds:
        with pytest.raises(WorkerNotStarted, match="must not run uncontained"):
            async with world.open_worker(argv, name="x", confined=confined):
                pytest.fail("it runs")
        return
    async with world.open_worker(argv, name="x", confined=confined) as worker:
        for path, said in (("/tmp/its-own", "open"), ("/new", "OSError")):
            reply = await worker.call(encode_request("knock", "write", path))
            assert decode_reply(reply) == said


def test_no_process_repeats_a_sequence_number_while_the_disk_is_full() -> None:
    async def main(simulation: Simulation) -> list[int]:
        world = SimWorld(simulation, "node")
        firsts = []
        for capacity in (1000, 0, 0, 1000):
            world.sim_disk.limit(capacity)
            firsts.append(await first_seqno(world, "seqno"))
            await world.sleep(60)
        return firsts

    firsts = run_simulation(main, seed=1).value
    gaps = [after - before for before, after in pairwise(firsts)]
    assert min(gaps) >= 60_000
