"""Digests carry the name of their algorithm and do not depend on how the data comes in."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from aiter_prep.storage.digest import Digest, digest_of, tree_digest


@pytest.mark.parametrize(
    ("data", "hexadecimal"),
    [  # of the reference implementation: XXH3_128bits with seed 0
        (b"", "99aa06d3014798d86001c324468d497f"),
        (b"a", "a96faf705af16834e6c632b61e964e1f"),
        (b"abc", "06b05ab6733a618578af5f94892f3950"),
    ],
)
def test_known_digests_stay_what_they_are(data: bytes, hexadecimal: str) -> None:
    assert digest_of(data) == f"xxh3-128:{hexadecimal}"


@given(st.lists(st.binary(max_size=400), max_size=8))
def test_the_pieces_do_not_matter(pieces: list[bytes]) -> None:
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    assert digest.text() == digest_of(b"".join(pieces))


@given(st.binary(max_size=64))
def test_every_kind_of_buffer_has_the_same_digest(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    kinds = (bytearray(data), memoryview(data), array)
    assert {digest_of(kind) for kind in kinds} == {digest_of(data)}


def test_a_matrix_is_digested_in_the_order_of_its_rows() -> None:
    matrix = np.arange(12, dtype=np.uint8).reshape(3, 4)
    digest = Digest()
    digest.update(matrix)
    assert digest.text() == digest_of(bytes(range(12)))


def test_looking_at_a_digest_does_not_end_it() -> None:
    digest = Digest()
    digest.update(b"a")
    assert digest.text() == digest.text() == digest_of(b"a")
    digest.update(b"b")
    assert digest.text() == digest_of(b"ab")


def test_the_tree_digest_is_that_of_its_lines() -> None:
    header, tensors = digest_of(b"h"), [digest_of(b"a"), digest_of(b"b")]
    lines = "\n".join([header, *tensors]).encode()
    assert tree_digest(header, tensors) == f"xxh3-128-tree:{xxhash.xxh3_128_hexdigest(lines)}"


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=5))
def test_the_tree_digest_tells_every_order_and_number_of_tensors(parts: list[bytes]) -> None:
    header, *tensors = map(digest_of, parts)
    whole = tree_digest(header, tensors)
    assert whole == tree_digest(header, iter(tensors))
    assert whole != tree_digest(header, [*tensors, digest_of(b"")])
    if tensors:
        assert whole != tree_digest(header, tensors[:-1])
    if tensors != tensors[::-1]:
        assert whole != tree_digest(header, tensors[::-1])
