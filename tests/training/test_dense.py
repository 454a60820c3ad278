"""Steps of dense networks without autograd: the same numbers as autograd's, in memory that nobody else sees change."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.plan.groups import Activation
from pbmvfl.plan.plan import Plan
from pbmvfl.training.dense import Dense, written_out
from pbmvfl.training.encoders import Bounded
from pbmvfl.training.head import HeadLoss
from pbmvfl.training.optimizer import Trainer
from pbmvfl.training.updates import Plain

ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40)


def dense(sizes: list[int], biased: list[bool], activation: str = "tanh", bound: float = 1.0) -> Bounded:
    leaves: list[nn.Module] = [nn.Flatten()]
    for i, bias in enumerate(biased):
        leaves += [nn.Linear(sizes[i], sizes[i + 1], bias=bias), nn.ReLU()]
    return Bounded(nn.Sequential(*leaves[:-1]), bound=bound, activation=Activation(activation))


def known(encoder: nn.Module) -> Dense:
    found = written_out(encoder)
    assert found is not None
    return found


def largest(values: torch.Tensor) -> float:
    """Largest of the numbers that are finite; 1 if there is none."""
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 1.0


def same(found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> bool:
    """Equal to the rounding of float32, measured by the largest number; what is no number is so in both."""
    scale = max(scale, largest(expected))
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * scale + 1e-30, equal_nan=True)


@example(seed=159552, depth=1, activation="tanh", bound=1.0, rows=1, odd=False)  # near the bounds of a tanh
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(1, 4),
    activation=st.sampled_from([each.value for each in Activation]),
    bound=st.sampled_from((1.0, 0.25, 1.7)),
    rows=st.sampled_from((1, 2, 9, 33)),
    odd=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_embeddings_and_slopes_are_autograd_s(seed, depth, activation, bound, rows, odd):
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sizes = [int(each) for each in random.integers(1, 12, depth + 1)]
    encoder = dense(sizes, [bool(each) for each in random.integers(0, 2, depth)], activation, bound)
    batch = torch.from_numpy(random.normal(size=(rows, sizes[0])).astype(np.float32) * 3)
    gradient = torch.from_numpy(random.normal(size=(rows, sizes[-1])).astype(np.float32))
    if odd:
        # Of a hardtanh of no number torch has two derivatives: 0 in its vector code, 1 in the code for the rest.
        for place in (gradient,) if activation == "hardtanh" else (batch, gradient):
            place[int(random.integers(rows)), int(random.integers(place.shape[1]))] = float(random.choice(ODD))
    expected = encoder(batch)
    slopes = torch.autograd.grad(expected, list(encoder.parameters()), gradient)
    written = known(encoder)
    # Near the bounds of a tanh, 1 - y^2 has the rounding of 1, however small it is: of the gradient times the input.
    rounded = 0.1 * largest(gradient) * max(1.0, largest(batch))
    for _ in range(2):  # the second time in memory that is used again
        assert same(written.forward(batch), expected.detach())
        found = written.slopes(gradient.numpy())
        assert len(found) == len(slopes)
        assert all(same(one, other, rounded) for one, other in zip(found, slopes, strict=True))


def test_a_wrong_derivative_would_be_noticed():
    """The control: slopes of another activation, and of another bound, are not the same."""
    torch.manual_seed(0)
    encoder = dense([5, 4, 3], [True, True])
    batch, gradient = torch.randn(9, 5), torch.randn(9, 3)
    slopes = torch.autograd.grad(encoder(batch), list(encoder.parameters()), gradient)
    for changed in ({"activation": Activation.SOFTSIGN}, {"bound": 1.001}):
        other = Bounded(copy.deepcopy(encoder.network), **changed)
        written = known(other)
        written.forward(batch)
        found = written.slopes(gradient.numpy())
        assert not any(same(one, two) for one, two in zip(found, slopes, strict=True))


@pytest.mark.parametrize(
    ("network", "taken"),
    [
        (nn.Linear(4, 3), True),
        (nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 5, bias=False), nn.ReLU(inplace=True), nn.Linear(5, 3)), True),
        (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), False),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), False),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), False),
        (nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.ReLU(), nn.Linear(5, 3)), False),
        (nn.Sequential(nn.Linear(4, 5).double(), nn.ReLU(), nn.Linear(5, 3)), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Flatten(0), nn.Linear(4, 3)), False),
    ],
)
def test_only_dense_layers_with_rectifiers_are_written_out(network, taken):
    assert (written_out(Bounded(network)) is not None) == taken


def test_layers_that_do_more_than_their_class_are_left_to_autograd():
    hooked, own = nn.Linear(4, 3), nn.Linear(4, 3)
    hooked.register_forward_hook(lambda *_: None)
    own.forward = lambda x: x[:, :3]  # type: ignore[method-assign]
    twice = nn.Linear(4, 4)
    for network in (hooked, own, nn.Sequential(twice, nn.ReLU(), twice)):
        assert written_out(Bounded(network)) is None


def test_batches_of_another_kind_are_left_to_autograd():
    flat, rows = known(dense([6, 3], [True])), known(Bounded(nn.Linear(6, 3)))
    assert flat.takes(torch.zeros(2, 6))
    assert flat.takes(torch.zeros(2, 3, 2))
    assert rows.takes(torch.zeros(2, 6))
    for batch in (torch.zeros(2, 3, 2), torch.zeros(6), torch.zeros(2, 5), torch.zeros(0, 6), torch.zeros(6, 2).T):
        assert not rows.takes(batch)
    for batch in (torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.uint8), torch.zeros(6)):
        assert not flat.takes(batch)


def plan(**choices: object) -> Plan:
    return Plan.from_dict({"num_parties": 2, "num_samples": 64, "num_classes": 2, "embedding_dim": 3, **choices})


class WrittenOut(Plain):
    """Steps without autograd, whose layers can be looked at."""

    @property
    def layers(self) -> list:
        assert self._dense is not None
        return self._dense._layers


class ByAutograd(Plain):
    """The same steps by autograd."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        assert self._dense is not None
        self._dense = None


