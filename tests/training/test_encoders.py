"""What a party's own network may do: stay in its bound, treat every row by itself, share nothing with another party."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pbmvfl.errors import EncoderError
from pbmvfl.plan.plan import Plan
from pbmvfl.training.encoders import Bounded, build_encoder, check_distinct, check_encoder

PLAN = Plan.of(num_parties=3, num_samples=50, num_classes=2, embedding_dim=2)
COLUMNS = 6
ROWS = torch.randn((5, COLUMNS), generator=torch.Generator().manual_seed(1))


class CentredOverTheBatch(nn.Module):
    """Batch normalisation by hand: no module of torch's that could be recognised."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class ScaledByTheLargest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max()


class MovingAverage(nn.Module):
    """What it saw moves later batches, through a buffer or through an attribute that no state dict has."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.registered = registered
        if registered:
            self.register_buffer("mean", torch.zeros(COLUMNS))
        else:
            self.mean = torch.zeros(COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        return centred


class StatisticForLater(nn.Module):
    """Used in evaluation alone, as the running statistics of batch normalisation are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.abs().max())
            return x
        return x / self.largest


class Categories(nn.Module):
    """Takes category numbers and nothing else; `coupled` adds the batch's mean to every row."""

    def __init__(self, *, coupled: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)
        self.coupled = coupled

    def forward(self, x: Tensor) -> Tensor:
        embedding: Tensor = self.table(x.long()).sum(dim=1)
        return embedding + embedding.mean(dim=0) if self.coupled else embedding


class AttentionOverColumns(nn.Module):
    """Over the columns of one row, not over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (2, 3))
        mixed: Tensor = self.attention(parts, parts, parts)[0]
        return mixed.flatten(1)


def wrapped(*layers: nn.Module) -> Bounded:
    torch.manual_seed(0)
    return Bounded(nn.Sequential(*layers, nn.Linear(COLUMNS, 2)))


def picture_network(norm: nn.Module) -> Bounded:
    return Bounded(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(COLUMNS),
        nn.BatchNorm1d(COLUMNS, affine=False, track_running_stats=False),
        nn.SyncBatchNorm(COLUMNS),
        nn.InstanceNorm1d(COLUMNS, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_with_batch_statistics_are_refused_by_name_and_without_rows(layer: nn.Module) -> None:
    with pytest.raises(EncoderError, match=rf"party=1: network\.0 \({type(layer).__name__}\).*GroupNorm or LayerNorm"):
        check_encoder(wrapped(layer), PLAN, index=1)


def test_batch_statistics_deep_inside_a_network_are_found() -> None:
    with pytest.raises(EncoderError, match=r"network\.1\.0 \(BatchNorm2d\)"):
        check_encoder(picture_network(nn.Sequential(nn.BatchNorm2d(4))), PLAN, index=0)


@pytest.mark.parametrize(
    "layer",
    [
        CentredOverTheBatch(),
        ScaledByTheLargest(),
        nn.Softmax(dim=0),
        MovingAverage(registered=True),
        MovingAverage(registered=False),
        StatisticForLater(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_network_in_which_one_row_moves_another_is_refused(layer: nn.Module) -> None:
    with pytest.raises(EncoderError, match=r"party=2: when one row of a batch changes.*GroupNorm and LayerNorm"):
        check_encoder(wrapped(layer), PLAN, index=2, rows=ROWS)


def test_a_network_that_couples_rows_where_it_saturates_is_refused() -> None:
    steep = nn.Linear(COLUMNS, 2)
    with torch.no_grad():
        steep.weight.mul_(1e4)
    with pytest.raises(EncoderError, match="when one row of a batch changes"):
        check_encoder(Bounded(nn.Sequential(steep, CentredOverTheBatch())), PLAN, index=0, rows=ROWS)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.LayerNorm(COLUMNS),
        nn.GroupNorm(2, COLUMNS),
        nn.Softmax(dim=1),
        nn.utils.parametrizations.spectral_norm(nn.Linear(COLUMNS, COLUMNS)),  # keeps a state of its weights alone
        AttentionOverColumns(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_networks_that_treat_each_row_by_itself_are_taken_as_they_are(layer: nn.Module) -> None:
    encoder = wrapped(layer).eval()
    before = copy.deepcopy(encoder.state_dict())
    generator = torch.get_rng_state()
    assert check_encoder(encoder, PLAN, index=0, rows=ROWS) is encoder
    assert not encoder.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_pictures_of_bytes_are_tried_as_bytes() -> None:
    pictures = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    plan = PLAN.replace(encoder="resnet18", embedding_dim=1)
    encoder = build_encoder(plan, index=0, input_shape=(3, 8, 8))
    assert check_encoder(encoder, plan, index=0, rows=pictures) is encoder


def test_a_network_for_some_values_only_is_tried_on_the_party_s_own_rows() -> None:
    numbers = torch.tensor([[1.0, 2.0], [3.0, 9.0], [0.0, 5.0]])
    apart = Bounded(Categories())
    assert check_encoder(apart, PLAN, index=0, rows=numbers) is apart
    with pytest.raises(EncoderError, match="when one row of a batch changes"):
        check_encoder(Bounded(Categories(coupled=True)), PLAN, index=0, rows=numbers)


def test_a_network_that_cannot_take_the_rows_is_refused_with_its_own_words() -> None:
    with pytest.raises(
        EncoderError, match=r"party=0: its encoder cannot take rows of shape=\(6,\) and type torch.float"
    ):
        check_encoder(Bounded(nn.Linear(COLUMNS + 1, 2)), PLAN, index=0, rows=ROWS)


def test_a_plan_that_charges_whole_batches_may_have_batch_statistics() -> None:
    plan = PLAN.replace(encoder="resnet18-batchnorm")
    for encoder in (wrapped(nn.BatchNorm1d(COLUMNS)), wrapped(CentredOverTheBatch())):
        assert check_encoder(encoder, plan, index=0, rows=ROWS) is encoder


@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_the_plan_s_own_encoders_pass(name: str) -> None:
    plan = PLAN.replace(encoder=name)
    encoder = build_encoder(plan, index=0, input_shape=(COLUMNS,))
    assert check_encoder(encoder, plan, index=0, rows=ROWS) is encoder


def test_making_and_checking_an_encoder_leaves_the_caller_s_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """First weights are drawn from the public seed: a caller's dropout or noise must not become public by it."""
    seeded: list[str] = []
    for kind in ("cuda", "mps", "xpu"):
        for name in {"manual_seed", "manual_seed_all"} & set(dir(getattr(torch, kind))):
            monkeypatch.setattr(getattr(torch, kind), name, lambda _, kind=kind: seeded.append(kind))
    before = torch.get_rng_state()
    check_encoder(build_encoder(PLAN, index=0, input_shape=(COLUMNS,)), PLAN, index=0, rows=ROWS)
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []
    torch.manual_seed(0)  # the control: this one seeds them all
    assert {"cuda", "xpu"} <= set(seeded)


