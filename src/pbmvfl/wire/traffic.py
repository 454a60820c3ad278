"""Bytes of a run, predicted exactly from the plan and measured on the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pbmvfl.crypto.key_exchange import KEY_BYTES, NONCE_BYTES, SIGNATURE_BYTES
from pbmvfl.wire.gradient_codecs import codec_for
from pbmvfl.wire.messages import HASH_BYTES, HEADER_BYTES, hello_bytes, label_bytes

if TYPE_CHECKING:
    from pbmvfl.plan.plan import Plan


@dataclass(frozen=True)
class Traffic:
    """Bytes between the parties and the server; every party's copy of a message to all of them counts."""

    bytes_setup: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    rounds: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_setup + other.bytes_setup,
            self.bytes_up + other.bytes_up,
            self.bytes_down + other.bytes_down,
            self.rounds + other.rounds,
        )

    @property
    def total(self) -> int:
        return self.bytes_setup + self.bytes_up + self.bytes_down

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def predicted_traffic(plan: Plan) -> Traffic:
    """Return the traffic of an undisturbed run of this plan, to the byte."""
    schedule, codec = plan.schedule, codec_for(plan.gradient_codec)
    parties = plan.num_parties
    start = HEADER_BYTES + HASH_BYTES
    hello = HEADER_BYTES + hello_bytes(0)
    nonces = HEADER_BYTES + HASH_BYTES + parties * NONCE_BYTES
    key = HEADER_BYTES + KEY_BYTES + SIGNATURE_BYTES
    keys = HEADER_BYTES + parties * (KEY_BYTES + SIGNATURE_BYTES)
    up = down = 0
    for phase in schedule.phases:
        for rows, times in schedule.batches(phase):
            down += times * HEADER_BYTES  # the request for the round
            if phase.kind.answered:
                up += times * (HEADER_BYTES + plan.answer_bytes(phase.kind, rows))
            if phase.kind.carries_gradient:
                down += times * codec.num_bytes(rows, plan.embedding_dim)
        if phase.kind.trains:
            down += phase.passes * HEADER_BYTES  # the end of a pass, with its last gradient if there is one
        if phase.kind.fuses:
            down += phase.passes * schedule.rounds_per_pass(phase.kind) * HEADER_BYTES  # the end of each round
    labels = HEADER_BYTES + label_bytes(plan.num_network_samples, plan.num_classes) if plan.sends_labels else 0
    return Traffic(
        bytes_setup=parties * (start + hello + nonces + key + keys + labels),
        bytes_up=parties * up,
        bytes_down=parties * down,
        rounds=len(schedule),
    )


def human_bytes(count: float) -> str:
    """Format a number of bytes with three significant digits in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
