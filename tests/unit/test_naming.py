"""Names that stand beside a given one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from p2p.naming import MAX_NAME, derived

NAMES = st.text(min_size=1, max_size=MAX_NAME + 5)


@given(NAMES, NAMES, st.sampled_from(["", ".shoal-"]), st.sampled_from(["", ".partial"]))
def test_a_derived_name_is_short_and_each_names_own(
    name: str, other: str, before: str, after: str
) -> None:
    name, other = (one.encode(errors="ignore").decode() or "x" for one in (name, other))
    made = derived(name, before=before, after=after)
    assert len(made.encode()) <= MAX_NAME
    assert made.startswith(before)
    assert made.endswith(after)
    assert (made == derived(other, before=before, after=after)) == (name == other)


@pytest.mark.parametrize("sign", ["a", "é", "名", "\udcff"])
def test_what_fits_is_said(sign: str) -> None:
    size = len(sign.encode(errors="surrogateescape"))
    longest = sign * ((MAX_NAME - 5) // size)
    assert derived(longest, after=".part") == f"{longest}.part"
    assert derived(longest + sign, after=".part") != f"{longest}{sign}.part"
