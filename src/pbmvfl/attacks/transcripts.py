"""Joint training by simulated noise, with all that an attacker may be given: embeddings, sums, gradients, heads.

Schedule, first weights, updates, head and estimator are those of the roles; the noise is the mechanism's law drawn by
an ordinary generator with the attacker's seed. `tests/attacks/test_transcripts.py` compares it with a federation.

Shape suffixes: E epochs, N rows, M parties, B rows of a round, P embedding_dim, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pbmvfl.attacks.likelihood import MadeUpEntropy
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.training.encoders import build_encoder, build_head
from pbmvfl.training.head import HeadLoss
from pbmvfl.training.optimizer import Trainer
from pbmvfl.training.updates import Plain

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenRound:
    """One joint round: what was computed, and what was seen of it."""

    rows: npt.NDArray[np.int64]
    embedding_MBP: npt.NDArray[np.float32]
    #: Estimate of the sum that the server made of what was sent.
    estimate_BP: npt.NDArray[np.float32]
    gradient_BP: npt.NDArray[np.float32]
    #: Weights and biases of the server's head before its step.
    head: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
    #: Which probes belong to rows of this round, and the embeddings that their other rows would have had instead.
    probe: npt.NDArray[np.int64]
    probe_MCP: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probes:
    """Pairs of rows: in every round with the first, the second is embedded by the same weights.

    Args:
        row_C: The true rows.
        other_C: A row that could have been in the place of each.
    """

    row_C: npt.NDArray[np.int64]
    other_C: npt.NDArray[np.int64]


_NO_PROBES = Probes(row_C=np.empty(0, dtype=np.int64), other_C=np.empty(0, dtype=np.int64))


def check_joint(plan: Plan) -> None:
    """Refuse plans whose training is not the paper's: joint rounds, plain steps, rows that are apart."""
    if any(kind != JOINT for kind in plan.schedule.kinds if kind.trains) or plan.noise_multiplier:
        raise PlanError(
            "training=local or noise_multiplier above 0: this attack is on joint training; give such a plan"
        )
    if plan.couples_rows:
        raise PlanError(f"encoder={plan.encoder} couples the rows of a batch; permitted here: mlp, linear, resnet18")


def joint_rounds(
    plan: Plan, data: VerticalDataset, *, seed: int, labels: Array | None = None, probes: Probes = _NO_PROBES
) -> Iterator[SeenRound]:
    """Train jointly and yield every round that trains.

    Args:
        plan: A plan with joint rounds and plain steps.
        data: Data of the plan's sizes.
        seed: Of the noise; public, for studies.
        labels: Labels that the server uses; None: the true ones, or a fresh draw where the plan has a label epsilon.
        probes: Other rows to embed in the place of some.

    Raises:
        PlanError: The plan's training is of another kind.
    """
    check_joint(plan)
    entropy = MadeUpEntropy(seed)
    if labels is None:
        response = plan.label_response
        labels = data.train_labels if response is None else response.draw(data.train_labels, entropy)
    networks = [build_encoder(plan, index=m, input_shape=part.shape[1:]) for m, part in enumerate(data.train_features)]
    parties = [Plain(plan, network) for network in networks]
    head: Any = build_head(plan)
    trainer = Trainer(plan, head)
    loss = HeadLoss(trainer, labels, plan.loss, kept=plan.label_kept)
    noisy_sum = plan.release.simulated_sum(seed=seed, device=torch.device("cpu"))
    for turn in plan.schedule:
        if turn.kind != JOINT:
            continue
        batches = [torch.from_numpy(np.ascontiguousarray(part[turn.rows])) for part in data.train_features]
        embedding_MBP = np.stack(
            [party.embed(batch, for_training=True) for party, batch in zip(parties, batches, strict=True)]
        )
        probe = np.flatnonzero(np.isin(probes.row_C, turn.rows))
        probe_MCP = np.zeros((len(networks), len(probe), plan.embedding_dim), dtype=np.float32)
        if len(probe):
            with torch.no_grad():
                for m, (network, part) in enumerate(zip(networks, data.train_features, strict=True)):
                    probe_MCP[m] = network(torch.from_numpy(part[probes.other_C[probe]])).numpy()
        estimate_BP = noisy_sum(torch.from_numpy(embedding_MBP))
        before = (head.weight.detach().numpy().copy(), head.bias.detach().numpy().copy())
        found = loss.gradients(estimate_BP, torch.from_numpy(labels[turn.rows]))
        gradient_BP = np.clip(found.gradient_BP.numpy(), -plan.gradient_bound, plan.gradient_bound)
        trainer.step(found.slopes)
        for party in parties:
            party.apply(gradient_BP, entropy)
        yield SeenRound(
            rows=turn.rows,
            embedding_MBP=embedding_MBP,
            estimate_BP=estimate_BP.detach().numpy(),
            gradient_BP=gradient_BP,
            head=before,
            probe=probe,
            probe_MCP=probe_MCP,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """All rounds of a training, also sorted by row."""

    plan: Plan
    rounds: tuple[SeenRound, ...]

    @property
    def embedding_ENMP(self) -> npt.NDArray[np.float32]:
        """Exact embeddings of every row in every epoch."""
        plan = self.plan
        found = np.zeros((plan.num_epochs, plan.num_samples, plan.num_parties, plan.embedding_dim), dtype=np.float32)
        for epoch, turn in self._by_epoch():
            found[epoch, turn.rows] = turn.embedding_MBP.transpose(1, 0, 2)
        return found

    @property
    def estimate_ENP(self) -> npt.NDArray[np.float32]:
        """Estimated sums of every row in every epoch."""
        plan = self.plan
        found = np.zeros((plan.num_epochs, plan.num_samples, plan.embedding_dim), dtype=np.float32)
        for epoch, turn in self._by_epoch():
            found[epoch, turn.rows] = turn.estimate_BP
        return found

    def probe_ECMP(self, count: int) -> npt.NDArray[np.float32]:
        """Return the embeddings of the other rows of so many probes, in the epochs' rounds of the true rows."""
        plan = self.plan
        found = np.zeros((plan.num_epochs, count, plan.num_parties, plan.embedding_dim), dtype=np.float32)
        for epoch, turn in self._by_epoch():
            found[epoch, turn.probe] = turn.probe_MCP.transpose(1, 0, 2)
        return found

    def _by_epoch(self) -> Iterator[tuple[int, SeenRound]]:
        uses = np.zeros(self.plan.num_samples, dtype=np.int64)
        for turn in self.rounds:
            yield int(uses[turn.rows[0]]), turn
            uses[turn.rows] += 1


def transcript(
    plan: Plan, data: VerticalDataset, *, seed: int, labels: Array | None = None, probes: Probes = _NO_PROBES
) -> Transcript:
    """Return all rounds of a training, as `joint_rounds` yields them."""
    return Transcript(plan=plan, rounds=tuple(joint_rounds(plan, data, seed=seed, labels=labels, probes=probes)))
