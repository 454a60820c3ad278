"""Any encoders, one network a party, by autograd: for convolutions.

Shape suffixes: M parties, B rows, P embedding_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pbmvfl.plan.plan import Plan
from pbmvfl.training.encoders import Bounded, build_encoder


class Everything(nn.Module):
    """Encoders and head as one module: every optimiser of a plan works element by element, so one may serve all."""

    def __init__(self, encoders: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoders, self.head = encoders, head


class Networks(nn.Module):
    """All parties' encoders side by side."""

    def __init__(self, plan: Plan, input_shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(
            build_encoder(plan, index=m, input_shape=shape) for m, shape in enumerate(input_shapes)
        )
        self._embeddings: list[Tensor] = []

    def load_encoders(self, encoders: Sequence[Bounded]) -> None:
        """Copy the weights into ordinary networks, for comparison and export."""
        for mine, theirs in zip(self.encoders, encoders, strict=True):
            theirs.load_state_dict(mine.state_dict())

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        self._embeddings = [encoder(part) for encoder, part in zip(self.encoders, features, strict=True)]
        return torch.stack([embedding.detach() for embedding in self._embeddings])

    def slopes(self, gradient_BP: Tensor) -> list[Tensor]:
        """The slope of every parameter, in the order of `parameters()`."""
        found: list[Tensor] = []
        for encoder, embedding in zip(self.encoders, self._embeddings, strict=True):
            found += torch.autograd.grad(embedding, list(encoder.parameters()), gradient_BP)
        self._embeddings = []
        return found

    @torch.no_grad()
    def exact_sums(self, features: Sequence[Tensor], *, rows_at_once: int = 256) -> Tensor:
        self.eval()
        pieces = zip(*(torch.split(part, rows_at_once) for part in features), strict=True)
        sums = [self(list(piece)).sum(0) for piece in pieces]
        self._embeddings = []
        self.train()
        return torch.cat(sums)
