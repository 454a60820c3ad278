"""Encoders of simulated parties: dense ones as stacked matrices, others by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.plan.groups import Activation
from pbmvfl.plan.plan import Plan
from pbmvfl.training.encoders import SQUASH, Bounded, build_encoder

# --- Any encoders, one network per party, by autograd: for convolutions ---
# Shape suffixes: M parties, B rows, P embedding_dim.


class Everything(nn.Module):
    """Encoders and head as one module: every optimiser of a plan works element by element, so one serves all."""

    def __init__(self, encoders: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoders, self.head = encoders, head


class Networks(nn.Module):
    """Encoders of all parties side by side, by autograd."""

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
        """Return the slope of every parameter, in the order of `parameters()`."""
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


# --- Dense encoders of all parties as stacks of matrices on the CPU, with the chain rule written out ---
# The networks are the plan's own, with its public first weights: built by `encoders.build_encoder`, then stacked. A
# party with fewer columns than another is padded with columns of zeros, whose weights never move. Matrix products go
# through numpy (a third of the time of torch.bmm at these sizes) and everything element by element through torch, on
# the same memory. `pbmvfl.training.dense` cannot serve here: it handles one network at a time, and its loops are
# compiled by Numba, which a machine that simulates may not have.
#
# Shape suffixes: M parties, N rows, B rows of a batch, D columns, I and O a layer's inputs and outputs, P
# embedding_dim.


#: Encoders that are nothing but dense layers with rectifiers in between.
DENSE = frozenset({"mlp", "linear"})

_Array = npt.NDArray[np.float32]


def stacked_features(parts: Sequence[npt.NDArray[np.float32]]) -> Tensor:
    """Stack the parties' features as (N, M, D), so that a batch is one gather of whole rows."""
    flat = [part.reshape(len(part), -1) for part in parts]
    widest = max(part.shape[1] for part in flat)
    whole = np.zeros((len(flat[0]), len(flat), widest), dtype=np.float32)
    for m, part in enumerate(flat):
        whole[:, m, : part.shape[1]] = part
    return torch.from_numpy(whole)


class DenseStack(nn.Module):
    """Dense encoders of all parties. Layer l has weights_MIO and biases_M1O, parameters of this one module."""

    def __init__(self, plan: Plan, input_shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        encoders = [build_encoder(plan, index=m, input_shape=shape) for m, shape in enumerate(input_shapes)]
        layers = [[layer for layer in encoder.modules() if isinstance(layer, nn.Linear)] for encoder in encoders]
        self._columns = [stack[0].in_features for stack in layers]
        weights, biases = [], []
        for same in zip(*layers, strict=True):
            inputs = max(layer.in_features for layer in same)
            stacked = torch.zeros(len(same), inputs, same[0].out_features)
            for m, layer in enumerate(same):
                stacked[m, : layer.in_features] = layer.weight.detach().T
            weights.append(nn.Parameter(stacked))
            biases.append(nn.Parameter(torch.stack([layer.bias.detach() for layer in same]).unsqueeze(1)))
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)
        self._bound, self._activation = plan.bound, plan.activation
        self._weights: list[_Array] = [weight.detach().numpy() for weight in weights]  # the same memory
        self._biases = [bias.detach() for bias in biases]
        self._slopes = [torch.empty_like(parameter) for parameter in (*weights, *biases)]
        self._hidden: list[Tensor] = []  # of the last batch: every layer's input, and the raw output
        self._squashed = torch.empty(0)  # that output after the activation
        self._ones: dict[int, _Array] = {}

    def load_encoders(self, encoders: Sequence[Bounded]) -> None:
        """Write the stacked weights back into ordinary networks, for comparison and export."""
        for m, encoder in enumerate(encoders):
            linear = [layer for layer in encoder.modules() if isinstance(layer, nn.Linear)]
            with torch.no_grad():
                for layer, weight, bias in zip(linear, self.weights, self.biases, strict=True):
                    layer.weight.copy_(weight[m, : layer.in_features].T)
                    layer.bias.copy_(bias[m, 0])

    def forward(self, features_BMD: Tensor) -> Tensor:
        """Return the embeddings (M, B, P), and keep what the chain rule needs until the next call."""
        x_MBI = features_BMD.transpose(0, 1)
        hidden = [x_MBI]
        last = len(self._weights) - 1
        for index, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            z_MBO = torch.from_numpy(np.matmul(hidden[-1].numpy(), weight)).add_(bias)
            hidden.append(z_MBO if index == last else z_MBO.clamp_min_(0))
        self._hidden = hidden
        self._squashed = SQUASH[self._activation](hidden[-1])
        return self._squashed if self._bound == 1.0 else self._squashed * self._bound

    def _unsquash(self, gradient_BP: Tensor) -> Tensor:
        """Return the gradient at the raw outputs: the sum over the parties passes the gradient on to each unchanged."""
        raw, squashed = self._hidden[-1], self._squashed
        gradient = gradient_BP if self._bound == 1.0 else gradient_BP * self._bound
        match self._activation:
            case Activation.TANH:
                return (1 - squashed * squashed).mul_(gradient)
            case Activation.HARDTANH:
                return gradient * ((raw > -1) & (raw < 1))
            case Activation.SOFTSIGN:
                return gradient / (1 + raw.abs()) ** 2
            case Activation.NONE:
                return gradient
            case _:
                assert_never(self._activation)

    def slopes(self, gradient_BP: Tensor) -> list[Tensor]:
        """Return the slope of every parameter, in the order of `parameters()`."""
        layers = len(self._weights)
        g_MBO = self._unsquash(gradient_BP)
        rows = len(gradient_BP)
        ones = self._ones.setdefault(rows, np.ones((1, rows), dtype=np.float32))
        for index in reversed(range(layers)):
            g = g_MBO.numpy()
            x = self._hidden[index]
            np.matmul(x.numpy().transpose(0, 2, 1), g, out=self._slopes[index].numpy())
            np.matmul(ones, g, out=self._slopes[layers + index].numpy())
            if index:
                back = torch.from_numpy(np.matmul(g, self._weights[index].transpose(0, 2, 1)))
                g_MBO = torch.ops.aten.threshold_backward(back, x, 0.0)
        return self._slopes

    @torch.no_grad()
    def exact_sums(self, features_NMD: Tensor, *, rows_at_once: int = 128) -> Tensor:
        """Return noise-free sums for evaluation, in pieces that stay in the cache."""
        sums = [self(piece).sum(0) for piece in torch.split(features_NMD, rows_at_once)]
        self._hidden = []
        return torch.cat(sums)
