"""Dense layers with rectifiers between them: forward pass and chain rule written out, in reused memory.

Networks of this size spend more time in autograd's bookkeeping than in arithmetic. The results are autograd's up to the
rounding of float32, also where they are not finite. Which networks are handled here depends on their layers and on the
shape and type of a batch, never on values.

Kept memory belongs to one network and one batch at a time. Embeddings are returned in memory of their own; slopes and
gradients at layers are valid until the next batch.

Shape suffixes: B rows of the batch, I columns into a layer, O columns out of it, P embedding_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pbmvfl._compiled import compiled
from pbmvfl.plan.groups import Activation
from pbmvfl.training.encoders import Bounded

#: Wider layers are left to torch: sums over so many columns would need wider margins than the grid's.
WIDEST = 1 << 16

_Array = npt.NDArray[np.float32]


def dense_leaves(encoder: nn.Module) -> list[nn.Module] | None:
    """Return the layers in the order in which they run, if only plain dense layers learn, each used once; else None."""
    leaves: list[nn.Module] = []

    def collect(module: nn.Module) -> bool:
        if type(module) is nn.Sequential:
            return all(collect(child) for child in module)
        leaves.append(module)
        if type(module) is nn.Linear:
            learns = {parameter.requires_grad for parameter in module.parameters()}
            usual = {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
            return len(learns) == 1 and usual and max(module.weight.shape) < WIDEST
        return not any(True for _ in module.parameters())

    if type(encoder) is not Bounded or not collect(encoder.network):
        return None
    dense = [leaf for leaf in leaves if type(leaf) is nn.Linear]
    weights = [weight for leaf in dense for weight in leaf.parameters()]
    apart = len({id(leaf) for leaf in dense}) == len(dense) and len({id(weight) for weight in weights}) == len(weights)
    hooked = any(_is_hooked(module) for module in encoder.modules())
    return leaves if apart and not hooked and any(weight.requires_grad for weight in weights) else None


def _is_hooked(module: nn.Module) -> bool:
    """Return True if calling a module does something else than its class says."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for a plain dense layer on the CPU whose float32 weights all learn."""
    return (
        type(module) is nn.Linear
        and not _is_hooked(module)
        and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
        and all(
            weight.requires_grad
            and weight.dtype is torch.float32
            and weight.device.type == "cpu"
            and weight.is_contiguous()
            for weight in module.parameters()
        )
    )