@pytest.mark.parametrize(
    "choices", [{}, {"momentum": 0.9}, {"optimizer": "adam", "learning_rate": 0.01}], ids=lambda each: str(each)
)
def test_many_steps_with_batches_of_many_sizes_are_autograd_s(choices):
    torch.manual_seed(1)
    first = dense([5, 8, 8, 3], [True, False, True])
    ours, theirs = (kind(plan(**choices), copy.deepcopy(first)) for kind in (WrittenOut, ByAutograd))
    random = np.random.default_rng(1)
    for rows in (7, 7, 3, 12, 12, 1, 7, 30, 2, 7):
        batch = torch.from_numpy(random.normal(size=(rows, 5)).astype(np.float32))
        gradient = random.normal(size=(rows, 3)).astype(np.float32)
        gradient.setflags(write=False)  # as a view of a message
        one, other = (each.embed(batch, for_training=True) for each in (ours, theirs))
        assert np.allclose(one, other, atol=1e-5)
        for each in (ours, theirs):
            assert each.waiting_rows == rows
            each.apply(gradient, SystemEntropy())
            assert each.waiting_rows == 0
    for name, value in theirs.state().items():
        assert torch.allclose(ours.state()[name], value, atol=2e-4), name


def test_what_was_handed_out_stays_and_two_parties_share_no_memory():
    torch.manual_seed(2)
    updates = [WrittenOut(plan(), dense([5, 8, 3], [True, True])) for _ in range(2)]
    batches = [torch.randn(6, 5) for _ in range(6)]
    gradient = np.ones((6, 3), dtype=np.float32)
    handed: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in batches:
        for update in updates:
            embedding = update.embed(batch, for_training=True)
            handed.append((embedding, embedding.copy()))
        for update in updates:  # both waited at the same time
            update.apply(gradient, SystemEntropy())
    assert all((now == then).all() for now, then in handed)
    assert len({now.ctypes.data for now, _ in handed}) == len(handed)
    memory = [
        {
            array.ctypes.data
            for layer in update.layers
            for array in (layer.output, layer.gradient, layer.slope_OI.numpy())
        }
        for update in updates
    ]
    assert all(memory)
    assert not memory[0] & memory[1]