# --- networks of different parties ---


def test_one_network_for_two_parties_is_refused() -> None:
    one, another = wrapped(), wrapped()
    with pytest.raises(EncoderError, match=r"party=2 and party=0 share a weight.*copy\.deepcopy"):
        check_distinct([one, another, one])


def test_a_shared_layer_or_buffer_is_refused_although_the_networks_differ() -> None:
    shared = nn.Linear(COLUMNS, COLUMNS)
    with pytest.raises(EncoderError, match=r"party=1 and party=0 share a weight, 'network\.0\.weight'"):
        check_distinct([wrapped(shared), wrapped(shared, nn.ReLU())])
    buffer = torch.zeros(4)
    first, second = wrapped(), wrapped()
    first.register_buffer("kept", buffer[:2])
    second.register_buffer("also", buffer[2:])  # another part of the same memory
    with pytest.raises(EncoderError, match=r"'also' and 'kept'"):
        check_distinct([first, second])


def test_distinct_networks_may_tie_weights_inside_and_share_layers_without_weights() -> None:
    activation = nn.ReLU()
    tied = [nn.Linear(COLUMNS, COLUMNS) for _ in range(2)]
    shared = [wrapped(layer, activation, layer) for layer in tied]
    lazy = [Bounded(nn.LazyLinear(2)) for _ in range(2)]
    copies = [copy.deepcopy(wrapped()) for _ in range(3)]
    for encoders in (shared, lazy, copies):
        check_distinct(encoders)
    # The control: the same networks are refused as soon as one belongs to two parties.
    for encoders in (shared, copies):
        with pytest.raises(EncoderError, match="share a weight"):
            check_distinct([*encoders, encoders[0]])
