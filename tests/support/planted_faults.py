"""Faults to plant in the real code path, one function each. Nothing of them is in the package."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pbmvfl.audit.constants import TRAINING_ROWS
from pbmvfl.crypto import secure_sum
from pbmvfl.crypto.entropy import keystream
from pbmvfl.crypto.key_exchange import KeyExchange
from pbmvfl.crypto.rounded_normal import rounded_normal
from pbmvfl.crypto.secure_sum import Masks
from pbmvfl.federation.drawn_labels import DrawnLabels, LabelHolder
from pbmvfl.federation.federation import Federation
from pbmvfl.mechanisms import PoissonBinomial
from pbmvfl.plan import schedule
from pbmvfl.protocol.party_rows import PartyRows
from pbmvfl.training.head import HeadLoss
from support.known_randomness import SeededEntropy

Plant = Callable[[pytest.MonkeyPatch], None]


def beta_times(factor: float) -> Plant:
    """The sampler uses another beta than the event has."""

    def constants(pbm: PoissonBinomial) -> tuple[int, np.float32]:
        beta_16 = round(pbm.event.beta_16 * factor)
        return beta_16, np.float32(beta_16 / pbm.bound)

    return lambda patch: patch.setattr(PoissonBinomial, "_constants", property(constants))


def no_clamp(patch: pytest.MonkeyPatch) -> None:
    """Values beyond the bound get probabilities beyond the ends."""

    def count(values: Any, scale: Any, beta_16: int, trials: int, random: Any, counts: Any) -> None:
        del beta_16
        shift = np.nan_to_num(values * scale, nan=0.0, posinf=32768.0, neginf=-32768.0)
        thresholds = np.clip(np.floor(shift + 32768.5), 0, 65535)
        counts[:] = (random.reshape(trials, -1) < thresholds).sum(axis=0)

    patch.setattr("pbmvfl.mechanisms.poisson_binomial.count_successes", count)


class WithoutTopResidue:
    """A keystream of integers below the top residue, as of a generator whose end point is excluded."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def update_into(self, zeros: Any, target: Any) -> None:
        self._stream.update_into(zeros, target)
        values = np.frombuffer(target, dtype=np.uint8)
        values[values & 127 == 127] = 0  # rings of 7 bits


def top_residue_missing(patch: pytest.MonkeyPatch) -> None:
    def stream(key: bytes, *, first_block: int = 0) -> Any:
        return WithoutTopResidue(keystream(key, first_block=first_block))

    patch.setattr(secure_sum, "keystream", stream)


def masks_reused_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """Keys of pairs follow from the pinned identities alone, and not from the session."""

    def pair_keys(exchange: KeyExchange, keys: Any, identities: Any) -> dict[int, bytes]:
        del keys
        own = exchange._index
        ends = {peer: sorted((identities[own], identity)) for peer, identity in enumerate(identities) if peer != own}
        return {peer: hashlib.sha256(b"".join(pair)).digest() for peer, pair in ends.items()}

    patch.setattr(KeyExchange, "pair_keys", pair_keys)


class OneBareParty(Masks):
    """Party 1 sends without masks, and the others leave out the pairs with it: every sum is still right."""

    def __init__(self, *, index: int, pair_keys: Any, **numbers: Any) -> None:
        self._bare = index == 1
        kept = pair_keys if self._bare else {peer: key for peer, key in pair_keys.items() if peer != 1}
        super().__init__(index=index, pair_keys=kept, **numbers)

    def add(self, number: int, values: Any) -> Any:
        return values.reshape(-1).copy() if self._bare else super().add(number, values)


def mask_omitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pbmvfl.protocol.party.Masks", OneBareParty)


def noise_seeded(patch: pytest.MonkeyPatch) -> None:
    """Every party's noise begins at the same place, at every start."""
    patch.setattr("pbmvfl.protocol.party.SystemEntropy", lambda: SeededEntropy(b"known to all"))


def noise_rewound_every_round(patch: pytest.MonkeyPatch) -> None:
    """Each session has noise of its own, and begins with it again in every round."""
    randomize = PoissonBinomial.randomize

    def again(pbm: PoissonBinomial, embedding: Any, entropy: Any, scratch: Any = None) -> Any:
        entropy.__dict__.setdefault("planted", os.urandom(32))
        return randomize(pbm, embedding, SeededEntropy(entropy.planted), scratch)

    patch.setattr(PoissonBinomial, "randomize", again)


