"""A signed run of a network that sorts, and the keys of those who play in it."""

from __future__ import annotations

from p2p.identity import KeyPair
from p2p.node.tables import write_table, write_toml
from roles.contract.core.file import (
    EnvironmentPin,
    Terms,
    sign_run,
)
from roles.envs.base import environment_digest
from roles.rl.recipes import NETWORK, SORTER, SORTING

OWNER, TRAINER, VALIDATOR, STRANGER = (KeyPair(bytes([number]) * 32) for number in range(4))
TERMS = Terms(
    name="sorting",
    expiry=2_000_000_000,
    environments=(EnvironmentPin(name="sort", digest=environment_digest("sort")),),
    trainers=(TRAINER.peer_id,),
    validators=(VALIDATOR.peer_id,),
    sampling=NETWORK.sampling,
    model=SORTING,
)
RUN = sign_run(TERMS, OWNER)
SAMPLING = {"steps": 7, "group_size": 16, "max_new_tokens": 12}
MODEL = {"shape": write_table(SORTER)}
SORTING_TABLES = {"environments": ["sort"], "sampling": SAMPLING, "model": MODEL}
"""What a draft says of a network that sorts."""
SORTING_TEXT = 'environments = ["sort"]\n' + write_toml({"sampling": SAMPLING, "model": MODEL})
