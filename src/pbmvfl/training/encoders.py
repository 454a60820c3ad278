"""Party networks whose output stays in [-C, C], and the server's head.

The privacy account assumes that every coordinate of an embedding lies in [-C, C] whatever the weights and the data
are. `Bounded` guarantees it; a network of another class is refused. The account also assumes that a row's embedding
depends on that row and on the party's own weights alone: networks that visibly break this are refused.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pbmvfl.crypto.public_streams import WEIGHTS_STREAM, public_bits
from pbmvfl.errors import EncoderError
from pbmvfl.plan.groups import Activation, Head, Start
from pbmvfl.plan.plan import Plan


def _unsquashed(embedding: Tensor) -> Tensor:
    return embedding


#: Functions by activation; all but NONE stay in [-1, 1].
SQUASH: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.TANH: torch.tanh,
    Activation.HARDTANH: functional.hardtanh,
    Activation.SOFTSIGN: functional.softsign,
    Activation.NONE: _unsquashed,
}
HIDDEN = 64
#: Rows of the batches that look for a row which moves others: one that changes, and some that must not.
_PROBE_ROWS = 4


class Bounded(nn.Module):
    """Network followed by bound * activation, where the activation stays in [-1, 1].

    With `Activation.NONE` it makes scores without a bound, for plans whose training releases none of them; the
    mechanism that releases them later bounds them itself.

    Args:
        network: Any module from rows to (B, embedding_dim).
        bound: C, the plan's bound.
        activation: The plan's activation.
    """

    def __init__(self, network: nn.Module, *, bound: float = 1.0, activation: Activation = Activation.TANH) -> None:
        super().__init__()
        self.network = network
        self.bound = bound
        self.activation = Activation(activation)
        self._squash = SQUASH[self.activation]

    def forward(self, features: Tensor) -> Tensor:
        embedding = self._squash(self.network(features))  # Algorithm 1, line 1: in [-C, C]
        return embedding if self.bound == 1.0 else embedding * self.bound


class Pixels(nn.Module):
    """Map of 8-bit pictures to numbers around zero, by constants that depend on no data."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32).sub(127.5).div(63.75)


def _mlp(shape: Sequence[int], embedding_dim: int) -> nn.Module:
    columns = math.prod(shape)
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
    return nn.Sequential(*layers, nn.Linear(math.prod(shape), embedding_dim))


def _multiview(shape: Sequence[int], embedding_dim: int) -> nn.Module:
    """Build the paper's two convolutions and one dense layer, on views stacked as channels."""
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
    # The paper's. Batch statistics make every embedding of a batch depend on every row in it, so replacing
    # one cell moves all of them: for reproducing tables, not for protecting rows.
    "resnet18-batchnorm": _resnet18(nn.BatchNorm2d),
}


_GENERATOR = threading.RLock()


@contextlib.contextmanager
def own_generator() -> Iterator[None]:
    """Reserve torch's global generator of the CPU for one thread, and restore it afterwards.

    Several parties may be built in threads of one process. Seed it by `torch.default_generator`: `torch.manual_seed`
    also seeds the generators of all accelerators, which are not restored, and where none is in use it remembers every
    call with its stack.
    """
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        yield


def _with_public_seed(build: Callable[[], nn.Module], *, seed: int, index: int) -> nn.Module:
    """Build a network with public first weights, drawn from (seed, index), without using torch's global generator."""
    word = int(public_bits(1, seed=seed, stream=WEIGHTS_STREAM, index=index)[0]) >> 1
    with own_generator():
        torch.default_generator.manual_seed(word)
        return build()


