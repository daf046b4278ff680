"""What tasks wait for, who may be in a method at a time, and what is inside groups."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2p.concurrency import AutoResetEvent, ConflictDetector, Notifier


async def test_all_that_wait_are_notified_and_later_ones_wait_on() -> None:
    notifier, woken = Notifier(), []

    async def wait(name: str) -> None:
        await notifier.wait()
        woken.append(name)

    notifier.notify_all()  # no task waits: forgotten
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "one")
        nursery.start_soon(wait, "other")
        await wait_all_tasks_blocked()
        notifier.notify_all()
        nursery.start_soon(wait, "late")
        await wait_all_tasks_blocked()
        assert sorted(woken) == ["one", "other"]
        nursery.cancel_scope.cancel()
    notifier.notify_all()
    assert sorted(woken) == ["one", "other"]  # who was cancelled is forgotten


async def test_a_set_event_is_remembered_until_a_task_has_waited() -> None:
    event = AutoResetEvent()
    event.set()
    event.set()
    await event.wait()
    with trio.move_on_after(0.01) as patience:
        await event.wait()
    assert patience.cancelled_caught
    event.set()
    event.clear()
    with trio.move_on_after(0.01) as patience:
        await event.wait()
    assert patience.cancelled_caught
    event.set()
    await event.wait()


def test_a_block_has_one_task_at_a_time() -> None:
    detector = ConflictDetector("sending on this stream")
    with detector:
        assert detector.is_busy
        with pytest.raises(trio.BusyResourceError, match="another task is sending"), detector:
            pass
        assert detector.is_busy  # who was refused ends nothing
    with pytest.raises(KeyError), detector:
        raise KeyError
    assert not detector.is_busy