def one_mask_for_all_kinds(patch: pytest.MonkeyPatch) -> None:
    for module in ("protocol.party", "audit.sessions"):
        patch.setattr(f"pbmvfl.{module}.kind_key", lambda pair_key, _: pair_key)


def update_noise_times(factor: float) -> Plant:
    def smaller(entropy: Any, count: int) -> Any:
        return np.floor(factor * rounded_normal(entropy, count)).astype(np.int64)

    return lambda patch: patch.setattr("pbmvfl.training.fixed_point_grid.rounded_normal", smaller)


def clipping_by_batch(patch: pytest.MonkeyPatch) -> None:
    """One factor for all rows, which limits their root mean square: a long row among short ones stays long."""

    def scales(ins: Any, outs: Any, units: float, target: float, found: Any) -> None:
        norm = np.sqrt((ins * outs).sum(axis=0).mean()) * units
        found[:] = units * min(1.0, target / norm)

    patch.setattr("pbmvfl.training.per_row_gradients.row_scales", scales)


def row_used_twice(patch: pytest.MonkeyPatch) -> None:
    """Row 0 takes the place of another one in every epoch."""
    permutation = schedule._epoch_permutation

    def twice(count: int, seed: int, epoch: int) -> Any:
        rows = permutation(count, seed, epoch).copy()
        rows[-1 if rows[-1] else -2] = 0
        return rows

    patch.setattr(schedule, "_epoch_permutation", twice)


def fusion_row_that_trains(patch: pytest.MonkeyPatch) -> None:
    """One fusion row takes the place of a row that trains."""
    parts = schedule.divided_rows

    def with_one(count: int, num_fusion: int, seed: int) -> Any:
        fused, network = parts(count, num_fusion, seed)
        network = network.copy()
        network[0] = fused[0]
        return fused, network

    patch.setattr(schedule, "divided_rows", with_one)


def preparation_of_all_rows(patch: pytest.MonkeyPatch) -> None:
    """The columns' mean and Gram matrix are taken over fusion rows as well."""
    learn = PartyRows.learn

    def of_all(rows: PartyRows, current: Any, entropy: Any) -> None:
        learn(rows, schedule.Round(current.number, current.kind, np.arange(TRAINING_ROWS)), entropy)

    patch.setattr(PartyRows, "learn", of_all)


def batch_statistics(patch: pytest.MonkeyPatch) -> None:
    """Columns are scaled by the mean and the deviation of their batch."""
    batch = PartyRows.batch

    def scaled(rows: PartyRows, split: Any, numbers: Any) -> torch.Tensor:
        found = batch(rows, split, numbers)
        return (found - found.mean(dim=0)) / (found.std(dim=0) + 1e-6)

    patch.setattr(PartyRows, "batch", scaled)


def one_gradient_of_a_true_label(patch: pytest.MonkeyPatch) -> None:
    """In the second epoch one row's gradient is that of its true label; the other rows' are those of drawn ones."""
    true: list[Any] = []
    fit, gradients = Federation.fit, HeadLoss.gradients
    rounds = [0]

    def remembered(federation: Federation, data: Any, **choices: Any) -> Any:
        true[:] = [data.train_labels, federation.plan.schedule]
        rounds[0] = 0
        return fit(federation, data, **choices)

    def with_one(head: HeadLoss, sums_BP: torch.Tensor, labels_B: torch.Tensor) -> Any:
        if rounds[0] == 1:
            labels_B = labels_B.clone()
            labels_B[0] = int(true[0][true[1][1].rows[0]])
        rounds[0] += 1
        return gradients(head, sums_BP, labels_B)

    patch.setattr(Federation, "fit", remembered)
    patch.setattr(HeadLoss, "gradients", with_one)


def one_label_never_drawn(patch: pytest.MonkeyPatch) -> None:
    draw = LabelHolder.draw

    def with_one(holder: LabelHolder, response: Any, labels_N: Any, **choices: Any) -> DrawnLabels:
        drawn = draw(holder, response, labels_N, **choices).labels_N.copy()
        drawn[3] = labels_N[3]
        return DrawnLabels(drawn)

    patch.setattr(LabelHolder, "draw", with_one)