def written_out(encoder: nn.Module) -> Dense | None:
    """Return the network in this module's form, if it is dense layers with rectifiers between them; else None."""
    leaves = dense_leaves(encoder)
    if leaves is None:
        return None
    first = leaves[0]
    flattens = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
    rest = leaves[1:] if flattens else leaves
    layers = [leaf for leaf in rest[::2] if type(leaf) is nn.Linear]
    if len(layers) != len(rest[::2]) or not all(type(leaf) is nn.ReLU for leaf in rest[1::2]) or len(rest) % 2 == 0:
        return None
    fits = all(before.out_features == after.in_features for before, after in pairwise(layers))
    assert isinstance(encoder, Bounded)
    usual = all(is_plain_linear(layer) for layer in layers) and encoder.activation in _THROUGH
    return Dense(encoder, layers, flattens=flattens) if fits and usual else None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer and its memory for batches of one size, shared by torch and compiled loops."""

    weight_OI: Tensor
    weight_IO: Tensor
    bias_O: Tensor | None
    output_BO: Tensor
    gradient_BO: Tensor  # of the loss, at the output before the rectifier
    gradient_OB: Tensor
    slope_OI: Tensor
    output: _Array  # the same memory, for compiled loops
    gradient: _Array
    bias_slope: _Array
    slopes: tuple[Tensor, ...]  # of the weights, and of the bias if there is one


class Dense:
    """Forward pass and chain rule of one network.

    A batch that went forward is pending until its gradient, or the next batch, arrives.
    """

    def __init__(self, encoder: Bounded, layers: list[nn.Linear], *, flattens: bool) -> None:
        self._encoder = encoder
        self._linear = layers
        self._flattens = flattens
        self._columns = layers[0].in_features
        self._parameters = [weight for layer in layers for weight in layer.parameters()]
        self._through = _THROUGH[encoder.activation]
        self._bound = np.float32(encoder.bound)
        self._addresses: list[int] = []
        self._layers: list[_Layer] = []
        self._memory: list[tuple[Tensor, Tensor]] = []  # outputs and their gradients, for the largest batch so far
        self._input_BI: Tensor | None = None  # of the pending batch
        self._embedding: _Array | None = None  # before multiplication by the bound

    @property
    def layers(self) -> list[nn.Linear]:
        """Return the layers in the order in which they run."""
        return self._linear

    def takes(self, batch: Tensor) -> bool:
        """Return True for rows of as many numbers as the first layer has columns; other batches are left to torch."""
        rows, *columns = batch.shape
        return (
            batch.dtype is torch.float32
            and rows > 0
            and (len(columns) == 1 or (self._flattens and len(columns) > 1))
            and math.prod(columns) == self._columns
            and batch.is_contiguous()
        )

    # --- forward ---

    def forward(self, batch: Tensor) -> Tensor:
        """Return the embeddings, in memory of their own. The batch must not change while it is pending."""
        rows = batch.shape[0]
        self._prepare(rows)
        self._input_BI = values_BI = batch.view(rows, self._columns) if self._flattens else batch
        last = self._layers[-1]
        for layer in self._layers:
            if layer.bias_O is None:
                torch.mm(values_BI, layer.weight_IO, out=layer.output_BO)
            else:
                torch.addmm(layer.bias_O, values_BI, layer.weight_IO, out=layer.output_BO)
            values_BI = layer.output_BO
            if layer is not last:
                values_BI.relu_()
        encoder = self._encoder
        embedding_BP = encoder._squash(values_BI)
        if embedding_BP is values_BI:  # the caller keeps it beyond the next batch
            embedding_BP = values_BI.clone()
        self._embedding = embedding_BP.numpy()
        return embedding_BP if encoder.bound == 1.0 else embedding_BP * encoder.bound

    def _prepare(self, rows: int) -> None:
        """Make views for batches of this size. Weights may have moved to other memory since the last batch."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses == self._addresses and self._layers[0].output_BO.shape[0] == rows:
            return
        if not self._memory or self._memory[0][0].shape[0] < rows:
            self._memory = [
                (torch.empty(rows, layer.out_features), torch.empty(rows, layer.out_features)) for layer in self._linear
            ]
        self._layers = [
            _layer(layer, output[:rows], gradient[:rows])
            for layer, (output, gradient) in zip(self._linear, self._memory, strict=True)
        ]
        self._addresses = addresses

    # --- backward ---

    def slopes(self, gradient_BP: npt.NDArray[np.float32]) -> list[Tensor]:
        """Return the slopes of all weights in the order of `parameters()`, for the pending batch."""
        self._go_back(gradient_BP)
        assert self._input_BI is not None
        found: list[Tensor] = []
        values_BI = self._input_BI
        for layer in self._layers:
            torch.mm(layer.gradient_OB, values_BI, out=layer.slope_OI)
            found += layer.slopes
            values_BI = layer.output_BO
        self._input_BI = None  # frees its memory for the next batch while it is in the cache
        return found

    def factors(self, gradient_BP: npt.NDArray[np.float32]) -> tuple[list[_Array], list[_Array]]:
        """Return the layers' inputs and the gradients at their outputs, for the pending batch."""
        self._go_back(gradient_BP)
        assert self._input_BI is not None
        ins = [self._input_BI.numpy(), *(layer.output for layer in self._layers[:-1])]
        self._input_BI = None
        return ins, [layer.gradient for layer in self._layers]

    def _go_back(self, gradient_BP: npt.NDArray[np.float32]) -> None:
        """Fill in the gradients at the layers' outputs, and the slopes of their biases."""
        layer = self._layers[-1]
        if gradient_BP.shape != layer.gradient.shape:  # compiled loops check no bounds
            raise ValueError(f"gradient of shape={gradient_BP.shape} for a batch of shape={layer.gradient.shape}")
        self._through(gradient_BP, self._bound, self._embedding, layer.gradient, layer.bias_slope)
        for before in self._layers[-2::-1]:
            torch.mm(layer.gradient_BO, layer.weight_OI, out=before.gradient_BO)
            through_relu(before.output, before.gradient, before.bias_slope)
            layer = before


