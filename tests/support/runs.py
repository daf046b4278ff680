"""A signed run of a network that sorts, and the keys of those who play in it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from p2p.identity import KeyPair
from p2p.node.tables import write_table, write_toml
from p2p.wire import pack
from roles.contract.core.file import DOMAIN, FORMAT, EnvironmentPin, Terms, _sorted, sign_run
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


def sign_body(body: bytes, key: KeyPair = OWNER) -> bytes:
    """A run file with a good signature of ``key``, whatever its owner signs."""
    owner = key.peer_id.digest
    return pack([FORMAT, owner, body, key.sign(DOMAIN, pack([FORMAT, owner, body]))])


def sign_table(table: Any, key: KeyPair = OWNER) -> bytes:
    return sign_body(pack(_sorted(table)), key)


def with_value(table: Any, path: Sequence[Any], value: Any) -> Any:
    """A copy of ``table`` with ``value`` at a path of keys and indices."""
    if not path:
        return value
    changed: Any = deepcopy(table)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


SAMPLING = {"steps": 7, "group_size": 16, "max_new_tokens": 12}
MODEL = {"shape": write_table(SORTER)}
SORTING_TABLES = {"environments": ["sort"], "sampling": SAMPLING, "model": MODEL}
"""What a draft says of a network that sorts."""
DRAFT: dict[str, Any] = {
    "name": "r",
    "trainers": [str(TRAINER.peer_id)],
    "validators": [str(VALIDATOR.peer_id)],
    **SORTING_TABLES,
}
SORTING_TEXT = 'environments = ["sort"]\n' + write_toml({"sampling": SAMPLING, "model": MODEL})
