"""Seeds, words and noise: prefix-stable, pinned by vectors, the same in numpy and torch."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, strategies as st

from proofs.sampling import draw_seed, draw_words, gumbel, noise_bits, task_seed, uniforms
from roles.engines.torch.device import CPU
from roles.engines.torch.device_draws import noise_bits_on

SEEDS = [sha256(bytes([i])).digest() for i in range(8)]


def test_seeds_are_pinned_and_every_field_changes_them() -> None:
    """A change here is a change of protocol."""
    base = (b"run", b"policy", b"node", 1, 2)
    assert draw_seed(*base).hex() == (
        "6915d7ef601af747863a16af11bfc56c073ecaf8a424011c7d7c603fc1931ccc"
    )
    assert task_seed(*base).hex() == (
        "60498ee779978cf70efba50e96df384c5d2be27338e459a7c63f763dcf0af947"
    )
    others = [
        (b"runp", b"olicy", b"node", 1, 2), (b"run", b"policyn", b"ode", 1, 2),
        (b"run", b"policy", b"nodf", 1, 2), (b"run", b"policy", b"node", 2, 1),
        (b"run", b"policy", b"node", 1, 3), (b"", b"runpolicy", b"node", 1, 2),
    ]  # fmt: skip
    assert len({draw_seed(*fields) for fields in [base, *others]}) == 7


def test_words_and_uniforms_are_the_documented_bits() -> None:
    digest = sha256(b"/shoal/uniform/1.0.0" + SEEDS[0] + (1).to_bytes(8, "big")).digest()
    words = [int.from_bytes(digest[i : i + 8], "big") for i in range(0, 32, 8)]
    assert draw_words(SEEDS[:1], 4, 4)[0].tolist() == words
    assert uniforms(draw_words(SEEDS[:1], 4, 4))[0].tolist() == [
        (word >> 11) / 2**53 for word in words
    ]
    zero = draw_words([bytes(32)], 0, 2)
    assert zero.tolist() == [[0xF364012951799FFA, 0xAC42668D09C39FEC]]
    assert uniforms(zero)[0].tolist() == [0.9507446981310522, 0.6728881925898932]


@given(st.integers(0, 70), st.integers(0, 40))
def test_words_are_prefix_stable(start: int, count: int) -> None:
    whole = draw_words(SEEDS, 0, 110)
    assert (draw_words(SEEDS, start, count) == whole[:, start : start + count]).all()
    assert ((uniforms(whole) >= 0) & (uniforms(whole) < 1)).all()


def plain_bits(word: int, token: int) -> int:
    """As docs/protocols/sampling.md writes it, in integers of Python."""
    x = (token ^ word) & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x ^= x >> 15
    x ^= word >> 32
    x = x * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def test_noise_vectors() -> None:
    """Pinned: a change here is a change of protocol."""
    words = np.array([0, 0x0123456789ABCDEF, 2**64 - 1], dtype=np.uint64)
    tokens = np.array([0, 1, 49151, 151935])
    assert [[f"{bits:08x}" for bits in row] for row in noise_bits(words, tokens)] == [
        ["00000000", "86d2fa73", "ebec197c", "c9c25eb4"],
        ["9e79ac80", "c8f8ad77", "c711e852", "7110c34c"],
        ["f2f1199e", "8c3823d1", "a0ff2300", "08bb0852"],
    ]
    assert gumbel(np.array([0x86D2FA73], dtype=np.uint32))[0] == pytest.approx(0.290439848695)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 151_935), min_size=1, max_size=9))
def test_noise_is_the_same_in_python_numpy_and_on_a_device(
    word: int, tokens: list[int]
) -> None:
    words = np.array([word], dtype=np.uint64)
    (mine,) = noise_bits(words, np.array(tokens))
    assert mine.tolist() == [plain_bits(word, token) for token in tokens]
    on_device = noise_bits_on(words, 151_936, CPU)[0].numpy().view(np.uint32)
    assert on_device[tokens].tolist() == mine.tolist()
