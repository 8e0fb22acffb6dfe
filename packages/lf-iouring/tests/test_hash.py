"""XXH3 in C against the xxhash package."""

import numpy as np
import pytest
import xxhash

native = pytest.importorskip("lf_iouring._native_engine")


def test_every_length_up_to_2000_agrees():
    rng = np.random.default_rng(0)
    for length in range(2001):
        data = rng.bytes(length)
        for seed in (0, 1, int(rng.integers(0, 2**63)) * 2 + 1):
            assert native.xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed=seed), length


@pytest.mark.parametrize("length", [4096, 65_536, 1_000_003])
def test_long_inputs_at_odd_addresses_agree(length):
    data = memoryview(np.random.default_rng(1).bytes(length + 3))
    for start in range(3):
        part = data[start : start + length]
        assert native.xxh3_64(part, 9) == xxhash.xxh3_64_intdigest(part, seed=9)
