"""The private kernels one by one: sampler, masks, packing, and releases of many rows at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.measure import Row, alternate, seconds_per_call
from pbmvfl.crypto.entropy import SystemEntropy, keystream
from pbmvfl.crypto.ring import Ring, pack
from pbmvfl.crypto.secure_sum import Masks
from pbmvfl.mechanisms import Mechanism, PoissonBinomial, PolyaLaplace, RandomisedSymbols, Scratch
from pbmvfl.mechanisms.votes import Vote, VoteKind
from pbmvfl.protocol.stored_answers import StoredAnswers

ACTIVITY_VALUES = 1600
MODELNET_VALUES = 64 * 4096
PREDICTED_ROWS = 100_000


def sampler() -> Iterator[Row]:
    """Compare with numpy's own binomial, which is neither secret nor constant in time."""
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
    """Compare with the cipher alone, which makes the same keystream bytes and does nothing with them."""
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


def predictions() -> Iterator[Row]:
    """Time one party's release of 100,000 rows, from its scores to the bytes that leave, and their stored answers."""
    entropy = SystemEntropy()
    laplace: dict[str, Any] = {"num_parties": 5, "secure_aggregation": True}
    cases: list[tuple[Mechanism, Vote, int]] = [
        (RandomisedSymbols(num_parties=5, embedding_dim=1, symbols=16), Vote(kind=VoteKind.BINS, grades=16), 2),
        (PolyaLaplace(**laplace, embedding_dim=1), Vote(kind=VoteKind.MARGIN), 2),
        (
            PolyaLaplace(**laplace, embedding_dim=6, levels=1, scale=1.0, bounded_total=True),
            Vote(kind=VoteKind.BALLOT),
            6,
        ),
        (PolyaLaplace(**laplace, embedding_dim=6, bounded_total=True), Vote(kind=VoteKind.SHARES), 6),
        (PoissonBinomial(num_parties=5, embedding_dim=6, num_trials=2, beta=0.45), Vote(kind=VoteKind.SHARES), 6),
    ]
    for mechanism, vote, classes in cases:
        scores = np.random.default_rng(0).normal(size=(PREDICTED_ROWS, classes)).astype(np.float32)

        def release(mechanism: Mechanism = mechanism, vote: Vote = vote, scores: object = scores) -> object:
            return mechanism.payload.encode(mechanism.randomize(vote(scores), entropy))  # type: ignore[arg-type]

        release()  # compiles, and makes the sampler's table
        best = min(seconds_per_call(release, 1) for _ in range(5))
        name = f"prediction, 100,000 rows, {mechanism.describe()} ({vote.kind})"
        yield Row(name, best, 2, "s", detail=f"{best / PREDICTED_ROWS * 1e9:.0f} ns a row")
    names = [str(row) for row in range(PREDICTED_ROWS)]
    fresh = np.zeros((PREDICTED_ROWS, 1), dtype=np.uint8)

    def stored() -> object:
        answers = StoredAnswers()
        return answers.settle(answers.keys({"event": "x"}, names), fresh)

    best = min(seconds_per_call(stored, 1) for _ in range(3))
    yield Row("stored answers, 100,000 new rows", best, 2, "s")
