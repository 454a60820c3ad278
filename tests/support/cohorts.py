"""Small aligned tables, plans for them, and a server with its parties driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.server import Server
from support.known_randomness import TwinSetup


def small_data(
    *, num_parties: int = 3, num_samples: int = 37, num_test_samples: int = 13, num_classes: int = 3, columns: int = 4
) -> VerticalDataset:
    """A table that can be learned: the class moves every party's columns a little."""
    random = np.random.default_rng(12345)
    rows = num_samples + num_test_samples
    labels = random.integers(0, num_classes, rows)
    centres = random.normal(size=(num_classes, num_parties, columns))
    features = (centres[labels] + 0.5 * random.normal(size=(rows, num_parties, columns))).astype(np.float32)
    return VerticalDataset(
        name="small",
        party_names=tuple(f"party-{index}" for index in range(num_parties)),
        train_features=tuple(np.ascontiguousarray(features[:num_samples, m]) for m in range(num_parties)),
        test_features=tuple(np.ascontiguousarray(features[num_samples:, m]) for m in range(num_parties)),
        train_labels=labels[:num_samples].astype(np.int64),
        test_labels=labels[num_samples:].astype(np.int64),
        class_names=tuple(f"class-{index}" for index in range(num_classes)),
        default_encoder="linear",
    )


def small_plan(data: VerticalDataset, **choices: Any) -> Plan:
    """Two epochs with a short last batch."""
    usual = {"batch_size": 10, "num_epochs": 2, "embedding_dim": 3, "num_trials": 5, "learning_rate": 0.1, "seed": 7}
    return Plan.for_data(data, **{**usual, **choices})


class Cohort:
    """A server and its parties driven by hand. Randomness is known, so that two of them are twins to the byte."""

    def __init__(self, plan: Plan, data: VerticalDataset, *, head: torch.nn.Module | None = None) -> None:
        self.plan = plan
        identities = [Identity.from_private_bytes(bytes([100 + index]) * 32) for index in range(plan.num_parties)]
        self.pinned = tuple(identity.public for identity in identities)
        self.server = Server(plan, train_labels=data.train_labels, run_id=b"run-0001", head=head)
        self.parties = [
            TwinSetup(
                plan=plan,
                index=index,
                identity=identity.private_bytes(),
                identities=self.pinned,
                train_features=data.train_features[index],
                test_features=data.test_features[index],
            ).build()
            for index, identity in enumerate(identities)
        ]
        #: (direction, party, message) in the order of the wire.
        self.transcript: list[tuple[str, int, bytes]] = []

    def run(
        self,
        *,
        until: Callable[[bytes], bool] = lambda _: False,
        before_party: Callable[[Party, bytes], None] = lambda *_: None,
        after_party: Callable[[Party, bytes, bytes], None] = lambda *_: None,
        before_server: Callable[[Server, bytes], None] = lambda *_: None,
        after_server: Callable[[Server, bytes], None] = lambda *_: None,
    ) -> bytes | None:
        """Run to the end, or to the first message of the server for which `until` holds, which is not delivered."""
        while True:
            message = self.server.advance()
            if message is None or until(message):
                return message
            answers = []
            for index, party in enumerate(self.parties):
                before_party(party, message)
                answer = party.answer(message)
                after_party(party, message, answer)
                self.transcript.append(("down", index, message))
                if answer:
                    answers.append(answer)
            for index, answer in enumerate(answers):
                before_server(self.server, answer)
                self.server.receive(answer)
                after_server(self.server, answer)
                self.transcript.append(("up", index, answer))