def test_a_gradient_of_another_shape_is_refused():
    written = known(dense([5, 4, 3], [True, True]))
    written.forward(torch.randn(6, 5))
    for shape in ((5, 3), (7, 3), (6, 2), (6,)):
        with pytest.raises(ValueError, match=r"for a batch of shape=\(6, 3\)"):
            written.slopes(np.zeros(shape, dtype=np.float32))
    with pytest.raises(ValueError, match="batch_size"):
        head_loss(nn.Linear(4, 3), np.zeros(9, dtype=np.int64)).gradients(torch.randn(5, 4), torch.zeros(4).long())


def test_weights_that_moved_to_other_memory_are_found_again():
    torch.manual_seed(3)
    encoder = dense([4, 5, 3], [True, True])
    written, batch = known(encoder), torch.randn(6, 4)
    written.forward(batch)
    for parameter in encoder.parameters():
        parameter.data = parameter.data * 2
    assert same(written.forward(batch), encoder(batch).detach())


def test_memory_does_not_grow_from_batch_to_batch():
    written = known(dense([4, 50, 3], [True, True]))
    for rows in (40, 10, 40, 7, 39):
        written.forward(torch.randn(rows, 4))
        written.slopes(np.ones((rows, 3), dtype=np.float32))
        assert sum(each.numel() for pair in written._memory for each in pair) == 2 * 40 * 53


# --- the server's head ---


def head_loss(head: nn.Module, labels: np.ndarray) -> HeadLoss:
    return HeadLoss(Trainer(plan(), head), labels)


def is_written_out(loss: HeadLoss) -> bool:
    return bool(loss._written_out)


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.sampled_from((1, 2, 30)), st.sampled_from((0.1, 3.0, 200.0)))
@settings(max_examples=60, deadline=None)
def test_a_head_s_loss_and_gradients_are_autograd_s(seed, classes, rows, scale):
    torch.manual_seed(seed)
    head = nn.Linear(4, classes)
    sums, labels = torch.randn(rows, 4) * scale, torch.randint(0, classes, (rows,))
    twin = sums.clone().requires_grad_()
    scores = head(twin)
    loss = functional.cross_entropy(scores, labels)
    gradient, *slopes = torch.autograd.grad(loss, [twin, *head.parameters()])
    ours = head_loss(head, labels.numpy())
    assert is_written_out(ours)
    found = ours.gradients(sums, labels)
    # Scores are rounded to float32 on either side, and probabilities feel it by as much.
    size = 1 + float(sums.abs().max())
    assert found.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6 * size)
    assert same(found.scores_BK, scores.detach())
    for one, two in zip((found.gradient_BP, *found.slopes), (gradient, *slopes), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6 * size * size)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_sums_that_are_no_numbers_teach_no_numbers(odd):
    """Then encoding refuses the gradient, as it does with autograd's."""
    sums = torch.randn(5, 4)
    sums[2, 1] = odd
    found = head_loss(nn.Linear(4, 3), np.zeros(5, dtype=np.int64)).gradients(sums, torch.zeros(5, dtype=torch.int64))
    assert not torch.isfinite(found.gradient_BP[2]).any()
    assert torch.isfinite(found.gradient_BP[[0, 1, 3, 4]]).all()
    assert not math.isfinite(found.loss)


def test_other_heads_and_labels_outside_the_classes_are_left_to_torch():
    labels = np.array([0, 1, 2])
    for head in (nn.Sequential(nn.Linear(4, 3)), nn.Linear(4, 3, bias=False), nn.Linear(4, 3).double()):
        assert not is_written_out(head_loss(head, labels))
    assert is_written_out(head_loss(nn.Linear(4, 3), labels))
    strange = head_loss(nn.Linear(4, 3), np.array([0, 3]))
    with pytest.raises(IndexError, match="out of bounds"):
        strange.gradients(torch.randn(2, 4), torch.tensor([0, 3]))