def build_encoder(plan: Plan, *, index: int, input_shape: Sequence[int]) -> Bounded:
    """Build the plan's encoder for one party, with its public first weights.

    Args:
        plan: The training plan.
        index: The party's index, which selects its first weights.
        input_shape: Shape of one row.

    Returns:
        The network, bounded by the plan's bound and activation.

    Raises:
        EncoderError: If the plan names an unknown encoder, or one that does not take such rows.
    """
    if plan.encoder not in ENCODERS:
        raise EncoderError(f"encoder={plan.encoder!r} is not one of {', '.join(ENCODERS)}; or pass your own networks")
    network = _with_public_seed(  # Algorithm 2, line 1
        lambda: ENCODERS[plan.encoder](input_shape, plan.embedding_dim), seed=plan.seed, index=index
    )
    if plan.start is Start.ZERO:
        with torch.no_grad():
            for weight in network.parameters():
                weight.zero_()
    return Bounded(network, bound=plan.bound, activation=plan.activation)


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of all that a network computes with: names, types, shapes and bytes of weights and buffers.

    Raises:
        EncoderError: If a weight is not initialised yet, or is no tensor.
    """
    digest = hashlib.sha256()
    values: dict[str, object] = {**dict(module.named_buffers()), **module.state_dict()}
    for name in sorted(values):
        value = values[name]
        if not isinstance(value, Tensor) or is_lazy(value):
            raise EncoderError(
                f"{name!r} of {type(module).__name__} has no bytes to be compared: it is not yet there, or no tensor; "
                "run the network once, and keep plain tensors in it"
            )
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def is_public_start(encoder: nn.Module, plan: Plan, *, index: int, input_shape: Sequence[int]) -> bool:
    """Return True if a party's weights are public: to the bit the plan's own, or of a digest that the plan declares.

    Any other weights may have been trained on private rows.
    """
    try:
        digest = weights_digest(encoder)
    except EncoderError:
        return False
    if plan.first_weights and digest == plan.first_weights[index]:
        return True
    try:
        public = build_encoder(plan, index=index, input_shape=input_shape)
    except (EncoderError, RuntimeError, ValueError, TypeError):
        return False  # the plan has no network for these rows
    return _layers(encoder) == _layers(public) and digest == weights_digest(public)


def _layers(module: nn.Module) -> list[tuple[str, type]]:
    """Return names and classes of all modules: a network of other classes may compute with more than its weights."""
    return [(name, type(layer)) for name, layer in module.named_modules()]


class SumsAsScores(nn.Module):
    """Head without weights that learn: sums plus the classes' log prior."""

    prior_K: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("prior_K", torch.zeros(num_classes))

    def forward(self, sums_BK: Tensor) -> Tensor:
        return sums_BK + self.prior_K


def build_head(plan: Plan) -> nn.Module:
    """Build the server's fusion model: one dense layer, as in the paper, or none where sums are class scores."""
    if plan.head is Head.FIXED:
        return SumsAsScores(plan.num_classes)
    return _with_public_seed(  # Algorithm 2, line 1
        lambda: nn.Linear(plan.embedding_dim, plan.num_classes), seed=plan.seed, index=plan.num_parties
    )


def check_encoder(encoder: nn.Module, plan: Plan, *, index: int, rows: Tensor | None = None) -> Bounded:
    """Refuse a network for which the privacy account would not hold.

    Args:
        encoder: The party's network, left unchanged.
        plan: The training plan.
        index: The party's index, for error messages.
        rows: A few of the party's own rows, to try whether one row moves another's embedding. Nothing of them is kept.

    Returns:
        The encoder.

    Raises:
        EncoderError: If its output is not bounded as planned, or a row moves another row's embedding.
    """
    if not isinstance(encoder, Bounded):
        raise EncoderError(
            f"party={index}: the output of {type(encoder).__name__} can leave [-C, C] = "
            f"[{-plan.bound:g}, {plan.bound:g}], and the privacy account would not hold; "
            f"wrap it: pbmvfl.training.encoders.Bounded(network, bound={plan.bound:g})"
        )
    if encoder.bound != plan.bound:
        raise EncoderError(f"party={index}: its encoder has bound={encoder.bound:g}, the plan has bound={plan.bound:g}")
    if not plan.couples_rows:  # with those each use of a row is charged as its whole batch
        _check_rows_apart(encoder, plan, index, rows)
    return encoder


def check_shape(embedding_BP: Tensor, rows: int, embedding_dim: int) -> None:
    """Refuse embeddings that are not one vector of the plan's size for each row."""
    if embedding_BP.shape != (rows, embedding_dim):
        raise EncoderError(
            f"the encoder gives shape={tuple(embedding_BP.shape)}, the plan needs ({rows}, {embedding_dim})"
        )


