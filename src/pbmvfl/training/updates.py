"""How a party's network learns from a gradient: the forward pass, and what becomes of the gradient, in one object.

The plan chooses. `plain` steps along the exact gradient; `noisy` clips each row's gradient and adds noise to the sum,
which makes the strict account small; `correlated` lets the noise of neighbouring steps cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.events import PlainUpdate, RoundedGaussianSum
from pbmvfl.training.correlated import Correlated
from pbmvfl.training.noisy import Noisy
from pbmvfl.training.plain import Plain

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy

__all__ = ["Correlated", "Noisy", "Plain", "Update", "check_trainable", "update_for"]


class Update(Protocol):
    """One party's training. A batch that was embedded for training waits for its gradient."""

    @property
    def waiting_rows(self) -> int:
        """Rows of the batch that waits for its gradient; 0 if none does."""

    def embed(self, batch: Tensor, *, for_training: bool) -> npt.NDArray[np.float32]:
        """The embeddings of a batch. With `for_training` it waits for its gradient from then on."""

    def apply(self, gradient_BP: npt.NDArray[np.float32], entropy: Entropy) -> None:
        """Step with the gradient of the batch that waits, if one does; then none waits. Noise comes from `entropy`."""

    def state(self) -> dict[str, Tensor]:
        """Weights and moments for this party's own checkpoint. No keys, no noise."""

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
    """The plan's way of learning, for one party's network.

    `rows` are a few of its own, to try whether the network can learn in this way; `on_fault` is told what the network
    raised where learning went on without it.
    """
    check_trainable(plan)
    kind = Correlated if plan.update.band.width > 1 else _UPDATES[plan.update.event.name]
    return kind(plan, encoder, rows=rows, on_fault=on_fault)
