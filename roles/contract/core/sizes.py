"""Lengths of a run's messages: arithmetic over what its owner signs.

A message is read into memory before it is judged, so its length has a bound. A bound below what
an honest worker may have to say would lock that worker out. So the run's own sampling gives the
bound: terms whose submissions do not fit one message are refused when they are signed, and by
every node that gets them (`check_sizes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2p.wire import KI, MIB

MAX_SUBMISSION: Final = 8 * MIB
"""Most bytes of a submission. A group of 16 answers of 32,768 tokens at 7 bytes each is 3.5
MiB, and 64 groups of 16 answers of 1,000 tokens are 6.8: more is sent as several. At 10 Mbit/s
it takes 7 s, in which its worker draws on; 128 seats of a validator hold a gibibyte of them."""
MAX_VERDICT: Final = 64 * KI
"""Most bytes of a verdict, which goes into one ledger entry
(`p2p.ledger.core.chain.MAX_BODY`)."""
MAX_GROUPS: Final = 256
"""Most groups of one submission. A verdict judges all of them together, so a larger one
would only be judged later."""
MAX_COMPLETIONS: Final = 1024
"""Most completions of a group: 64 times INTELLECT-2's 16. More teach little: the mean of a
group is known to a thirtieth by then."""
MAX_TOKENS: Final = 128 * KI
"""Most tokens of a completion: the longest context in use."""
MAX_HEAD: Final = KI
"""Most bytes in front of a submission's content: the commitment has about 190, its signature
64."""
SHORT_TOKENS: Final = 1 << 16
"""Bound below which tokens take two bytes each. A group with a larger token takes three for
each; the largest vocabularies have 262,144."""
MAX_TOKEN: Final = (1 << 24) - 1
"""Largest token of the wire."""
LOGPROB_BYTES: Final = 2
"""Bytes of a log-prob in a delivery: float16."""

_ROWS_PER_CHUNK: Final = 32
"""Tokens of one chunk of an activation proof (`proofs.toploc`)."""
HEARD_BYTES: Final = 8
"""Bytes of a completion's digest of what its environment said. Always 0 in runs of one turn."""
_LENGTHS: Final = 8 + HEARD_BYTES
"""Bytes of each completion's numbers: tokens, length of its proof, and digest of what it
heard."""
_GROUP: Final = 40
"""Bytes per group: its number, and the msgpack heads of it and its six fields, 5 at most
each, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSize:
    """Numbers from which the length of a run's submissions follows."""

    groups: int
    """Groups of a submission."""
    completions: int
    """Completions of a group."""
    tokens: int
    """Most tokens of a completion."""
    vocabulary: int
    proof_values: int

    @property
    def max_submission(self) -> int:
        """Bytes of the longest honest submission: an exact bound, without a margin."""
        return MAX_HEAD + self.groups * self._group

    @property
    def _width(self) -> int:
        return 2 if self.vocabulary <= SHORT_TOKENS else 3

    @property
    def _chunk(self) -> int:
        return 2 + 2 * self.proof_values

    @property
    def _completion(self) -> int:
        chunks = -(-self.tokens // _ROWS_PER_CHUNK)
        return _LENGTHS + self._width * self.tokens + chunks * self._chunk

    @property
    def _group(self) -> int:
        return _GROUP + self.completions * self._completion

    def check(self) -> None:
        """Raise `ValueError` naming the key to lower unless an honest submission fits one
        message."""
        for key, value, limit in (
            ("submission", self.groups, MAX_GROUPS),
            ("group_size", self.completions, MAX_COMPLETIONS),
            ("max_new_tokens", self.tokens, MAX_TOKENS),
        ):
            if value > limit:
                raise ValueError(
                    f"one message carries at most {limit} of {key}, not {value}: lower {key} in"
                    " [sampling]"
                )
        if self.max_submission <= MAX_SUBMISSION:
            return
        room = MAX_SUBMISSION - MAX_HEAD
        groups, completions = room // self._group, (room - _GROUP) // self._completion
        if groups:
            key, most = "submission", groups
        elif completions > 1:  # an advantage is relative to the group
            key, most = "group_size", completions
        else:
            each = (room - _GROUP) // self.completions - _LENGTHS
            chunk = _ROWS_PER_CHUNK * self._width + self._chunk
            key, most = "max_new_tokens", each // chunk * _ROWS_PER_CHUNK
        raise ValueError(
            f"a submission of this run may have {self.max_submission} bytes, and one message"
            f" carries {MAX_SUBMISSION}: lower {key} in [sampling] to at most {most}"
        )