def check_distinct(encoders: Sequence[nn.Module]) -> None:
    """Refuse networks of different parties that share a weight: each must be a function of its party's columns."""
    seen: dict[int, tuple[int, str]] = {}
    for party, encoder in enumerate(encoders):
        for name, value in (*encoder.named_parameters(), *encoder.named_buffers()):
            if is_lazy(value) or not value.untyped_storage().data_ptr():
                continue  # nothing there that could be shared
            other, other_name = seen.setdefault(value.untyped_storage().data_ptr(), (party, name))
            if other != party:
                raise EncoderError(
                    f"party={party} and party={other} share a weight, {name!r} and {other_name!r}: columns of one "
                    "would move embeddings of the other, which no epsilon here counts; give each party a network of "
                    "its own, such as copy.deepcopy(network)"
                )


# --- one row must not move another's embedding ---


def _check_rows_apart(encoder: Bounded, plan: Plan, index: int, rows: Tensor | None) -> None:
    for name, module in encoder.named_modules():
        if isinstance(module, _BatchNorm) or getattr(module, "track_running_stats", False):
            raise EncoderError(
                f"party={index}: {name} ({type(module).__name__}) takes statistics over the rows of a batch, so one "
                "row would move every embedding of its batch, and the privacy account charges it for its own alone; "
                "use GroupNorm or LayerNorm, which normalise each row by itself"
            )
    if rows is not None and _one_row_moves_others(encoder, plan, index, rows):
        raise EncoderError(
            f"party={index}: when one row of a batch changes, its encoder changes embeddings of other rows, or "
            "something that it keeps for later batches; the privacy account charges a row for its own embedding alone; "
            "treat each row by itself (GroupNorm and LayerNorm do), and draw dropout from torch's own generator"
        )


def _one_row_moves_others(encoder: Bounded, plan: Plan, index: int, rows: Tensor) -> bool:
    failure: Exception | None = None
    for batch, changed in _probes(rows):
        try:
            first, second = _traces(encoder, batch), _traces(encoder, changed)
        except Exception as error:  # a user's network may raise anything for values that it cannot take
            failure = error
            continue
        if first[0].shape != (_PROBE_ROWS - 1, plan.embedding_dim):
            raise EncoderError(
                f"party={index}: its encoder gives embeddings of shape={tuple(first[0].shape[1:])}, the plan needs "
                f"shape=({plan.embedding_dim},)"
            )
        return _differ(first, second)
    raise EncoderError(
        f"party={index}: its encoder cannot take rows of shape={tuple(rows.shape[1:])} and type {rows.dtype}: "
        f"{failure}; give a network for the shape and type of the party's rows"
    ) from failure


def _probes(rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of batches that differ in their first row.

    The first pair is noise, which shows most; the second has the party's own rows, for a network that takes only some
    values, such as category numbers.
    """
    known = torch.Generator().manual_seed(0)
    shape = (2 * _PROBE_ROWS, *rows.shape[1:])
    if rows.dtype.is_floating_point:
        noise = torch.randn(shape, generator=known, dtype=rows.dtype)
        noise[-1] *= 1000
    else:
        noise = torch.randint(0, 256, shape, generator=known).to(rows.dtype)
    yield noise[:_PROBE_ROWS], torch.cat((noise[-1:], noise[1:_PROBE_ROWS]))
    if not len(rows):
        return
    own = rows[torch.arange(_PROBE_ROWS) % len(rows)]
    different = rows[(rows != rows[:1]).flatten(1).any(1)]
    yield own, torch.cat((different[:1] if len(different) else own[:1], own[1:]))


def _traces(encoder: Bounded, batch: Tensor) -> list[Tensor]:
    """Return all that must not depend on the first row of `batch`: other rows' embeddings, the next batch's, the state.

    They are those of a copy in training mode, with the same dropout every time, and before the activation: two large
    outputs that differ look alike after it.
    """
    network = copy.deepcopy(encoder).train()
    network._squash = _unsquashed
    with own_generator(), torch.no_grad():
        torch.default_generator.manual_seed(0)
        others = network(batch)[1:]
        later = network(batch[1:])
    return [others, later, *network.buffers()]


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return True if tensors differ by more than the order of additions explains."""
    return any(
        not torch.equal(a, b)
        and not (a.is_floating_point() and torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True))
        for a, b in zip(first, second, strict=True)
    )
