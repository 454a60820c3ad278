"""A whole small session, byte for byte, as it has to be for ever: the wire cannot change unnoticed.

Columns and weights are small binary fractions and the learning rate is too small to move them, so every embedding is
exact on any machine. The gradient is rounded to bytes, which hides the last digits of the server's arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.groups import Head
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.server import Server
from pbmvfl.training.encoders import Bounded
from support.known_randomness import TwinSetup

DATA = Path(__file__).parents[1] / "data"
#: Name of the file, and what is special about the session.
SESSIONS = {
    "transcript-2-pbm": {"evaluation": "released"},
    "transcript-2-predictions": {"evaluation": "released", "prediction_num_trials": 300, "prediction_beta": 0.125},
    "transcript-2-clear": {"mechanism": "none"},
    "transcript-2-fusion": {
        "training": "local",
        "labels": "parties",
        "head": "fixed",
        "mechanism": "none",
        "activation": "none",
        "noise_multiplier": 1.0,
        "num_fusion_samples": 2,
        "vote": "top",
        "prediction_mechanism": "krr",
        "prediction_symbols": 2,
        "prediction_response_epsilon": 1.0,
        "prediction_secure_aggregation": False,
        "evaluation": "released",
    },
}


def small_table() -> VerticalDataset:
    """Five training rows and two test rows, two columns at each of three parties: sixteenths between -1 and 1."""
    rows = (np.arange(7 * 3 * 2).reshape(7, 3, 2) * 5 % 33 - 16).astype(np.float32) / 16
    labels = np.array([0, 1, 1, 0, 1, 0, 1], dtype=np.int64)
    return VerticalDataset(
        name="frozen",
        party_names=("a", "b", "c"),
        train_features=tuple(np.ascontiguousarray(rows[:5, m]) for m in range(3)),
        test_features=tuple(np.ascontiguousarray(rows[5:, m]) for m in range(3)),
        train_labels=labels[:5],
        test_labels=labels[5:],
        class_names=("no", "yes"),
        default_encoder="linear",
    )


def sixteenths(layer: torch.nn.Linear) -> torch.nn.Linear:
    with torch.no_grad():
        for values in (layer.weight, layer.bias):
            values.copy_((torch.arange(values.numel()).reshape(values.shape) * 3 % 9 - 4) / 16)
    return layer


def session(choices: dict[str, object]) -> list[str]:
    """Every message as a line: its way, the party, its bytes."""
    data = small_table()
    plan = Plan.for_data(
        data,
        **{
            "batch_size": 3,
            "num_epochs": 1,
            "embedding_dim": 2,
            "num_trials": 5,
            "beta": 0.25,
            "activation": "hardtanh",
            "gradient_codec": "int8",
            "learning_rate": 1e-30,
            **choices,
        },
    )
    identities = [Identity.from_private_bytes(bytes([10 + index]) * 32) for index in range(3)]
    pinned = tuple(identity.public for identity in identities)
    head = sixteenths(torch.nn.Linear(2, 2)) if plan.head is Head.TRAINED else None
    server = Server(plan, train_labels=data.train_labels, run_id=b"run-0001", head=head)
    parties = [
        TwinSetup(
            plan=plan,
            index=index,
            identity=identity.private_bytes(),
            identities=pinned,
            train_features=data.train_features[index],
            test_features=data.test_features[index],
        ).build(Bounded(sixteenths(torch.nn.Linear(2, 2)), activation=plan.activation))
        for index, identity in enumerate(identities)
    ]
    lines = []
    while (message := server.advance()) is not None:
        lines.append(f"down all {message.hex()}")
        for index, answer in enumerate([party.receive(message) for party in parties]):
            if answer:
                lines.append(f"up {index} {answer.hex()}")
                server.receive(answer, sender=index)
    return lines


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_has_the_bytes_that_it_always_had(name):
    frozen = (DATA / f"{name}.txt").read_text().splitlines()
    found = session(SESSIONS[name])
    assert len(found) == len(frozen)
    for number, (mine, theirs) in enumerate(zip(found, frozen, strict=True)):
        assert mine == theirs, f"message {number} differs: the protocol's version must change with it"


def test_the_comparison_would_notice_another_beta():
    changed = session({**SESSIONS["transcript-2-pbm"], "beta": 0.2})
    assert changed != (DATA / "transcript-2-pbm.txt").read_text().splitlines()


if __name__ == "__main__":  # writes the files; only for a new version of the protocol
    for name, choices in SESSIONS.items():
        (DATA / f"{name}.txt").write_text("\n".join(session(choices)) + "\n")
