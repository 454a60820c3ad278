"""Plain updates along the exact gradient, as in the paper. The weights then depend on the rows without any noise.

Dense networks have their chain rule written out (`dense.py`); all others use torch's autograd.

Shape suffixes: B rows of the batch, P embedding_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.plan.plan import Plan
from pbmvfl.training.dense import written_out
from pbmvfl.training.encoders import check_shape
from pbmvfl.training.optimizer import TotalTrainer

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy


class Plain:
    """One party's network, stepped along its exact gradients."""

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
