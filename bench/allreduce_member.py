"""A machine's part in `bench.allreduce`: ``HOW RANK COUNT VALUES FOLDER``, in its namespace.

It prints {"listens": ...}, connects once a byte for it is in the folder's pipe ``meet``, prints
{"up": ...}, begins once one is in ``go``, and prints the seconds that its all-reduce took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import trio

from p2p import open_host
from p2p.identity import KeyPair, verify
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from roles.contract.core.diloco import Codec, DilocoTerms
from roles.diloco.core.events import Reduce
from roles.diloco.core.messages import PIECES_PROTOCOL, Plan, Ready
from roles.diloco.core.outer import Arithmetic
from roles.diloco.core.pieces import digest_of
from roles.diloco.core.quant import Values
from roles.diloco.exchange import PieceClient, PieceServer
from roles.diloco.reduction import Reduction
from roles.diloco.store import MemberStore
from roles.engines.config import EngineConfig
from sim.studies.lab.namespaces import address_of
from sim.workloads.inner import FakeInner

RUN: Final = b"all-reduce on shaped lines: 32 b"
PORT: Final = 4001


def vector(rank: int, values: int) -> Values:
    """Return the vector that this rank adds."""
    return np.random.Generator(np.random.PCG64(rank)).standard_normal(values, np.float32)


class TimedReduction(Reduction):
    """Notes when the mean is ready, before the audit."""

    fetched = 0.0

    async def _audit(self) -> None:
        self.fetched = time.perf_counter()
        await Reduction._audit(self)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def wait_for(pipe: Path) -> None:
    """Wait for a byte; the other side keeps the pipe open."""
    with pipe.open("rb", buffering=0) as file:
        file.read(1)


def gloo(rank: int, count: int, values: int, folder: Path) -> None:
    """Take part in torch's all-reduce with gloo, which forms a ring."""
    import torch
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    say(listens=rank)
    wait_for(folder / "meet")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=count
    )
    tensor = torch.from_numpy(vector(rank, values))
    distributed.all_reduce(torch.ones(count * 1000))
    say(up=rank)
    wait_for(folder / "go")
    began = time.perf_counter()
    distributed.all_reduce(tensor)
    seconds = time.perf_counter() - began
    say(seconds=seconds, audited=seconds)


async def shoal(codec: Codec, rank: int, count: int, values: int, folder: Path) -> None:
    """Run the product's exchange of one round, audit included."""
    terms = DilocoTerms(codec=codec)
    arithmetic = Arithmetic(terms, values)
    keys = [KeyPair(bytes([1 + one]) * 32) for one in range(count)]
    updates = {key.peer_id: arithmetic.encoded(vector(one, values), 1)
               for one, key in enumerate(keys)}  # fmt: skip
    readys = tuple(
        _ready(*updates[key.peer_id], key) for key in sorted(keys, key=lambda one: one.peer_id)
    )
    plan = Plan(
        1,
        bytes(32),
        tuple((ready.author, ready.digest) for ready in readys),
        tuple(ready.author for ready in readys),
    )
    listen, me = [f"/ip4/{address_of(rank + 1)}/tcp/{PORT}"], keys[rank].peer_id
    async with (
        open_world(key=keys[rank]) as world,
        open_host(world=world, listen=listen) as host,
    ):
        server, client = PieceServer(world, lambda _: True), PieceClient(world, host)
        engine = FakeInner(world, EngineConfig(kind="fake"), terms, values)
        store = MemberStore(world, RUN, arithmetic, engine)
        await world.disk.write(store.update_file(1).path, b"".join(updates[me][0]))
        (own,) = await store.found("update", 1)
        server.offer(own)
        reduction = TimedReduction(
            world, keys[rank], verify, RUN, engine, server, client,
            Reduce(0, plan, readys, None, ()), store.mean_file(1, 0), print, lambda _: None,
        )  # fmt: skip
        with host.serving(PIECES_PROTOCOL, server.serve):
            say(listens=rank)
            await trio.to_thread.run_sync(wait_for, folder / "meet")
            for other in range(rank):
                peer = keys[other].peer_id
                place = Multiaddr.parse(f"/ip4/{address_of(other + 1)}/tcp/{PORT}")
                host.add_addrs(peer, [place])
                await host.connect(peer)
            say(up=rank)
            await trio.to_thread.run_sync(wait_for, folder / "go")
            began = time.perf_counter()
            await reduction.mean()
            say(seconds=reduction.fetched - began, audited=time.perf_counter() - began)
            await trio.sleep_forever()


def _ready(pieces: list[bytes], norms: list[float], key: KeyPair) -> Ready:
    return Ready(
        1, 0, bytes(32), 1, 0.0, tuple(norms), tuple(map(digest_of, pieces)), author=key.peer_id
    ).signed(RUN, key)


def main() -> None:
    """Play, and stay until killed, since others may still download from here."""
    how, rank, count, values = sys.argv[1], *map(int, sys.argv[2:5])
    folder = Path(sys.argv[5])
    if how == "gloo":
        gloo(rank, count, values, folder)
        sys.stdin.read()
    else:
        trio.run(shoal, Codec(how), rank, count, values, folder)


if __name__ == "__main__":
    main()
