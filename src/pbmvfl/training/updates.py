"""Updates of a party's network: forward pass and use of the gradient in one object, chosen by the plan.

`plain` steps along the exact gradient; `noisy` clips each row's gradient and adds noise to the sum, which makes the
strict account small; `correlated` lets the noise of neighbouring steps cancel.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.events import PlainUpdate, RoundedGaussianSum
from pbmvfl.training.dense import written_out
from pbmvfl.training.encoders import check_shape
from pbmvfl.training.noisy import Correlated, Noisy
from pbmvfl.training.optimizer import TotalTrainer

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy


class Plain:
    """One party's network, stepped along its exact gradients: the weights depend on the rows without any noise.

    Dense networks have their chain rule written out (`dense.py`); all others use torch's autograd.
    """

    def __init__(
        self,
        plan: Plan,
        encoder: nn.Module,
        *,
        rows: Tensor | None = None,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        del rows, on_fault  # any network that embeds can learn, and its exceptions propagate
        self._encoder = encoder
        self._embedding_dim = plan.embedding_dim
        self._trainer = TotalTrainer(plan, encoder)
        self._dense = written_out(encoder)
        self._by_dense = False  # whether the pending batch went through it
        self._waiting: Tensor | None = None  # the embedding, with its graph if autograd made one

    @property
    def waiting_rows(self) -> int:
        return 0 if self._waiting is None else len(self._waiting)

    def embed(self, batch: Tensor, *, for_training: bool) -> npt.NDArray[np.float32]:
        self._waiting = None
        if for_training:
            if not self._encoder.training:  # setting it would visit every module
                self._encoder.train()
            self._by_dense = self._dense is not None and self._dense.takes(batch)
            forward = self._dense.forward if self._dense is not None and self._by_dense else self._encoder
            embedding_BP: Tensor = forward(batch)  # Algorithm 2, line 6: h_m
        else:
            self._encoder.eval()
            with torch.no_grad():
                embedding_BP = self._encoder(batch)
        check_shape(embedding_BP, len(batch), self._embedding_dim)
        self._waiting = embedding_BP if for_training else None
        return embedding_BP.detach().numpy()

    def apply(self, gradient_BP: npt.NDArray[np.float32], entropy: Entropy) -> None:
        """Apply the chain rule from the gradient of the sum, which each party's summand shares, then step."""
        del entropy  # there is no noise
        if self._waiting is None:  # its embedding failed, and a substitute was released
            return
        # Algorithm 2, lines 16 and 17.
        waiting, self._waiting = self._waiting, None
        if self._dense is not None and self._by_dense:
            slopes = self._dense.slopes(gradient_BP)
        else:  # copy: the array may be a read-only view of the message
            slopes = self._trainer.slopes(waiting, torch.from_numpy(gradient_BP.copy()))
        self._trainer.step(slopes)  # Algorithm 2, line 18

    def state(self) -> dict[str, Tensor]:
        return self._trainer.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._trainer.load_state(state)


__all__ = ["Correlated", "Noisy", "Plain", "Update", "check_trainable", "update_for"]


class Update(Protocol):
    """Training of one party. A batch that was embedded for training is pending until its gradient arrives."""

    @property
    def waiting_rows(self) -> int:
        """Return the rows of the pending batch; 0 if there is none."""

    def embed(self, batch: Tensor, *, for_training: bool) -> npt.NDArray[np.float32]:
        """Return the embeddings of a batch. With `for_training` it is pending from then on."""

    def apply(self, gradient_BP: npt.NDArray[np.float32], entropy: Entropy) -> None:
        """Step with the pending batch's gradient, if there is one; then none is pending. `entropy` makes the noise."""

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments for this party's own checkpoint; no keys, no noise."""

    def load_state(self, state: dict[str, Tensor]) -> None: ...


#: Ways of learning by the name of the event that they are charged as.
_UPDATES: dict[str, type[Plain | Noisy]] = {PlainUpdate.name: Plain, RoundedGaussianSum.name: Noisy}


def check_trainable(plan: Plan) -> None:
    """Refuse a plan whose updates can be accounted for but not made."""
    if plan.update.event.name not in _UPDATES:
        raise PlanError(
            f"event={plan.update.event.name}: updates of this sort can be accounted for, but this version does not "
            f"make them; permitted: {', '.join(_UPDATES)}"
        )


def update_for(
    plan: Plan,
    encoder: nn.Module,
    *,
    rows: Tensor | None = None,
    on_fault: Callable[[Exception], None] | None = None,
) -> Update:
    """Return the plan's update for one party's network.

    Args:
        plan: The training plan.
        encoder: The party's network.
        rows: A few of its own rows, to try whether the network can be trained in this way.
        on_fault: Called with what the network raised where training continued without it.

    Raises:
        PlanError: If this version does not make such updates.
        EncoderError: If the network cannot be trained in this way.
    """
    check_trainable(plan)
    kind = Correlated if plan.update.band.width > 1 else _UPDATES[plan.update.event.name]
    return kind(plan, encoder, rows=rows, on_fault=on_fault)
