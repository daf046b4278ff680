"""As much of a node as its status line asks for."""

from __future__ import annotations

from types import SimpleNamespace

from p2p.node.role import RoleGuard


def stub_node(world, *, newest: int = 3) -> SimpleNamespace:
    of_others = SimpleNamespace(policy=57, run=b"another")
    members = [of_others, *(SimpleNamespace(policy=policy, run=b"ours") for policy in (4, 2))]
    membership = SimpleNamespace(size=2, members=lambda: members)
    return SimpleNamespace(
        world=world,
        guard=RoleGuard(),
        run=SimpleNamespace(id=b"ours"),
        membership=membership,
        clocks=SimpleNamespace(trouble=""),
        shardcast=SimpleNamespace(newest=newest, fetching=None),
    )
