"""How a party's network learns from a gradient: the forward pass, and what becomes of the gradient, in one object.

The plan chooses. `plain` steps along the exact gradient; noisy updates, which make the strict account small, are to be
another module here.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pbmvfl.errors import PlanError
from pbmvfl.plan import Plan
from pbmvfl.privacy.events import PlainUpdate
from pbmvfl.updates.plain import Plain

__all__ = ["Plain", "Update", "check_trainable", "update_for"]


class Update(Protocol):
    """One party's training. A batch that was embedded for training waits for its gradient."""

    @property
    def waiting_rows(self) -> int:
        """Rows of the batch that waits for its gradient; 0 if none does."""

    def embed(self, batch: Tensor, *, for_training: bool) -> npt.NDArray[np.float32]:
        """The embeddings of a batch. With `for_training` it waits for its gradient from then on."""

    def apply(self, gradient_BP: npt.NDArray[np.float32]) -> None:
        """Step with the gradient of the batch that waits, if one does; then none waits."""

    def state(self) -> dict[str, Tensor]:
        """Weights and moments for this party's own checkpoint. No keys, no noise."""

    def load_state(self, state: dict[str, Tensor]) -> None: ...


#: Ways of learning by the name of the event that they are charged as.
_UPDATES: dict[str, type[Plain]] = {PlainUpdate.name: Plain}


def check_trainable(plan: Plan) -> None:
    """Refuse a plan whose updates can be accounted for but not made."""
    if plan.update.event.name not in _UPDATES:
        raise PlanError(
            f"noise_multiplier={plan.noise_multiplier:g}: such a plan can be accounted for, but this version does not "
            "train with noisy weight updates yet; plan with accounting=paper, or set noise_multiplier=0"
        )


def update_for(plan: Plan, encoder: nn.Module) -> Update:
    """The plan's way of learning, for one party's network."""
    check_trainable(plan)
    return _UPDATES[plan.update.event.name](plan, encoder)
