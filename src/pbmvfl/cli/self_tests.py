"""Known answers of what protects people: randomness, masks, noise and the account.

None of them is a proof. They notice a library that was swapped, a build that computes something else, and a machine
whose randomness is not there.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.cli.finding import Finding, ok, trouble
from pbmvfl.crypto.entropy import SystemEntropy, fast_keystream, keystream
from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.rounded_normal import SIGMA, rounded_normal
from pbmvfl.crypto.secure_sum import Masks
from pbmvfl.mechanisms import PoissonBinomial
from pbmvfl.privacy.accounting import Activity, TrainingRun, epsilon_bound
from pbmvfl.privacy.events import NoisyUpdate
from pbmvfl.privacy.units import Accounting, Adversary, Unit

_DO_NOT_TRAIN = "do not train with this installation: install it anew in a new environment, and report it if it stays"
#: NIST SP 800-38A, F.5.5: CTR-AES256, the first output block.
_KEY = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
_COUNTER = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
_BLOCK = "0bdf7df1591716335e9a8b15c860c502"
#: Standard deviations within which a sum must lie: a false alarm once in 500 million times.
_DEVIATIONS = 6.0
_DRAWS = 20_000
#: The Gaussian mechanism whose neighbours are one standard deviation apart, at delta 1e-5: Phi(1/2 - e) - exp(e)
#: Phi(-1/2 - e) = 1e-5 solved for e in 50 digits (`tests/test_doctor.py` does it).
GAUSSIAN_EPSILON = 4.377178


def entropy_source() -> Finding:
    """The operating system's own, ready, and not stuck; and the cipher behind it."""
    name = "entropy"
    try:
        first = os.getrandom(32, os.GRND_NONBLOCK)
    except BlockingIOError:
        return trouble(name, "the system has not gathered enough of it yet", "wait until it has, and ask again")
    except AttributeError:  # not Linux
        first = os.urandom(32)
    words = np.empty(1 << 13, dtype=np.uint64)
    SystemEntropy().fill(words)
    ones = int(np.unpackbits(words.view(np.uint8)).sum())
    bits = words.size * 64
    stuck = first == os.urandom(32) or len(np.unique(words)) < words.size
    if stuck or abs(ones - bits / 2) > _DEVIATIONS * math.sqrt(bits) / 2:
        return trouble(name, "it repeats itself, or has too many bits of one kind", _DO_NOT_TRAIN)
    stream = keystream(bytes.fromhex(_KEY), first_block=int(_COUNTER, 16)).update(bytes(16))
    same = fast_keystream(bytes.fromhex(_KEY)).update(bytes(64))
    if stream.hex() != _BLOCK or same != keystream(bytes.fromhex(_KEY), first_block=2).update(bytes(64)):
        return trouble(name, "AES-256 in counter mode does not give NIST's answer", _DO_NOT_TRAIN)
    return ok(name, "the operating system's; AES-256 gives NIST's answer")


def masks_cancel() -> Finding:
    """Three parties' masks: each hides, and all together are nothing."""
    ring = Ring.for_sums_up_to(1000)
    keys = {pair: bytes([i + 1]) * 32 for i, pair in enumerate([(0, 1), (0, 2), (1, 2)])}
    drawn = []
    for party in range(3):
        pairs = {other: keys[min(party, other), max(party, other)] for other in range(3) if other != party}
        masks = Masks(ring=ring, index=party, pair_keys=pairs, values_per_round=64)
        drawn.append(masks.for_round(5, 64).copy())
    total = ring.reduce(drawn[0] + drawn[1] + drawn[2])
    if total.any() or not all(ring.reduce(each).any() for each in drawn):
        return trouble("masks", "those of three parties do not cancel", _DO_NOT_TRAIN)
    return ok("masks", "those of three parties cancel, and none of them is empty")


class _Constant:
    """Every 16-bit word the same."""

    seeded = True

    def __init__(self, word: int) -> None:
        self._word = word

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        buffer.view(np.uint16)[...] = self._word


def noise_has_its_law() -> Finding:
    """The Poisson binomial's coins turn at their probability, and the normal law has its size."""
    name = "noise"
    mechanism = PoissonBinomial(num_parties=2, num_trials=8, beta=0.25, embedding_dim=1)
    # p = 1/4, 1/2, 3/4 of 65536: a coin comes up for a word below it.
    values = np.array([-1.0, 0.0, 1.0], dtype=np.float32)
    for word, expected in ((0x3FFF, [8, 8, 8]), (0x4000, [0, 8, 8]), (0x8000, [0, 0, 8]), (0xC000, [0, 0, 0])):
        if mechanism.randomize(values, _Constant(word)).tolist() != expected:
            return trouble(name, "coins of the Poisson binomial do not turn at their probability", _DO_NOT_TRAIN)
    drawn = rounded_normal(SystemEntropy(), _DRAWS) / SIGMA
    # Of n squares of standard normal numbers the sum has mean n and variance 2n.
    if abs(float((drawn**2).sum()) - _DRAWS) > _DEVIATIONS * math.sqrt(2 * _DRAWS):
        return trouble(name, "the normal noise has not the size that is charged", _DO_NOT_TRAIN)
    if abs(float(drawn.sum())) > _DEVIATIONS * math.sqrt(_DRAWS):
        return trouble(name, "the normal noise is not centred", _DO_NOT_TRAIN)
    return ok(name, f"coins turn where they should; {_DRAWS:,} normal numbers have their size")


def account_gives_known_answers() -> Finding:
    """Two epsilons that are known without this program."""
    name = "account"
    update = Activity(
        split="train",
        release=None,
        update=NoisyUpdate(clip_norm=1.0, noise_multiplier=2.0),
        row_releases=0,
        row_updates=1,
        total_releases=0,
    )
    gaussian = TrainingRun(activities=(update,), num_parties=2)
    found = epsilon_bound(gaussian, Unit.CELL, Accounting.STRICT, delta=1e-5).epsilon
    if not GAUSSIAN_EPSILON * (1 - 1e-6) <= found <= GAUSSIAN_EPSILON * 1.001:
        return trouble(name, f"a Gaussian step has epsilon {found:.6f}, and not {GAUSSIAN_EPSILON}", _DO_NOT_TRAIN)
    # One coin of probability 1/4 or 3/4, without anybody else's noise: randomised response, ln 3.
    coin = PoissonBinomial(num_parties=2, num_trials=1, beta=0.25, embedding_dim=1)
    release = Activity(split="test", release=coin.event, update=None, row_releases=1, row_updates=0, total_releases=1)
    alone = Adversary(colluding_parties=1)
    run = TrainingRun(activities=(release,), num_parties=2)
    found = epsilon_bound(run, Unit.CELL, Accounting.STRICT, alone, delta=1e-9).epsilon
    if not math.log(3) * (1 - 1e-6) <= found <= math.log(3) * 1.001:
        return trouble(name, f"one coin has epsilon {found:.6f}, and not ln 3", _DO_NOT_TRAIN)
    return ok(name, f"a Gaussian step: {GAUSSIAN_EPSILON:.4f}; one coin: ln 3; as they must be")
