"""What a crash takes away, and what it must not."""

from __future__ import annotations

from random import Random

from hypothesis import given, strategies as st

from sim.node.disk import SimDisk


def test_a_crash_takes_back_every_write_since_the_last_fsync() -> None:
    disk = SimDisk("node")
    disk.write_now("f", b"0123456789", None)
    disk.sync_now("f")
    disk.write_now("f", b"abc", 2)
    disk.write_now("f", b"tail", 12)
    disk.write_now("f", b"new", None)
    disk.append_now("f", b"er")
    assert disk.read_now("f", 0, None) == b"newer"
    disk.crash()
    assert disk.read_now("f", 0, None) == b"0123456789"


def test_a_removed_file_comes_back_unless_its_folder_was_synced() -> None:
    for sync in (False, True):
        disk = SimDisk("node")
        for name in ("d/a", "d/b"):
            disk.replace_now(name, b"x")
        disk.remove_now("d/a")
        if sync:
            disk.sync_now("d/b")
        disk.crash()
        assert disk.paths() == (["d/b"] if sync else ["d/a", "d/b"])


def test_a_bit_flips_durably() -> None:
    disk = SimDisk("node")
    disk.replace_now("f", b"\x00\x00")
    disk.corrupt("f", 3)
    disk.crash()
    assert disk.read_now("f", 0, None) == b"\x00\x01"


PATHS = st.sampled_from(["a", "b", "d/c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), PATHS, st.binary(max_size=4), st.none() | st.integers(0, 6)
        ),
        st.tuples(st.just("sync"), PATHS),
        st.tuples(st.just("remove"), PATHS),
        st.tuples(st.just("replace"), PATHS, st.binary(max_size=4)),
    ),
    max_size=12,
)


def play(disk: SimDisk, step: tuple) -> None:
    try:
        getattr(disk, f"{step[0]}_now")(*step[1:])
    except FileNotFoundError:
        assert step[0] == "sync"


@given(STEPS)
def test_used_bytes_are_the_bytes_of_all_files(steps: list[tuple]) -> None:
    disk = SimDisk("node")
    for step in steps:
        play(disk, step)
        assert disk.used == sum(disk.size_now(path) or 0 for path in disk.paths())
    disk.crash()
    assert disk.used == sum(disk.size_now(path) or 0 for path in disk.paths())


@given(STEPS, st.integers(0, 5))
def test_what_is_synced_last_survives_any_crash(steps: list[tuple], seed: int) -> None:
    disk = SimDisk("node")
    for step in steps:
        play(disk, step)
    for path in disk.paths():
        disk.sync_now(path)
    before = {path: disk.read_now(path, 0, None) for path in disk.paths()}
    disk.write_now("other", b"x", None)
    disk.crash(Random(seed) if seed else None)
    assert {
        path: disk.read_now(path, 0, None) for path in disk.paths() if path in before
    } == before


def test_a_torn_write_keeps_a_beginning() -> None:
    seen = set()
    for seed in range(30):
        disk = SimDisk("node")
        disk.replace_now("f", b"aa")
        disk.write_now("f", b"b", 0)
        disk.write_now("f", b"b", 1)
        disk.crash(Random(seed))
        seen.add(bytes(disk.read_now("f", 0, None)))
    assert sorted(seen) == [b"aa", b"ba", b"bb"]
