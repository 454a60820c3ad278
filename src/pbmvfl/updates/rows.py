"""Sums over the rows of a batch of clipped per-row gradients, in exact integers of a grid.

Two ways. For networks of dense layers in a row the gradient of one row at a layer is an outer product; its two factors
become integers, and one matrix product in float64 adds up all rows, exactly: no row's gradient is ever stored. For all
other networks torch computes each row's gradient by itself, some rows at a time.

Shape suffixes: B rows of the batch, P embedding_dim, L layers, D weights.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.encoders import Bounded
from pbmvfl.updates.grid import Grid, add_truncated, factor_scales, row_squares, truncated

#: Per-row gradients held at a time, in numbers: 64 MiB.
_CHUNK = 1 << 24
#: Wider layers could overflow the check of their integers' norm.
_WIDEST = 1 << 16


#: One network's arrays by place, rows and columns.
Memory = dict[tuple[int, int, int], npt.NDArray[np.float64]]


class Rows(Protocol):
    """A network of which gradients are summed row by row."""

    def forward(self, batch: Tensor) -> Tensor:
        """The embeddings of a batch, ready for `clipped_sum`."""

    def clipped_sum(self, slopes_BP: Tensor) -> npt.NDArray[np.float64]:
        """For the last batch: the sum of its rows' clipped gradients in fine units, weight by weight as in
        `network.parameters()`. `slopes_BP` is each row's gradient of its own loss."""


def rows_of(encoder: Bounded, grid: Grid) -> Rows:
    """The faster way for dense networks, the other for the rest."""
    leaves = _dense_leaves(encoder)
    return AnyRows(encoder, grid) if leaves is None else DenseRows(encoder, leaves, grid)


def _dense_leaves(encoder: Bounded) -> list[nn.Module] | None:
    """The layers in the order in which they run, if all that learns is plain dense layers, each used once."""
    leaves: list[nn.Module] = []

    def collect(module: nn.Module) -> bool:
        if type(module) is nn.Sequential:
            return all(collect(child) for child in module)
        leaves.append(module)
        if type(module) is nn.Linear:
            learns = {parameter.requires_grad for parameter in module.parameters()}
            usual = {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
            return len(learns) == 1 and usual and max(module.weight.shape) < _WIDEST
        return not any(True for _ in module.parameters())

    if type(encoder) is not Bounded or not collect(encoder.network):
        return None
    dense = [leaf for leaf in leaves if type(leaf) is nn.Linear]
    weights = [weight for leaf in dense for weight in leaf.parameters()]
    apart = len({id(leaf) for leaf in dense}) == len(dense) and len({id(weight) for weight in weights}) == len(weights)
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules())
    return leaves if apart and not hooked and any(weight.requires_grad for weight in weights) else None


class DenseRows:
    """Dense layers in a row, with anything without weights between them."""

    def __init__(self, encoder: Bounded, leaves: list[nn.Module], grid: Grid) -> None:
        self._encoder = encoder
        self._leaves = leaves
        self._grid = grid
        self._any = AnyRows(encoder, grid)  # for inputs that are no rows of numbers, such as sequences
        self._by_layer = True
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._layers: list[nn.Linear] = []
        self._embedding: Tensor | None = None
        self._memory: Memory = {}

    def forward(self, batch: Tensor) -> Tensor:
        self._inputs, self._outputs, self._layers = [], [], []
        values = batch
        for leaf in self._leaves:
            before = values
            values = leaf(before)
            if isinstance(leaf, nn.Linear) and leaf.weight.requires_grad:
                self._inputs.append(before.detach())
                self._outputs.append(values)
                self._layers.append(leaf)
        encoder = self._encoder
        embedding = encoder._squash(values)
        embedding = embedding if encoder.bound == 1.0 else embedding * encoder.bound
        self._by_layer = all(each.shape[:-1] == (len(batch),) for each in self._inputs)
        self._embedding = embedding if self._by_layer else self._any.forward(batch)
        return self._embedding

    def clipped_sum(self, slopes_BP: Tensor) -> npt.NDArray[np.float64]:
        if not self._by_layer:
            return self._any.clipped_sum(slopes_BP)
        assert self._embedding is not None
        found = torch.autograd.grad(self._embedding, self._outputs, slopes_BP, allow_unused=True)
        outs = [
            (torch.zeros_like(output) if slope is None else slope).contiguous().numpy()
            for slope, output in zip(found, self._outputs, strict=True)
        ]
        ins = [each.contiguous().numpy() for each in self._inputs]
        biased = [layer.bias is not None for layer in self._layers]
        self._inputs, self._outputs, self._embedding = [], [], None
        parts: list[npt.NDArray[np.float64]] = []
        for sums, bias in zip(outer_sums(ins, outs, biased, self._grid, self._memory), biased, strict=True):
            parts += [sums[:, :-1].ravel(), sums[:, -1]] if bias else [sums.ravel()]
        return np.concatenate(parts)


