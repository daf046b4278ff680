"""Fragments of a model: each outer step exchanges one, so that a line carries less at a time.

Theory of operation
-------------------
A model of F fragments is exchanged in F rounds, a fragment each, by turns. The bytes between
two exchanges of one weight are the same, the burst is an F-th (Streaming DiLoCo, 2501.18512).
Whatever is not exchanged in a round keeps what a member has learnt since its own last turn.

All fragments have one length, the last with zeros behind it: so the pieces of an update are cut
alike in all rounds, and rounds, sums and evidence need not know of fragments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roles.diloco.core.quant import Values


@dataclass(frozen=True, slots=True)
class Fragments:
    """How a model is parted."""

    size: int
    """Weights of the model."""
    count: int = 1

    @property
    def length(self) -> int:
        """Weights of a fragment, padding included."""
        return -(-self.size // self.count)

    def span(self, step: int) -> slice:
        """The weights that the outer step ``step`` changes."""
        start = (step - 1) % self.count * self.length
        return slice(min(start, self.size), min(start + self.length, self.size))

    def cut(self, step: int, vector: Values) -> Values:
        """What of a vector of all weights travels at a step."""
        part = vector[self.span(step)]
        return np.concatenate([part, np.zeros(self.length - part.size, np.float32)])

    def whole(self, step: int, part: Values) -> Values:
        """A vector of all weights with what `cut` gave, zero elsewhere."""
        found, span = np.zeros(self.size, np.float32), self.span(step)
        found[span] = part[: span.stop - span.start]
        return found
