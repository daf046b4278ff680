"""Evidence of an honest group."""

from __future__ import annotations

from proofs import Evidence

HONEST = Evidence(
    tokens=300, malformed="", exponent_mismatches=0, mantissa_mean=0.0, mantissa_median=0.0,
    draw_distance=0.0, off=(0, 0, 0, 0, 0), gap_mean=0.0, gap_max=0.0, end_probability=1.0,
    surprise=0.5, mantissa_worst=0.0, chunks=1.0,
)  # fmt: skip