def outer_sums(
    ins: list[npt.NDArray[np.float32]],
    outs: list[npt.NDArray[np.float32]],
    biased: list[bool],
    grid: Grid,
    memory: Memory | None = None,
) -> list[npt.NDArray[np.float64]]:
    """For each layer the sum over rows of (gradient at its output) x (its input, and 1 for the bias), clipped by row.

    All factors are integers and every row's norm is checked to be at most the grid's. A product of factors is then at
    most that norm, a sum of B at most B times it, below 2^53: float64 adds exactly, whatever the order. `memory` is
    used again from call to call: fresh arrays of this size would cost page faults.
    """
    memory = {} if memory is None else memory
    shape_LB = (len(ins), len(ins[0]))
    squares_in, squares_out, scale_in, scale_out = (np.empty(shape_LB) for _ in range(4))
    for layer, bias in enumerate(biased):
        row_squares(ins[layer], float(bias), squares_in[layer])
        row_squares(outs[layer], 0.0, squares_out[layer])
    factor_scales(squares_in, squares_out, grid.units, grid.target, scale_in, scale_out)
    whole_in, whole_out = (np.empty(shape_LB, dtype=np.int64) for _ in range(2))
    factors = []
    for layer, bias in enumerate(biased):
        left = _reused(memory, (2 * layer, shape_LB[1], outs[layer].shape[1]))
        right = _reused(memory, (2 * layer + 1, shape_LB[1], ins[layer].shape[1] + bias))
        truncated(outs[layer], scale_out[layer], False, left, whole_out[layer])
        truncated(ins[layer], scale_in[layer], bias, right, whole_in[layer])
        factors.append((left, right))
    within_B = (whole_in.astype(np.float64) * whole_out.astype(np.float64)).sum(axis=0) <= grid.largest_square
    if not within_B.all():  # scaling leaves no such row; should one be there, it counts for nothing
        for left, _ in factors:
            left[~within_B] = 0
    return [(torch.from_numpy(left).T @ torch.from_numpy(right)).numpy() for left, right in factors]


def gram_sum(rows_BD: npt.NDArray[np.float32], grid: Grid) -> npt.NDArray[np.float64]:
    """The sum over rows of (row) x (row), clipped by row: the two factors are the same integers, so that no two rows'
    products have an inner product below zero."""
    squares_1B, scale_1B, other_1B = (np.empty((1, len(rows_BD))) for _ in range(3))
    row_squares(rows_BD, 0.0, squares_1B[0])
    factor_scales(squares_1B, squares_1B, grid.units, grid.target, scale_1B, other_1B)
    whole_BD, norms_B = np.empty(rows_BD.shape), np.empty(len(rows_BD), dtype=np.int64)
    truncated(rows_BD, scale_1B[0], False, whole_BD, norms_B)
    whole_BD[~(norms_B.astype(np.float64) ** 2 <= grid.largest_square)] = 0  # scaling leaves no such row
    whole = torch.from_numpy(whole_BD)
    return np.asarray((whole.T @ whole).numpy())


def _reused(memory: Memory, key: tuple[int, int, int]) -> npt.NDArray[np.float64]:
    if key not in memory:
        memory[key] = np.empty(key[1:])
    return memory[key]


class AnyRows:
    """Any network that treats each row by itself: torch's own per-row gradients."""

    def __init__(self, encoder: nn.Module, grid: Grid) -> None:
        self._encoder = encoder
        self._grid = grid
        self._batch: Tensor | None = None

    def forward(self, batch: Tensor) -> Tensor:
        self._batch = batch
        with torch.no_grad():
            embedding: Tensor = self._encoder(batch)
        return embedding

    def clipped_sum(self, slopes_BP: Tensor) -> npt.NDArray[np.float64]:
        assert self._batch is not None
        batch, self._batch = self._batch, None
        weights = {name: each.detach() for name, each in self._encoder.named_parameters() if each.requires_grad}
        num_weights = sum(each.numel() for each in weights.values())
        total_D = np.zeros(num_weights)
        each_row = torch.func.vmap(self._gradient, in_dims=(None, 0, 0))
        rows = max(1, _CHUNK // max(1, num_weights))
        for start in range(0, len(batch), rows):
            found = each_row(weights, batch[start : start + rows], slopes_BP[start : start + rows])
            gradients_BD = torch.cat([found[name].flatten(1) for name in weights], dim=1)
            add_clipped(gradients_BD.numpy(), self._grid, total_D)
        return total_D

    def _gradient(self, weights: dict[str, Tensor], row: Tensor, slope_P: Tensor) -> dict[str, Tensor]:
        def embedding(given: dict[str, Tensor]) -> Any:
            return torch.func.functional_call(self._encoder, given, (row.unsqueeze(0),)).squeeze(0)

        backward = torch.func.vjp(embedding, weights)[1]
        gradient: dict[str, Tensor] = backward(slope_P)[0]
        return gradient


def add_clipped(gradients_BD: npt.NDArray[np.float32], grid: Grid, total_D: npt.NDArray[np.float64]) -> None:
    """Add each row's gradient to the total, as whole fine units, rounded towards zero, with a norm that is checked."""
    squares = np.empty(len(gradients_BD))
    row_squares(gradients_BD, 0.0, squares)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = grid.units * np.minimum(1.0, grid.target / (np.sqrt(squares) * grid.units))
    add_truncated(gradients_BD, np.where(np.isfinite(squares), scales, 0.0), grid.largest_square, total_D)


def weights_of(encoder: nn.Module) -> int:
    """How many numbers learn."""
    return sum(math.prod(each.shape) for each in encoder.parameters() if each.requires_grad)
