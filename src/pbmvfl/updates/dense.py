"""Dense layers with rectifiers between them: forward pass and chain rule written out, in memory that is used again.

Networks of this size spend more time in autograd's bookkeeping than in arithmetic. The numbers are autograd's up to the
rounding of float32, also where they are no numbers. Which networks are taken this way depends on their layers and on
the shape and type of a batch, never on values.

What is kept belongs to one network and one batch at a time. Embeddings are handed out in memory of their own; slopes
and gradients at layers are good until the next batch.

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

from pbmvfl.compiled import compiled
from pbmvfl.encoders import Bounded
from pbmvfl.plan_groups import Activation

#: Wider layers are left to torch: sums over so many columns would need other margins than those of the grid.
WIDEST = 1 << 16

_Array = npt.NDArray[np.float32]


def dense_leaves(encoder: nn.Module) -> list[nn.Module] | None:
    """The layers in the order in which they run, if all that learns is plain dense layers, each used once."""
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
    """Whether calling a module does something else than its class says."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def is_plain_linear(module: nn.Module) -> bool:
    """A dense layer of float32 numbers that all learn, on the CPU, and that nothing else has been made of."""
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
    """The network in this module's form, if it is dense layers with rectifiers between them and nothing else."""
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
    usual = all(is_plain_linear(layer) for layer in layers)
    assert isinstance(encoder, Bounded)
    return Dense(encoder, layers, flattens=flattens) if fits and usual else None


@dataclass(frozen=True)
class _Layer:
    """One layer's weights and its memory for batches of one size, seen by torch and by numpy: the same numbers."""

    weight_IO: Tensor  # as addmm wants it
    weight_OI: _Array
    bias_O: Tensor | None
    output_BO: Tensor
    output: _Array
    gradient_BO: _Array  # of the loss, at the output before the rectifier
    gradient_OB: _Array
    slope_OI: _Array
    slope_O: _Array
    slopes: tuple[Tensor, ...]  # of the weights and of the bias, if there is one


class Dense:
    """Forward pass and chain rule of one network. A batch that went forward waits until the next one does."""

    def __init__(self, encoder: Bounded, layers: list[nn.Linear], *, flattens: bool) -> None:
        self._encoder = encoder
        self._linear = layers
        self._flattens = flattens
        self._columns = layers[0].in_features
        self._parameters = [weight for layer in layers for weight in layer.parameters()]
        self._bound = np.float32(encoder.bound)
        self._addresses: tuple[int, ...] = ()
        self._layers: list[_Layer] = []
        self._memory: list[tuple[Tensor, Tensor]] = []  # outputs and their gradients, for the largest batch so far
        self._input: _Array | None = None  # of the batch that waits
        self._embedding: _Array | None = None  # before it was multiplied by the bound

    @property
    def layers(self) -> list[nn.Linear]:
        """In the order in which they run."""
        return self._linear

    def takes(self, batch: Tensor) -> bool:
        """Whether a batch is rows of as many numbers as the first layer has columns. The rest is left to torch."""
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
        """The embeddings, in memory of their own. The batch must stay as it is as long as it waits."""
        rows = batch.shape[0]
        self._prepare(rows)
        values_BI = batch.reshape(rows, self._columns) if self._flattens else batch
        self._input = values_BI.numpy()
        last = self._layers[-1]
        for layer in self._layers:
            if layer.bias_O is None:
                torch.mm(values_BI, layer.weight_IO, out=layer.output_BO)
            else:
                torch.addmm(layer.bias_O, values_BI, layer.weight_IO, out=layer.output_BO)
            values_BI = layer.output_BO if layer is last else torch.relu_(layer.output_BO)
        embedding_BP = self._encoder._squash(values_BI)
        self._embedding = embedding_BP.numpy()
        return embedding_BP if self._encoder.bound == 1.0 else embedding_BP * self._encoder.bound

    def _prepare(self, rows: int) -> None:
        """Views for batches of this size. Weights may have moved to other memory since the last one."""
        addresses = (rows, *(parameter.data_ptr() for parameter in self._parameters))
        if addresses == self._addresses:
            return
        if not self._memory or len(self._memory[0][0]) < rows:
            self._memory = [
                (torch.empty(rows, layer.out_features), torch.empty(rows, layer.out_features)) for layer in self._linear
            ]
        self._layers = [
            _layer(layer, output[:rows], gradient[:rows])
            for layer, (output, gradient) in zip(self._linear, self._memory, strict=True)
        ]
        self._addresses = addresses

    # --- backward ---

    @np.errstate(all="ignore")  # a warning would be something that depends on values
    def slopes(self, gradient_BP: npt.NDArray[np.float32]) -> list[Tensor]:
        """Slopes of all weights in the order of `parameters()`, for the batch that waits."""
        found: list[Tensor] = []
        ins = self.backward(gradient_BP)
        for layer, values_BI in zip(self._layers, ins, strict=True):
            np.matmul(layer.gradient_OB, values_BI, out=layer.slope_OI)
            found += layer.slopes
        return found

    @np.errstate(all="ignore")
    def backward(self, gradient_BP: npt.NDArray[np.float32]) -> list[_Array]:
        """Fill in the gradients at the layers' outputs (`gradients`) and at their biases; the layers' inputs."""
        assert self._input is not None
        assert self._embedding is not None
        top = self._layers[-1]
        gradient = np.ascontiguousarray(gradient_BP, dtype=np.float32)
        _THROUGH[self._encoder.activation](gradient, self._bound, self._embedding, top.gradient_BO, top.slope_O)
        for layer, before in zip(self._layers[:0:-1], self._layers[-2::-1], strict=True):
            np.matmul(layer.gradient_BO, layer.weight_OI, out=before.gradient_BO)
            through_relu(before.output, before.gradient_BO, before.slope_O)
        return [self._input, *(layer.output for layer in self._layers[:-1])]

    @property
    def gradients(self) -> list[_Array]:
        """At each layer's output, after `backward`."""
        return [layer.gradient_BO for layer in self._layers]


def _layer(layer: nn.Linear, output_BO: Tensor, gradient_BO: Tensor) -> _Layer:
    weight = layer.weight.detach()
    bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
    slope_OI, slope_O = torch.empty_like(weight), torch.empty(layer.out_features)
    gradient = gradient_BO.numpy()
    return _Layer(
        weight_IO=weight.t(),
        weight_OI=weight.numpy(),
        bias_O=bias,
        output_BO=output_BO,
        output=output_BO.numpy(),
        gradient_BO=gradient,
        gradient_OB=gradient.T,
        slope_OI=slope_OI.numpy(),
        slope_O=slope_O.numpy(),
        slopes=(slope_OI,) if bias is None else (slope_OI, slope_O),
    )


# --- derivatives: each fills in the gradient before the activation, and its sums over the rows ---


@compiled
def through_relu(output: Any, gradient: Any, sums: Any) -> None:
    """In place. As torch has it: no number among the outputs lets the gradient through."""
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
    """No number among the outputs lets nothing through, as in torch's vector code; its code for the last few values of
    an array lets the gradient through."""
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
    """With y = x/(1+|x|) the derivative 1/(1+|x|)^2 is (1-|y|) - |y|(1-|y|): infinities make no number."""
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


_THROUGH = {
    Activation.TANH: through_tanh,
    Activation.HARDTANH: through_hardtanh,
    Activation.SOFTSIGN: through_softsign,
}
