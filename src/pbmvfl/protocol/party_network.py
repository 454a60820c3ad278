"""A party's network on its rows: embeddings and updates. Nothing here sends, masks or charges.

A network that fails costs accuracy and nothing else: an adversary would see that a party does not answer, and no
epsilon counts that. So a failure is noted for the owner, and the round continues.

Shape suffixes: N training rows, B rows of the batch, P embedding_dim, K classes.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.errors import EncoderError
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.groups import Loss
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import LOCAL, Split
from pbmvfl.plan.schedule import Round
from pbmvfl.protocol.party_rows import PartyRows
from pbmvfl.training.encoders import check_encoder, is_public_start, weights_digest
from pbmvfl.training.head import log_shares, mean_loss_slope
from pbmvfl.training.updates import Noisy, update_for

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

_log = logging.getLogger(__name__)
#: Most rows that are evaluated together: networks may need much memory for each.
_EVALUATED = 1000


class PartyNetwork:
    """Encoder, its update rule, and the labels once the party holds them."""

    def __init__(self, plan: Plan, encoder: nn.Module, rows: PartyRows, *, index: int) -> None:
        self._plan, self._rows, self._index = plan, rows, index
        self.encoder = check_encoder(encoder, plan, index=index, rows=rows.first)
        self.update = update_for(plan, self.encoder, rows=rows.first, on_fault=self.note_fault)
        self._votes = plan.vote.kind is not VoteKind.RAW
        #: Labels of the training rows, if the plan sends them to the parties; -1 for fusion rows, whose labels stay.
        self.labels: Tensor | None = None
        self._prior_K = torch.zeros(plan.num_classes)
        #: The first failure. The party answered all the same, and the owner should know.
        self.fault: Exception | None = None

    def hold(self, labels: Tensor) -> None:
        """Take the classes of the training rows that train networks, in rising order of the rows."""
        plan = self._plan
        self.labels = torch.full((plan.num_samples,), -1, dtype=torch.int64)
        self.labels[torch.from_numpy(plan.schedule.part_of(LOCAL).copy())] = labels
        if plan.loss is Loss.CROSS_ENTROPY:
            self._prior_K = log_shares(labels, plan.num_classes, plan.label_response)

    def note_fault(self, error: Exception) -> None:
        _log.error("party=%d: its network failed, and the round goes on without it", self._index, exc_info=error)
        self.fault = self.fault or error

    # --- its weights ---

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs: weights, moments, and what was learned to prepare the rows."""
        return {**self.update.state(), **self._rows.state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._rows.load_state(state)
        self.update.load_state(state)

    def begins_publicly(self) -> bool:
        """Return whether the weights are those that anyone can compute from the plan."""
        return is_public_start(self.encoder, self._plan, index=self._index, input_shape=self._rows.shape)

    def digest(self) -> str | None:
        """Return the weight digest, or None. Weights without one are never public."""
        try:
            return weights_digest(self.encoder)
        except EncoderError:
            return None

    # --- what it says of rows ---

    def released_numbers(self, current: Round) -> npt.NDArray[np.float32]:
        """Return the numbers that a round releases of each of its rows, before they are randomised."""
        if current.number >= self._plan.schedule.trained_at:
            self._rows.train_no_more()
        embedding_BP = self.embed(self._rows.batch(current.kind.split, current.rows), current)
        return self._plan.vote(embedding_BP) if not current.kind.trains and self._votes else embedding_BP

    def embed(self, batch: Tensor, current: Round) -> npt.NDArray[np.float32]:
        """Return embeddings, whatever the columns are. Rows on which the network fails are embedded as zeros.

        Rows are then tried one by one, so that a row on which the network fails moves no other row's embedding.
        """
        try:
            return self.update.embed(batch, for_training=current.kind.carries_gradient)
        except Exception as error:
            self.note_fault(error)
            return np.concatenate([self._embed_alone(row) for row in torch.split(batch, 1)])

    def _embed_alone(self, row: Tensor) -> npt.NDArray[np.float32]:
        try:
            return self.update.embed(row, for_training=False)
        except Exception:
            return np.zeros((1, self._plan.embedding_dim), dtype=np.float32)

    def exact_embeddings(self, split: Split) -> npt.NDArray[np.float32]:
        """Return embeddings of a split's rows without noise, for a simulator's evaluation alone."""
        self.encoder.eval()
        found_NP, at = np.empty((self._rows.count(split), self._plan.embedding_dim), dtype=np.float32), 0
        with torch.no_grad():
            for piece in self._rows.pieces(split):
                for some in torch.split(piece, _EVALUATED):
                    found_NP[at : at + len(some)] = self.encoder(some).numpy()
                    at += len(some)
        return found_NP

    # --- how it learns ---

    def apply(self, gradient_BP: npt.NDArray[np.float32], entropy: Entropy) -> None:
        """Take a step by the gradient that came back for the rows which were embedded last."""
        try:
            self.update.apply(gradient_BP, entropy)
        except Exception as error:
            self.note_fault(error)

    def learn_alone(self, current: Round, entropy: Entropy) -> None:
        """Learn from own columns and labels."""
        try:
            if current.kind.statistic:
                self._rows.learn(current, entropy)
            else:
                self.local_step(current, entropy)
        except Exception as error:
            self.note_fault(error)

    def local_step(self, current: Round, entropy: Entropy) -> None:
        """Take one step on a round's rows with the labels that the party holds."""
        split, update = current.kind.split, self.update
        if isinstance(update, Noisy) and current.num_rows > (size := update.piece_rows(self._rows.piece_rows)):
            # Sums do not depend on the order. In that of the table, pieces are read one after the other.
            parts = (current.rising[start : start + size] for start in range(0, current.num_rows, size))
            pieces = ((self._rows.batch(split, part), partial(self._slope, part, current)) for part in parts)
            update.step_over(pieces, rows=current.num_rows, entropy=entropy)
            return
        scores_BK = update.embed(self._rows.batch(split, current.rows), for_training=True)
        update.apply(self._slope(current.rows, current, scores_BK), entropy)

    def _slope(
        self, rows: npt.NDArray[np.int64], current: Round, scores_BK: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Return the gradient of a round's mean loss at the scores of some of its rows."""
        assert self.labels is not None
        labels_B = self.labels.index_select(0, torch.from_numpy(rows.copy()))
        # The prior of the classes is added once to the sum of all parties, so a party learns what its own columns add.
        known_BK = torch.from_numpy(scores_BK) + self._prior_K
        slope_BK = mean_loss_slope(
            known_BK, labels_B, self._plan.loss, rows=current.num_rows, kept=self._plan.label_kept
        )
        bound = self._plan.gradient_bound
        return slope_BK.clamp(-bound, bound).numpy()
