"""Party networks whose output cannot leave [-C, C], and the server's head.

The privacy account assumes that every coordinate of an embedding lies in [-C, C] whatever the weights and the data
are. `Bounded` is that promise in code; a network that is not one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pbmvfl.data.schedule import WEIGHTS_STREAM, public_bits
from pbmvfl.errors import EncoderError
from pbmvfl.plan import Activation, Plan

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.TANH: torch.tanh,
    Activation.HARDTANH: functional.hardtanh,
    Activation.SOFTSIGN: functional.softsign,
}
HIDDEN = 64


class Bounded(nn.Module):
    """A network followed by bound * activation, where the activation stays in [-1, 1]."""

    def __init__(self, network: nn.Module, *, bound: float = 1.0, activation: Activation = Activation.TANH) -> None:
        super().__init__()
        self.network = network
        self.bound = bound
        self.activation = Activation(activation)
        self._squash = _ACTIVATIONS[self.activation]

    def forward(self, features: Tensor) -> Tensor:
        embedding = self._squash(self.network(features))
        return embedding if self.bound == 1.0 else embedding * self.bound


class Pixels(nn.Module):
    """8-bit pictures to numbers around zero, by constants that depend on nobody's pictures."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32).sub(127.5).div(63.75)


def _mlp(shape: Sequence[int], embedding_dim: int) -> nn.Module:
    columns = _flat(shape)
    return nn.Sequential(
        *([nn.Flatten()] if len(shape) > 1 else []),
        nn.Linear(columns, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, embedding_dim),
    )


def _linear(shape: Sequence[int], embedding_dim: int) -> nn.Module:
    layers = [nn.Flatten()] if len(shape) > 1 else []
    return nn.Sequential(*layers, nn.Linear(_flat(shape), embedding_dim))


def _flat(shape: Sequence[int]) -> int:
    columns = 1
    for size in shape:
        columns *= size
    return columns


def _multiview(shape: Sequence[int], embedding_dim: int) -> nn.Module:
    """The paper's two convolutions and one dense layer, on views stacked as channels."""
    if len(shape) != 3:
        raise EncoderError(f"encoder=multiview-conv needs pictures (views, height, width), got shape={tuple(shape)}")
    views, height, width = shape
    convolutions = nn.Sequential(
        Pixels(),
        nn.Conv2d(views, 64, kernel_size=11, stride=4, padding=5),
        nn.ReLU(),
        nn.Conv2d(64, 256, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    with torch.no_grad():
        width_out = convolutions(torch.zeros(1, views, height, width)).shape[1]
    return nn.Sequential(convolutions, nn.Linear(width_out, embedding_dim))


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.first_norm = norm(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.second_norm = norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(32, channels), channels)


def _resnet18(norm: Callable[[int], nn.Module]) -> Callable[[Sequence[int], int], nn.Module]:
    def build(shape: Sequence[int], embedding_dim: int) -> nn.Module:
        if len(shape) != 3:
            raise EncoderError(f"encoder=resnet18 needs pictures (channels, height, width), got shape={tuple(shape)}")
        layers: list[nn.Module] = [Pixels()]
        if shape[1] > 64:  # large pictures: the usual stem, which shrinks them by four
            layers += [nn.Conv2d(shape[0], 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        else:  # small ones: keep every pixel
            layers += [nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False), norm(64), nn.ReLU()]
        channels_in = 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [_Block(channels_in, channels, stride, norm), _Block(channels, channels, 1, norm)]
            channels_in = channels
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, embedding_dim)]
        return nn.Sequential(*layers)

    return build


ENCODERS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": _mlp,
    "linear": _linear,
    "multiview-conv": _multiview,
    "resnet18": _resnet18(_group_norm),
    # As the paper has it. Batch statistics make every embedding of a batch depend on every row in it, so replacing
    # one cell moves all of them: for reproducing tables, not for protecting rows.
    "resnet18-batchnorm": _resnet18(nn.BatchNorm2d),
}


def _with_public_seed(build: Callable[[], nn.Module], *, seed: int, index: int) -> nn.Module:
    """First weights are public: drawn from (seed, index), without touching torch's global generator."""
    word = int(public_bits(1, seed=seed, stream=WEIGHTS_STREAM, index=index)[0]) >> 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(word)
        return build()


def build_encoder(plan: Plan, *, index: int, input_shape: Sequence[int]) -> Bounded:
    """The plan's encoder for one party, with its public first weights."""
    if plan.encoder not in ENCODERS:
        raise EncoderError(f"encoder={plan.encoder!r} is not one of {', '.join(ENCODERS)}; or pass your own networks")
    network = _with_public_seed(
        lambda: ENCODERS[plan.encoder](input_shape, plan.embedding_dim), seed=plan.seed, index=index
    )
    return Bounded(network, bound=plan.bound, activation=plan.activation)


def build_head(plan: Plan) -> nn.Module:
    """The server's fusion model: one dense layer, as in the paper."""
    return _with_public_seed(
        lambda: nn.Linear(plan.embedding_dim, plan.num_classes), seed=plan.seed, index=plan.num_parties
    )


def check_encoder(encoder: nn.Module, plan: Plan, *, index: int) -> Bounded:
    """Refuse a network whose output can leave [-C, C], whatever it did on the data it has seen."""
    if not isinstance(encoder, Bounded):
        raise EncoderError(
            f"party={index}: the output of {type(encoder).__name__} can leave [-C, C] = "
            f"[{-plan.bound:g}, {plan.bound:g}], and the privacy account would not hold; "
            f"wrap it: pbmvfl.Bounded(network, bound={plan.bound:g})"
        )
    if encoder.bound != plan.bound:
        raise EncoderError(f"party={index}: its encoder has bound={encoder.bound:g}, the plan has bound={plan.bound:g}")
    return encoder