def _layer(layer: nn.Linear, output_BO: Tensor, gradient_BO: Tensor) -> _Layer:
    weight = layer.weight.detach()
    bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
    slope_OI, slope_O = torch.empty_like(weight), torch.empty(layer.out_features)
    return _Layer(
        weight_OI=weight,
        weight_IO=weight.t(),
        bias_O=bias,
        output_BO=output_BO,
        gradient_BO=gradient_BO,
        gradient_OB=gradient_BO.t(),
        slope_OI=slope_OI,
        output=output_BO.numpy(),
        gradient=gradient_BO.numpy(),
        bias_slope=slope_O.numpy(),
        slopes=(slope_OI,) if bias is None else (slope_OI, slope_O),
    )


# --- derivatives: each fills in the gradient before the activation, and its sums over the rows ---


@compiled
def through_relu(output: Any, gradient: Any, sums: Any) -> None:
    """Apply the derivative of the rectifier in place; as in torch, a NaN output lets the gradient through."""
    rows, columns = gradient.shape
    total = np.zeros(columns)
    for b in range(rows):
        here, out = gradient[b], output[b]
        for i in range(columns):
            value = np.float32(0) if out[i] <= np.float32(0) else here[i]
            here[i] = value
            total[i] += np.float64(value)
    for i in range(columns):
        sums[i] = np.float32(total[i])


@compiled
def through_tanh(given: Any, bound: Any, squashed: Any, gradient: Any, sums: Any) -> None:
    rows, columns = gradient.shape
    total = np.zeros(columns)
    for b in range(rows):
        for i in range(columns):
            y = squashed[b, i]
            value = (given[b, i] * bound) * (np.float32(1) - y * y)
            gradient[b, i] = value
            total[i] += np.float64(value)
    for i in range(columns):
        sums[i] = np.float32(total[i])


@compiled
def through_hardtanh(given: Any, bound: Any, squashed: Any, gradient: Any, sums: Any) -> None:
    """Apply the derivative of hardtanh.

    A NaN output lets nothing through, as in torch's vector code; torch's code for the last few values of an array lets
    the gradient through.
    """
    rows, columns = gradient.shape
    total = np.zeros(columns)
    for b in range(rows):
        for i in range(columns):
            y = squashed[b, i]
            value = given[b, i] * bound if (y > np.float32(-1)) & (y < np.float32(1)) else np.float32(0)
            gradient[b, i] = value
            total[i] += np.float64(value)
    for i in range(columns):
        sums[i] = np.float32(total[i])


@compiled
def through_softsign(given: Any, bound: Any, squashed: Any, gradient: Any, sums: Any) -> None:
    """Apply the derivative of softsign: with y = x/(1+|x|), 1/(1+|x|)^2 is (1-|y|) - |y|(1-|y|), NaN at infinities."""
    rows, columns = gradient.shape
    total = np.zeros(columns)
    for b in range(rows):
        for i in range(columns):
            y, slope = abs(squashed[b, i]), given[b, i] * bound
            rest = np.float32(1) - y
            value = slope * rest - slope * (y * rest)
            gradient[b, i] = value
            total[i] += np.float64(value)
    for i in range(columns):
        sums[i] = np.float32(total[i])


@compiled
def through_nothing(given: Any, bound: Any, squashed: Any, gradient: Any, sums: Any) -> None:  # noqa: ARG001
    """Pass the gradient of unbounded scores on. All of these functions take the same arguments."""
    rows, columns = gradient.shape
    total = np.zeros(columns)
    for b in range(rows):
        for i in range(columns):
            value = given[b, i] * bound
            gradient[b, i] = value
            total[i] += np.float64(value)
    for i in range(columns):
        sums[i] = np.float32(total[i])


_THROUGH = {
    Activation.NONE: through_nothing,
    Activation.TANH: through_tanh,
    Activation.HARDTANH: through_hardtanh,
    Activation.SOFTSIGN: through_softsign,
}
