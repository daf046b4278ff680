"""Digest of the terms under which work is made and judged.

An edition of the run file may change the temperature, the lengths, the environments or the
limits while work is on its way. Each window and verdict carries this digest, so work of other
terms is told from work that is wrong: it accuses nobody.
"""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict
from p2p.wire import pack
from roles.contract import Run
from roles.protocol.core.window import content_digest

_TABLES: Final = ("environments", "model", "limits")
_SAMPLING: Final = (
    "group_size",
    "submission",
    "temperature",
    "max_new_tokens",
    "lag",
    "proof_values",
    "turns",
    "heard",
)
"""Fields of `SamplingTerms` that change work: all but `steps`."""


_computed: BoundedDict[bytes, bytes] = BoundedDict(8)
"""Digests by signed document, cached since each window asks for the digest."""


def terms_digest(run: Run) -> bytes:
    """Return the 32 bytes of BLAKE3 over the terms that decide whether work is right."""
    known = _computed.get(run.document)
    if known is None:
        known = _computed[run.document] = _compute(run)
    return known


def _compute(run: Run) -> bytes:
    table = run.terms.to_table()
    sampling = table["sampling"]
    assert isinstance(sampling, dict)
    shaping = {name: table[name] for name in _TABLES}
    shaping |= {name: sampling[name] for name in _SAMPLING if name in sampling}
    return content_digest(pack(_canonical(shaping)))


def _canonical(value: object) -> object:
    """Return tables as sorted lists of pairs, so that equal tables have one encoding."""
    if isinstance(value, dict):
        return [[key, _canonical(value[key])] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value
