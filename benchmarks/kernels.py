"""The private kernels one by one: sampler, masks, packing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, alternate, seconds_per_call
from pbmvfl.mechanisms import PoissonBinomial, Scratch
from pbmvfl.randomness.secret import SystemEntropy, keystream
from pbmvfl.secagg.masks import Masks
from pbmvfl.secagg.ring import Ring
from pbmvfl.wire.packing import pack

ACTIVITY_VALUES = 1600
MODELNET_VALUES = 64 * 4096


def sampler() -> Iterator[Row]:
    """Against numpy's own binomial, which is neither secret nor constant in time."""
    entropy, numpys = SystemEntropy(), np.random.default_rng()
    values = np.tanh(np.linspace(-2, 2, ACTIVITY_VALUES)).astype(np.float32)
    for num_trials in (1, 2, 4, 8, 16):
        mechanism = PoissonBinomial(num_trials=num_trials, beta=0.25, bound=1.0, num_parties=5, embedding_dim=16)

        def theirs(num_trials: int = num_trials) -> object:
            return numpys.binomial(num_trials, 0.5 + 0.25 * values)

        scratch = Scratch()  # as a party has one

        def ours(mechanism: PoissonBinomial = mechanism, scratch: Scratch = scratch) -> object:
            return mechanism.randomize(values, entropy, scratch)

        ratio, slow, fast = alternate(theirs, ours, calls=20)
        detail = f"{fast / ACTIVITY_VALUES * 1e9:.1f} against {slow / ACTIVITY_VALUES * 1e9:.0f} ns a value"
        yield Row(f"sampler, 1,600 values, b={num_trials}: times numpy's speed", ratio, 12, "x", False, detail)


def masks() -> Iterator[Row]:
    """Against the cipher alone, making the same keystream bytes and doing nothing with them."""
    for num_parties, bits in ((5, 7), (12, 8), (12, 9)):
        ring = Ring(bits)
        keys = {peer: os.urandom(32) for peer in range(num_parties) if peer != 1}
        expanded = Masks(ring=ring, index=1, pair_keys=keys, values_per_round=MODELNET_VALUES)
        size = MODELNET_VALUES * ring.itemsize
        streams = [keystream(key) for key in keys.values()]
        zeros, target = memoryview(bytes(size)), memoryview(bytearray(size))
        rounds = iter(range(1 << 30))

        def ours(expanded: Masks = expanded, rounds: Iterator[int] = rounds) -> object:
            return expanded.for_round(next(rounds), MODELNET_VALUES)

        def cipher(streams: list[object] = streams, zeros: memoryview = zeros, target: memoryview = target) -> None:  # type: ignore[type-arg]
            for stream in streams:
                stream.update_into(zeros, target)  # type: ignore[attr-defined]

        ratio, mine, raw = alternate(ours, cipher, calls=2)
        detail = f"{mine * 1e6:.0f} against {raw * 1e6:.0f} us"
        yield Row(f"masks, 262k values, M={num_parties}, k={bits}: times raw AES-CTR", ratio, 1.5, "x", detail=detail)


def packing() -> Iterator[Row]:
    for bits in (3, 7, 8, 9, 11):
        values = np.arange(ACTIVITY_VALUES, dtype=np.uint16) & np.uint16((1 << bits) - 1)
        pack(values, bits)
        best = min(seconds_per_call(lambda values=values, bits=bits: pack(values, bits), 200) for _ in range(21))
        yield Row(f"packing, 1,600 values, k={bits}", best / ACTIVITY_VALUES * 1e9, 3, "ns")
