"""Sums over the rows of a batch of clipped per-row gradients, in exact integers of a grid.

There are two methods. For networks of dense layers in a row, a row's gradient at a layer is an outer product; one
factor is scaled, and matrix products in float32 add up some rows at a time, with a known error: no row's gradient is
ever stored. For all other networks torch computes each row's gradient by itself, and rows are added up exactly.

Shape suffixes: B rows of the batch, P embedding_dim, L layers, D weights.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl.training.dense import dense_leaves, written_out
from pbmvfl.training.encoders import Bounded
from pbmvfl.training.fixed_point_grid import Grid, add_products, add_truncated, row_scales, row_squares

#: Per-row gradients held at a time, in numbers: 64 MiB.
_CHUNK = 1 << 24
#: Rows of a Gram matrix that are added up at a time, to bound memory.
_GRAM_ROWS = 4096
#: Layers without weights that fail on no value. With others a row could make its batch be taken row by row, and then
#: the sums of other rows would be rounded in another way.
_TOTAL = (
    nn.Flatten,
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Hardtanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
)

#: One network's arrays by use, rows and columns.
Memory = dict[tuple[str, int, int], npt.NDArray[Any]]


class Rows(Protocol):
    """Network whose gradients are summed row by row."""

    def forward(self, batch: Tensor) -> Tensor:
        """Return the embeddings of a batch, ready for `clipped_sum`."""

    def clipped_sum(self, slopes_BP: Tensor) -> npt.NDArray[np.float64]:
        """Return the sum of the last batch's clipped gradients in fine units, in the order of `network.parameters()`.

        Args:
            slopes_BP: Each row's gradient of its own loss.
        """


def rows_of(encoder: Bounded, grid: Grid) -> Rows:
    """Choose the faster method for dense networks, the general one for the rest."""
    leaves = dense_leaves(encoder)
    if leaves is None or not all(type(leaf) in (nn.Linear, *_TOTAL) for leaf in leaves):
        return AnyRows(encoder, grid)
    return DenseRows(encoder, leaves, grid)


class DenseRows:
    """Dense layers in a row, with layers without weights between them."""

    def __init__(self, encoder: Bounded, leaves: list[nn.Module], grid: Grid) -> None:
        self._encoder = encoder
        self._leaves = leaves
        self._grid = grid
        self._any = AnyRows(encoder, grid)  # for inputs that are no rows of numbers, such as sequences
        self._dense = written_out(encoder)
        self._by_dense = False
        self._by_layer = True
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._layers: list[nn.Linear] = []
        self._embedding: Tensor | None = None
        self._memory: Memory = {}

    def forward(self, batch: Tensor) -> Tensor:
        self._by_dense = self._dense is not None and self._dense.takes(batch)
        if self._dense is not None and self._by_dense:
            return self._dense.forward(batch)
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
        if self._dense is not None and self._by_dense:
            ins, outs = self._dense.factors(slopes_BP.numpy())
            layers = self._dense.layers
        elif not self._by_layer:
            return self._any.clipped_sum(slopes_BP)
        else:
            ins, outs, layers = *self._by_autograd(slopes_BP), self._layers
        biased = [layer.bias is not None for layer in layers]
        parts: list[npt.NDArray[np.float64]] = []
        for sums, bias in zip(outer_sums(ins, outs, biased, self._grid, self._memory), biased, strict=True):
            parts += [sums[:, :-1].ravel(), sums[:, -1]] if bias else [sums.ravel()]
        return np.concatenate(parts)

    def _by_autograd(self, slopes_BP: Tensor) -> tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]]]:
        """Return the layers' inputs and the gradients at their outputs."""
        assert self._embedding is not None
        found = torch.autograd.grad(self._embedding, self._outputs, slopes_BP, allow_unused=True)
        outs = [
            torch.zeros_like(output) if slope is None else slope
            for slope, output in zip(found, self._outputs, strict=True)
        ]
        ins = self._inputs
        self._inputs, self._outputs, self._embedding = [], [], None
        return [_plain_array(each) for each in ins], [_plain_array(each) for each in outs]


