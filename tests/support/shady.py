"""A hostile owner and a package with its environment."""

from __future__ import annotations

from pathlib import Path

from p2p.identity import KeyPair
from roles.contract.core.file import (
    EnvironmentPin,
    Terms,
)
from roles.envs.base import environment_digest
from roles.rl.recipes import NETWORK, SORTING

OWNER, TRAINER, VALIDATOR = (KeyPair(name * 32) for name in (b"o", b"t", b"v"))
TERMS = Terms(
    name="fleece",
    expiry=2_000_000_000,
    environments=(EnvironmentPin(name="sort", digest=environment_digest("sort")),),
    trainers=(TRAINER.peer_id,),
    validators=(VALIDATOR.peer_id,),
    sampling=NETWORK.sampling,
    model=SORTING,
)


def install(folder: Path) -> None:
    """A package with an environment whose import leaves a trace."""
    package, info = folder / "shady_env", folder / "shady_env-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "game.py").write_text(
        "from pathlib import Path\n"
        "try:\n"
        f"    Path({str(folder / 'imported')!r}).touch()\n"
        "except OSError as error:\n"
        "    print('imported, and', type(error).__name__)\n"
        "from roles.envs.sort import SortEnvironment as Game\n"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shady-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shoal.envs]\nshady = shady_env.game:Game\n")
