"""The run: what is trained, how, and by whose word.

The signed document is in the folder `core`. `draft` is the TOML table that its owner writes: it
may leave out everything that has a good default, and may name a folder to pin. ``python -m
roles.run`` is the owner's command line, which completes and signs a draft, and shows a
document; `people` is the part of it that changes who is in, and `editions` sees to it that no
key signs two texts of one epoch. A node calls `open_run`, a role
`run_of`.
"""

from roles.run.core.file import (
    Calibration,
    Run,
    Terms,
    decode_run_untrusted,
    open_run,
    run_of,
    sign_run,
)

__all__ = [
    "Calibration",
    "Run",
    "Terms",
    "decode_run_untrusted",
    "open_run",
    "run_of",
    "sign_run",
]