def _plain_array(values: Tensor) -> npt.NDArray[np.float32]:
    return values.to(torch.float32).contiguous().numpy()


def outer_sums(
    ins: list[npt.NDArray[np.float32]],
    outs: list[npt.NDArray[np.float32]],
    biased: list[bool],
    grid: Grid,
    memory: Memory | None = None,
) -> list[npt.NDArray[np.float64]]:
    """Sum over rows, for each layer, (gradient at its output) x (its input, and 1 for the bias), clipped by row.

    Returns:
        Sums in whole fine units, in memory that the next call with the same `memory` reuses: fresh arrays of this size
        would cost page faults.
    """
    memory = {} if memory is None else memory
    shape_LB = (len(ins), len(ins[0]))
    squares_in, squares_out = np.empty(shape_LB), np.empty(shape_LB)
    for layer, bias in enumerate(biased):
        row_squares(ins[layer], float(bias), squares_in[layer])
        row_squares(outs[layer], 0.0, squares_out[layer])
    scales = np.empty(shape_LB[1])
    row_scales(squares_in, squares_out, grid.units, grid.target, scales)
    totals = []
    for layer, bias in enumerate(biased):
        columns_in, columns_out = ins[layer].shape[1], outs[layer].shape[1]
        left = _reused(memory, ("left", grid.chunk_rows, columns_out), np.float32)
        right = _reused(memory, ("right", grid.chunk_rows, columns_in), np.float32)
        product = _reused(memory, ("product", columns_out, columns_in), np.float32)
        total = _reused(memory, (f"total {layer}", columns_out, columns_in + bias), np.float64)
        total.fill(0)
        add_products(ins[layer], outs[layer], scales, bias, left, right, product, total)
        totals.append(total)
    return totals


def gram_sum(rows_BD: npt.NDArray[np.float32], grid: Grid) -> npt.NDArray[np.float64]:
    """Sum over rows (row) x (row), clipped by row, in whole fine units.

    Both factors are the same integers, so that no two rows' products have a negative inner product. Sums are exact: a
    row's entries are at most its norm, and sums of them stay below 2^53.
    """
    total_DD = np.zeros((rows_BD.shape[1],) * 2)
    for start in range(0, len(rows_BD), _GRAM_ROWS):
        rows = rows_BD[start : start + _GRAM_ROWS].astype(np.float64)
        squares_B1 = np.square(rows).sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            scales_B1 = np.sqrt(grid.units * np.minimum(1.0, grid.target / (squares_B1 * grid.units)))
        scaled = np.where(np.isfinite(squares_B1), rows, 0.0) * np.where(squares_B1 > 0, scales_B1, 0.0)
        whole_BD = np.trunc(np.where(np.isfinite(scaled), scaled, 0.0))
        norms_B1 = np.square(whole_BD).sum(axis=1, keepdims=True)  # of the products: the row's own square
        whole_BD *= np.square(norms_B1) <= grid.largest_square  # scaling leaves no row that is longer
        total_DD += whole_BD.T @ whole_BD
    return total_DD


def _reused(memory: Memory, key: tuple[str, int, int], kind: type[np.floating[Any]]) -> npt.NDArray[Any]:
    if key not in memory:
        memory[key] = np.empty(key[1:], dtype=kind)
    return memory[key]


class AnyRows:
    """Any network that treats each row by itself, by torch's own per-row gradients."""

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
    """Add each row's gradient to the total in whole fine units, rounded towards zero, with a checked norm."""
    squares = np.empty(len(gradients_BD))
    row_squares(gradients_BD, 0.0, squares)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = grid.units * np.minimum(1.0, grid.target / (np.sqrt(squares) * grid.units))
    add_truncated(gradients_BD, np.where(np.isfinite(squares), scales, 0.0), grid.largest_square, total_D)


def weights_of(encoder: nn.Module) -> int:
    """Count the numbers that learn."""
    return sum(math.prod(each.shape) for each in encoder.parameters() if each.requires_grad)
