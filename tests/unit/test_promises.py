"""What a worker has promised to work under: kept, missed, excused, and what it may choose."""

from __future__ import annotations

import pytest

from p2p.identity import PeerId
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from roles.inference.promise import WorkPromise
from roles.protocol.core.lots import Window
from roles.protocol.core.standing import FEWER, MISSES_APART, usual_places
from roles.shared.durable import Durable
from roles.trainer.core.promises import LATE, Miss, WorkPromises
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.world import SimWorld
from tests.unit.test_lots import window
from tests.unit.test_standing import ANNA, name, proven

LAG = 2
STEP = 240.0
LINKS = 60
"""Of a step."""


class Trainer:
    """Publishes a policy each step, and hears of windows."""

    def __init__(self, *workers: PeerId, step: int = 0) -> None:
        self.standings = proven(*(workers or (ANNA,)))
        self.book = WorkPromises(self.standings, LAG)
        self.step = step
        self.missed: list[Miss] = []
        self.has_witness = self.is_asked = True
        self.publish()

    @property
    def now(self) -> float:
        return self.step * STEP

    def publish(self) -> None:
        self.book.publish(PolicyVersion(self.step), (1, LINKS * self.step), self.now)
        self.missed += self.book.close(
            *(self.now, self.now),
            lambda *_: self.has_witness,
            lambda *_: self.is_asked,
        )

    def go_on(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.publish()

    def window(
        self,
        due: int | None = None,
        *,
        places: int = 16,
        first: int = 0,
        version: int | None = None,
        late: int = 0,
        node: PeerId = ANNA,
    ) -> Window:
        """One that is committed to soon after its policy is out, or some links ``late``."""
        number = self.step if version is None else version
        return window(
            node=node,
            version=PolicyVersion(number),
            first=first,
            contents=(b"c" * 32,) * places,
            teaching=0,
            chain=1,
            link=LINKS * number + 1 + late,
            due=number + 1 if due is None else due,
        )

    def work_late(self, due: int) -> None:
        """As `work`, but the window is committed to when the next policy is out already."""
        self.go_on()
        self.book.note(self.window(due, version=self.step - 1, late=LINKS))

    def work(self, due: int | None = None, **kinds: int) -> None:
        """A worker commits to a window, and the next policy is out."""
        self.book.note(self.window(due, **kinds))
        self.go_on()


def test_a_policy_that_is_left_out_is_missed_once_it_is_over_and_a_second_one_ends_all() -> (
    None
):
    trainer = Trainer()
    trainer.go_on()
    trainer.work()
    trainer.go_on()
    assert not trainer.missed
    for _ in range(4):
        trainer.work()
    assert [(one.version, one.has_ended) for one in trainer.missed] == [(2, False)]
    assert trainer.standings.is_proven(ANNA, trainer.now)
    assert trainer.standings.share_of(ANNA, trainer.now) == 1.0, "a doubt"
    trainer.go_on()
    for _ in range(4):
        trainer.work()
    assert [one.has_ended for one in trainer.missed] == [False, True]
    assert not trainer.standings.is_proven(ANNA, trainer.now)


def test_a_machine_that_is_switched_off_misses_once() -> None:
    trainer = Trainer()
    for _ in range(MISSES_APART):
        trainer.work()
    trainer.go_on(100)
    for _ in range(MISSES_APART):
        trainer.work()
    assert len(trainer.missed) == 1
    assert trainer.standings.is_proven(ANNA, trainer.now)


def test_a_slow_worker_that_says_so_in_time_leaves_nothing_out() -> None:
    trainer = Trainer()
    for _ in range(20):
        trainer.work(trainer.step + 2)
        trainer.go_on()
    assert not trainer.missed


def test_windows_may_come_in_any_order_until_the_policy_is_over() -> None:
    """A witness that was down told of the window before the last after the last one."""
    trainer = Trainer()
    trainer.work()
    early = trainer.window()
    trainer.go_on()
    trainer.work()
    trainer.book.note(early)
    trainer.go_on(LAG)
    assert not any(one.version == early.version for one in trainer.missed)


def test_what_is_promised_once_the_policy_is_out_does_not_count() -> None:
    """Whoever may name a policy after looking at what it drew there names the best one."""
    trainer = Trainer()
    trainer.work()
    trainer.work()
    trainer.work_late(4)
    assert trainer.book.is_promised(ANNA, PolicyVersion(3)), "whatever it says"
    trainer.go_on(LAG + 2)
    assert [one.version for one in trainer.missed] == [3]


def test_a_worker_too_slow_to_say_it_in_time_goes_on_in_its_stride() -> None:
    """Its first window under a policy comes when the next one is out."""
    trainer = Trainer()
    for _ in range(20):
        trainer.work_late(trainer.step + 2)
        trainer.go_on()
    assert not trainer.missed
    assert not trainer.book.is_promised(ANNA, PolicyVersion(39))
    trainer.work_late(41)
    trainer.go_on(LAG + 3)
    assert [one.version for one in trainer.missed] == [42], "as always, though it says 41"


def test_work_under_a_policy_that_was_not_named_is_not_learnt_from() -> None:
    trainer = Trainer()
    trainer.work()
    trainer.work(trainer.step + 2)
    assert not trainer.book.is_promised(ANNA, PolicyVersion(trainer.step))
    trainer.work(trainer.step + 5)
    assert trainer.book.is_promised(ANNA, PolicyVersion(trainer.step))
    trainer.work()
    trainer.go_on(LAG + 1)
    assert not trainer.missed
    assert trainer.standings.promise(ANNA) == (3, 4)


@pytest.mark.parametrize(
    ("places", "misses"), [(64 - 64 // FEWER, 0), (64 - 64 // FEWER - 1, 1)]
)
def test_whoever_ends_its_work_where_it_likes_has_left_something_out(
    places: int, misses: int
) -> None:
    """It stopped where its rewards were at their best: 6 % more reward."""
    trainer = Trainer()
    trainer.go_on()
    for filled in (64, 64, places):
        for first in range(0, filled, 16):
            trainer.book.note(trainer.window(first=first, places=min(16, filled - first)))
        trainer.go_on()
    trainer.go_on(LAG + 1)
    assert [one.version for one in trainer.missed if one.version <= 3] == misses * [3]


def test_what_is_usual_follows_the_time_that_a_policy_lasts() -> None:
    assert usual_places(64, 240.0, 240.0) == 64
    assert usual_places(64, 240.0, 60.0) == 16
    assert usual_places(64, 240.0, 2_400.0) == 64, "a trainer may rest"
    assert usual_places(64, 0.0, 240.0) == 0, "nobody knows"


def test_a_miss_is_excused_where_it_may_not_be_the_workers() -> None:
    """No witness; not asked for; or the trainer has lost what it knew."""
    for excuse in ("has_witness", "is_asked"):
        trainer = Trainer()
        trainer.go_on()
        trainer.work()
        setattr(trainer, excuse, False)
        trainer.go_on(LAG + 2)
        assert not trainer.missed
        assert trainer.standings.promise(ANNA)[1] == -1
    trainer = Trainer()
    trainer.work()
    trainer.go_on()
    trainer.book = WorkPromises(trainer.standings, LAG)
    trainer.publish()
    trainer.go_on(LAG + 2)
    assert not trainer.missed


def test_strangers_make_no_records_and_closed_policies_are_forgotten() -> None:
    trainer = Trainer()
    for number in range(100):
        trainer.book.note(trainer.window(node=name(1_000 + number)))
    assert not trainer.book._rounds
    for _ in range(50):
        trainer.work()
    assert len(trainer.book._rounds) <= LAG + 2
    trainer.book.note(trainer.window(version=3))
    assert 3 not in trainer.book._rounds
    assert LATE < STEP


# The worker's side.


def test_a_worker_takes_up_what_it_named_and_goes_on_till_then() -> None:
    async def main(simulation: Simulation) -> None:
        world = SimWorld(simulation, "worker")
        durable = Durable(world, "inference")

        def opened() -> WorkPromise:
            return WorkPromise(world, "promise", durable, lambda one, later: later - one)

        def choose(promise: WorkPromise, newest: int, filled: int = 99, held: int = 0) -> int:
            return promise.choose(
                PolicyVersion(newest),
                LAG,
                lambda version: version >= held,
                lambda version, least: filled < least,
            )

        promise = opened()
        await promise.recall()
        assert choose(promise, 4) == 4
        await promise.begin(PolicyVersion(4), 0)
        assert await promise.make(PolicyVersion(4), PolicyVersion(4)) == 5
        assert await promise.make(PolicyVersion(4), PolicyVersion(6)) == 5, "once said"
        assert choose(promise, 5) == 5
        assert choose(promise, 6) == 5, "what was named, though there is a newer one"
        assert choose(promise, 6, held=6) == 6, "it is not here"
        assert choose(promise, 8) == 8, "it is stale"
        await promise.begin(PolicyVersion(5), 64)
        promise = opened()
        await promise.recall()
        assert await promise.make(PolicyVersion(5), PolicyVersion(6)) == 6, "too late for 7"
        await promise.begin(PolicyVersion(9), 64)
        assert await promise.make(PolicyVersion(9), PolicyVersion(10)) == 11, "it is free"
        assert choose(promise, 10) == 9
        assert choose(promise, 11) == 11
        await promise.begin(PolicyVersion(11), 64)
        assert await promise.make(PolicyVersion(11), PolicyVersion(12)) == 13, "its stride"


def test_a_worker_fills_as_many_places_as_under_the_last_policy() -> None:
    async def main(simulation: Simulation) -> None:
        world = SimWorld(simulation, "worker")
        promise = WorkPromise(
            *(world, "promise", Durable(world, "inference")), lambda one, later: later - one
        )

        def choose(newest: int, filled: int) -> int:
            return promise.choose(
                *(PolicyVersion(newest), LAG, lambda _: True),
                lambda _, least: filled < least,
            )

        await promise.begin(PolicyVersion(7), 64)
        await promise.begin(PolicyVersion(8), 64)
        await promise.make(PolicyVersion(8), PolicyVersion(8))
        assert choose(9, 61) == 8, "as many as under the last one"
        assert choose(9, 62) == 9
        assert choose(10, 0) == 9, "there is no time"
        assert await promise.make(PolicyVersion(7), PolicyVersion(9)) == 8

    run_simulation(main, seed=1, horizon=1_000)


def test_a_worker_without_a_promise_takes_the_newest() -> None:
    world: SimWorld = SimWorld(Simulation(1), "worker")
    promise = WorkPromise(world, "promise", Durable(world, "inference"), lambda *_: 0.0)
    assert promise.choose(PolicyVersion(3), LAG, lambda _: True, lambda *_: False) == 3
    assert promise._working == NO_POLICY


def test_a_promise_that_has_rotted_is_none() -> None:
    async def main(simulation: Simulation) -> None:
        world = SimWorld(simulation, "worker")
        durable = Durable(world, "inference")
        promise = WorkPromise(world, "promise", durable, lambda *_: 0.0)
        await promise.begin(PolicyVersion(4), 9)
        data = bytearray(await world.disk.read("promise"))
        data[-2] ^= 1
        await world.disk.replace("promise", bytes(data))
        promise = WorkPromise(world, "promise", durable, lambda *_: 0.0)
        await promise.recall()
        assert promise._working == NO_POLICY
        assert await world.disk.size("promise") is None

    run_simulation(main, seed=1, horizon=1_000)
