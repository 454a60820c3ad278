"""Masks and fresh noise, read off the wire of real sessions on made-up rows, and labels read off gradients.

Two sessions of one run are compared, as after a restart: the same identities, plan and run, whose keys and noise must
all be new.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from pbmvfl.audit.laws import sent_law
from pbmvfl.audit.statistics import Finding, certain, chi_square_test, count_test, uniform_tests
from pbmvfl.crypto.key_exchange import NONCE_BYTES, RUN_ID_BYTES, Identity, KeyExchange, Session, kind_key
from pbmvfl.crypto.ring import Ring
from pbmvfl.crypto.secure_sum import Masks
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.federation import Federation
from pbmvfl.mechanisms import Mechanism
from pbmvfl.plan.plan import Plan
from pbmvfl.wire.gradient_codecs import codec_for
from pbmvfl.wire.messages import Message, MessageKind

Integers = npt.NDArray[np.int64]
_ROUNDS, _ROWS = 4, 512
#: More parties would only repeat the tests of these.
_MOST_PARTIES = 8
_MASKS_AT_ONCE = 1 << 16


def made_up_data(*, num_parties: int, num_samples: int, num_classes: int, columns: int = 4) -> VerticalDataset:
    """Return made-up rows by a public generator: nothing about anyone."""
    random = np.random.default_rng(20240229)
    features = random.normal(size=(num_parties, num_samples, columns)).astype(np.float32)
    return VerticalDataset(
        name="made-up",
        party_names=tuple(f"party-{index}" for index in range(num_parties)),
        train_features=tuple(features),
        test_features=tuple(part[:1] for part in features),
        train_labels=np.arange(num_samples, dtype=np.int64) % num_classes,
        test_labels=np.zeros(1, dtype=np.int64),
        class_names=tuple(f"class-{index}" for index in range(num_classes)),
        default_encoder="linear",
    )


# --- masks of one pair, many of them ---


def pair_masks(ring: Ring, values: int) -> list[tuple[Integers, Integers]]:
    """Return the masks of two parties after a key exchange, for two kinds of rounds: flat, modulo the ring."""
    identities = [Identity.generate() for _ in range(2)]
    nonces = [np.random.default_rng(index).bytes(NONCE_BYTES) for index in range(2)]  # public
    session = Session.open(plan_hash=bytes(32), run_id=bytes(RUN_ID_BYTES), nonces=nonces)
    exchanges = [KeyExchange(session=session, index=index, identity=identities[index]) for index in range(2)]
    keys, pinned = [each.signed_key for each in exchanges], [each.public for each in identities]
    shared = [exchange.pair_keys(keys, pinned) for exchange in exchanges]
    masks = [[_masks_of(ring, index, shared[index], kind, values) for index in range(2)] for kind in (1, 2)]
    return [(lower, upper) for lower, upper in masks]


def _masks_of(ring: Ring, index: int, pair_keys: Mapping[int, bytes], kind: int, values: int) -> Integers:
    keys = {peer: kind_key(key, kind) for peer, key in pair_keys.items()}
    masks = Masks(ring=ring, index=index, pair_keys=keys, values_per_round=_MASKS_AT_ONCE)
    rounds = range(-(-values // _MASKS_AT_ONCE))
    drawn = [ring.reduce(masks.for_round(number, _MASKS_AT_ONCE).copy()) for number in rounds]
    return np.concatenate(drawn).astype(np.int64)


def mask_tests(ring: Ring, trials: int) -> Iterator[Finding]:
    """Hold masks of one pair against the uniform law, their sum against 0, and two kinds of rounds against each other.

    For rings of up to 16 bits there are enough that the top residue would be missed, if it never came.
    """
    values = max(trials, 32 << ring.bits) if ring.bits <= 16 else trials
    (lower, upper), (other, _) = pair_masks(ring, values)
    what = f"masks of a pair, {ring.bits} bits"
    yield from uniform_tests(what, lower, ring.bits)
    wrong = int(((lower + upper) & ((1 << ring.bits) - 1) != 0).sum())
    yield certain(what, "cancel", lower.size, holds=not wrong, statistic=f"{wrong:,} sums are not 0")
    yield count_test(what, "own masks for each kind", int((lower == other).sum()), lower.size, 2.0**-ring.bits)


# --- sessions on the wire ---


class Restarted(Federation):
    """Federation whose runs are sessions of one run: the same identities and the same run."""

    def __init__(self, plan: Plan, *, encoders: Sequence[nn.Module] | None = None) -> None:
        super().__init__(plan, encoders=encoders)
        self._identities = [Identity.generate() for _ in range(plan.num_parties)]

    def new_run_id(self) -> bytes:
        return b"audited."

    def new_identity(self, index: int) -> Identity:
        return self._identities[index]


@dataclass(frozen=True)
class Transcript:
    """Messages of the parties in one session, (M, rounds * values), and the sums of it that the server reads."""

    sent_MV: Integers
    totals_V: Integers


def wire_plan(mechanism: Mechanism, data: VerticalDataset) -> Plan:
    """Return a plan of a few rounds with this mechanism, whose weights do not move."""
    numbers = {name: value for name, value in mechanism.to_dict().items() if name != "mechanism"}
    return Plan.for_data(
        data,
        mechanism=mechanism.name,
        **numbers,
        batch_size=_ROWS,
        num_epochs=_ROUNDS,
        learning_rate=1e-9,
        label_epsilon=None,
        evaluation="none",
    )


def transcript(federation: Federation, data: VerticalDataset) -> Transcript:
    """Run a session to its end and return what was on the wire."""
    plan = federation.plan
    rounds: dict[tuple[int, int], bytes] = {}

    def tap(direction: str, party: int, raw: bytes) -> None:
        message = Message.from_bytes(raw)
        if direction == "up" and message.kind is MessageKind.EMBEDDING:
            rounds[message.round_number, party] = bytes(message.payload)

    federation.taps = [tap]
    federation.fit(data)
    payload, values = plan.release.payload, _ROWS * plan.embedding_dim
    sent, totals = [], []
    for number in range(_ROUNDS):
        payloads = [rounds[number, party] for party in range(plan.num_parties)]
        sent.append(payload.each(payloads, values))
        totals.append(payload.total(payloads, values))
    return Transcript(np.concatenate(sent, axis=1).astype(np.int64), np.concatenate(totals).astype(np.int64))


def wire_tests(mechanism: Mechanism) -> Iterator[Finding]:
    """Run one run twice, as after a restart, and hold what every party sent against uniform masks and fresh noise.

    Args:
        mechanism: A mechanism behind a secure sum, with the numbers of a plan.
    """
    if mechanism.num_parties > _MOST_PARTIES:
        fewer: dict[str, Any] = {"honest_parties": 0} if "honest_parties" in mechanism.own_settings() else {}
        mechanism = replace(mechanism, num_parties=_MOST_PARTIES, **fewer)
    mechanism = replace(mechanism, embedding_dim=4)
    made_up = made_up_data(num_parties=mechanism.num_parties, num_samples=_ROWS, num_classes=2)
    # All rows are the same, and weights do not move: whatever differs from draw to draw is noise.
    same = tuple(np.repeat(part[:1], _ROWS, axis=0) for part in made_up.train_features)
    data = replace(made_up, train_features=same)
    federation = Restarted(wire_plan(mechanism, data))
    first, second = transcript(federation, data), transcript(federation, data)
    ring = federation.plan.release.ring
    assert ring is not None
    modulus = (1 << ring.bits) - 1
    values = first.totals_V.size // _ROUNDS
    what = f"sessions on the wire, {mechanism.describe()}"
    for party in range(mechanism.num_parties):
        yield _flat(what, party, "uniform", first.sent_MV[party], ring)
        # One mask on two draws would leave their difference, which is near 0.
        yield _flat(
            what, party, "masks after a restart", (first.sent_MV[party] - second.sent_MV[party]) & modulus, ring
        )
        later = first.sent_MV[party].reshape(_ROUNDS, values)
        yield _flat(what, party, "masks of later rounds", (later[1:] - later[:-1]) & modulus, ring)
    if mechanism.largest_sum is not None:
        wrong = sum(int((each.totals_V > mechanism.largest_sum).sum()) for each in (first, second))
        text = f"{wrong:,} sums are impossible"
        yield certain(what, "masks cancel", 2 * first.totals_V.size, holds=not wrong, statistic=text)
    yield _fresh(what, "fresh noise after a restart", first.totals_V, second.totals_V, mechanism)
    yield _fresh(what, "fresh noise in later rounds", first.totals_V[values:], first.totals_V[:-values], mechanism)


def _flat(what: str, party: int, law: str, residues: Integers, ring: Ring) -> Finding:
    """Hold residues against the uniform law by at most sixteen cells: sessions are short."""
    cells = min(ring.bits, 4 if residues.size >= 8192 else 3)
    counts = np.bincount((residues >> (ring.bits - cells)).reshape(-1), minlength=1 << cells)
    found = chi_square_test(what, counts, np.full(1 << cells, 2.0**-cells), law)
    return replace(found, case=f"party {party}")


def _fresh(what: str, law_name: str, first: Integers, second: Integers, mechanism: Mechanism) -> Finding:
    """Hold the number of equal sums against noise of their own: the embeddings behind them are the same."""
    law = sent_law(mechanism.event, 1.0)
    assert law is not None
    # Two independent draws are equal at most as often as one takes its likeliest value; other parties only add noise.
    most = float(law.probabilities.max())
    equal = int((first == second).sum())
    found = count_test(what, law_name, equal, first.size, most)
    fewer = equal <= first.size * most
    return replace(
        found, p_value=1.0 if fewer else found.p_value, statistic=f"{equal:,} of {first.size:,} sums are equal"
    )


# --- labels ---

#: Small, so that few sessions show a label that is not drawn.
LABEL_EPSILON, LABEL_CLASSES, _LABEL_ROWS = 1.0, 3, 40


def label_plan(data: VerticalDataset) -> Plan:
    """Return a joint plan whose gradients name the label that the server used for each row."""
    return Plan.for_data(
        data,
        mechanism="pbm",
        num_trials=16,
        beta=0.25,
        embedding_dim=LABEL_CLASSES,
        head="fixed",
        activation="tanh",
        batch_size=_LABEL_ROWS,
        num_epochs=2,
        learning_rate=1e-6,
        gradient_codec="float32",
        label_epsilon=LABEL_EPSILON,
        evaluation="none",
    )


def labels_used(federation: Federation, data: VerticalDataset) -> Integers:
    """Return the labels that a curious party reads off the gradients of a session, (epochs, rows)."""
    plan, schedule = federation.plan, federation.plan.schedule
    codec = codec_for(plan.gradient_codec)
    used = np.full((plan.num_epochs, plan.num_samples), -1, dtype=np.int64)

    def tap(direction: str, party: int, raw: bytes) -> None:
        message = Message.from_bytes(raw)
        if direction != "down" or party or not message.carries_gradient:
            return
        number = message.round_number - (message.kind is MessageKind.ROUND)
        rows = schedule[number].rows
        gradient = codec.decode(message.payload, len(rows), plan.embedding_dim, bound=plan.gradient_bound)
        # The gradient at the scores is p - y up to a positive factor: its one negative entry is the label.
        used[number * plan.num_epochs // len(schedule), rows] = gradient.argmin(axis=1)

    federation.taps = [tap]
    federation.fit(data)
    return used


def label_use_tests(sessions: int) -> Sequence[Finding]:
    """Read labels off the gradients of many sessions, and hold them against labels that are drawn once a session.

    Args:
        sessions: Each has a draw of its own.
    """
    data = made_up_data(num_parties=2, num_samples=_LABEL_ROWS, num_classes=LABEL_CLASSES)
    plan = label_plan(data)
    response = plan.label_response
    assert response is not None
    federation = Federation(plan)
    used = np.stack([labels_used(federation, data) for _ in range(sessions)])  # (sessions, epochs, rows)
    changed = int((used != used[:, :1]).sum())
    true = used[:, 0] == data.train_labels
    # The row that is true most often and the one that is so least often, each against the law of any of 40 rows.
    often = [int(true.sum(axis=0).max()), int(true.sum(axis=0).min())]
    kept = 1 - (LABEL_CLASSES - 1) * response.event.other_weight / 2**32
    what = "labels read off gradients"
    worst = [count_test(what, "each row is drawn", each, sessions, kept) for each in often]
    return [
        certain(what, "one draw for all rounds", used.size, holds=not changed, statistic=f"{changed:,} labels changed"),
        *(replace(each, p_value=min(1.0, plan.num_samples * each.p_value)) for each in worst),
        count_test(what, "as often true as charged", int(true.sum()), true.size, kept),
    ]


def sessions_to_see(level: float) -> int:
    """Return how many sessions show one row whose label is never drawn, or one gradient of a true label."""
    kept = math.exp(LABEL_EPSILON) / (math.exp(LABEL_EPSILON) + LABEL_CLASSES - 1)
    return math.ceil(math.log(level / (2 * _LABEL_ROWS)) / math.log(kept))
