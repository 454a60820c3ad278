"""The study of network encoders: its sums are those of the program, its noise is what it says, its record is whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.utility import networks as study
from benchmarks.utility.networks import Estimates, Moments, Setting, build, clipped_sum, run_one, scattering, train
from torch import nn

from pbmvfl.errors import PlanError
from pbmvfl.privacy.noise_band import Band
from pbmvfl.training.fixed_point_grid import Grid
from pbmvfl.training.per_row_gradients import AnyRows, weights_of

RESULTS = Path(study.__file__).parents[1] / "results"
NETWORKS = {
    "linear": (3, 4, 4),
    "mlp-8": (3, 4, 4),
    "head-8": (9, 4, 4),
    "pooled-8": (9, 8, 8),
    "deep-8": (9, 4, 4),
    "conv-8": (3, 16, 16),
}


def network_and_rows(name: str, variants: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    network = build(name, NETWORKS[name], 4, seed=1)
    nn.init.normal_(network[-1].weight, std=0.2)  # it starts at zero, where hidden layers have no gradient
    torch.manual_seed(2)
    return network, torch.randn(7, variants, *NETWORKS[name]), torch.arange(7) % 4


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_clipped_sums_are_those_of_the_program(name, clip):
    network, rows, labels = network_and_rows(name, 1)
    sums, norms = clipped_sum(network, rows, labels, clip)
    assert (norms > 0.5).any()
    grid = Grid(noise_multiplier=1e-3, clip_norm=clip, num_weights=weights_of(network), largest_batch=8)
    way = AnyRows(network, grid)
    scores = way.forward(rows[:, 0])
    slopes = scores.softmax(1) - nn.functional.one_hot(labels, 4)  # of the cross-entropy, by its formula
    expected = torch.from_numpy(way.clipped_sum(slopes)) / grid.units
    found = torch.cat([each.flatten() for each in sums]).double()
    assert (found - expected).abs().max() < 2e-5 * max(1.0, float(norms.max()) / 10)
    doubled, _ = clipped_sum(network, rows, labels, 2 * clip)  # the control: another clip norm shows
    other = torch.cat([each.flatten() for each in doubled]).double()
    assert clip == 100.0 or (other - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["mlp-8", "head-8", "conv-8"])
def test_variants_of_a_row_share_one_clipped_gradient(name):
    network, rows, labels = network_and_rows(name, 3)
    sums, _ = clipped_sum(network, rows, labels, 0.5)
    expected = [torch.zeros_like(weight) for weight in network.parameters()]
    for row, label in zip(rows, labels, strict=True):
        loss = nn.functional.cross_entropy(network(row), label.repeat(3))
        gradient = torch.autograd.grad(loss, list(network.parameters()))
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradient))
        for total, each in zip(expected, gradient, strict=True):
            total += each * min(1.0, 0.5 / norm)
    for found, total in zip(sums, expected, strict=True):
        assert (found - total).abs().max() < 1e-5


def test_estimates_solve_the_noisy_mixtures():
    band = Band(4)
    sums = torch.randn(9, 50, dtype=torch.float32)
    estimates = Estimates(band, 3.0, torch.Generator().manual_seed(5))
    found = torch.stack([estimates.of(each) for each in sums]).double().numpy()
    again = torch.Generator().manual_seed(5)
    noise = 3.0 * torch.stack([torch.randn(50, generator=again) for _ in range(9)]).double().numpy()
    for t in range(9):
        mixed = sum(c * sums[t - lag].double().numpy() for lag, c in enumerate(band.coefficients) if lag <= t)
        solved = sum(c * found[t - lag] for lag, c in enumerate(band.coefficients) if lag <= t)
        assert np.abs(solved - mixed - noise[t]).max() < 1e-4


@pytest.mark.parametrize(("band", "share"), [(1, 0.0), (10, 0.0), (10, 0.05)])
def test_noise_and_moments_together_cost_mu(band, share):
    setting = Setting(dataset="digits", batches=10, passes=7, band=band, moments_share=share)
    updates = 7 * (2 * Band(band).norm / setting.noise_multiplier) ** 2
    assert updates + share * setting.mu**2 == pytest.approx(setting.mu**2)


def test_moments_have_the_noise_of_two_uses():
    # Rows of zeros: all that is left is noise of 2 * bound / (mu / sqrt 2), divided by the rows.
    rows = torch.zeros(50, 20_000)
    found = Moments.of(rows, 4.0, torch.Generator().manual_seed(0))
    expected = 2 * 0.6 * math.sqrt(20_000) / (4.0 / math.sqrt(2)) / 50
    assert float(found.mean.std()) == pytest.approx(expected, rel=0.05)  # ten standard deviations


def test_a_band_longer_than_a_pass_is_refused():
    with pytest.raises(PlanError, match=r"noise_band=5 must be in 1\.\.4"):
        Setting(dataset="digits", batches=4, band=5)
    with pytest.raises(ValueError, match="network='tree' must be"):
        build("tree", (3, 4, 4), 4, seed=0)


def test_features_of_a_row_are_its_own_and_blind_to_a_constant_but_for_its_mean():
    torch.manual_seed(0)
    pictures = torch.rand(3, 3, 16, 16)
    together = scattering(pictures)
    assert together.shape == (3, 243, 4, 4)
    assert (together[1:2] - scattering(pictures[1:2])).abs().max() < 1e-5
    flat = scattering(torch.full((1, 3, 16, 16), 0.3)).view(3, 81, 4, 4)
    assert (flat[:, 0] - 0.3).abs().max() < 1e-5
    assert flat[:, 1:].max() < 2e-3


def test_a_tiny_run_learns_and_noise_costs_some_of_it():
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    centres = torch.randn(4, 2, 1, 4, 4, generator=random)
    quadrants = [centres[labels, m] + 0.8 * torch.randn(400, 1, 4, 4, generator=random) for m in range(2)]
    pictures = (quadrants, labels, [each[:100] for each in quadrants], labels[:100])
    found = {}
    for mu in (0.02, 1e3):
        setting = Setting(dataset="digits", mu=mu, network="mlp-8", batches=4, passes=5, band=4, learning_rate=0.5)
        run = run_one(setting, pictures, 0, torch.device("cpu"), {}, hold_out=100)
        found[mu] = run["accuracy"]
        assert len(run["alone"]) == 2
    assert found[1e3] > 0.9
    assert found[0.02] < 0.7


def test_a_run_depends_on_its_seed_and_on_nothing_else():
    rows, labels = torch.randn(20, 1, 1, 4, 4), torch.arange(20) % 4
    setting = Setting(dataset="digits", network="mlp-8", batches=4, passes=2, band=4)
    weights = []
    for seed in (1, 1, 2):
        network = build("mlp-8", (1, 4, 4), 4, seed=0)
        train(setting, network, rows, labels, seed)
        weights.append(torch.cat([each.detach().flatten() for each in network.parameters()]))
    assert (weights[0] == weights[1]).all()
    assert not (weights[0] == weights[2]).any()


def test_the_program_itself_makes_such_runs_within_the_budget_that_the_study_names():
    setting = Setting(dataset="digits", network="mlp-16", batches=10, passes=4, band=10, learning_rate=1.0)
    run = study.by_program(setting, seed=0)
    assert 7.9 < run["strict_cell_epsilon"] <= 8
    assert run["accuracy"] > 0.75
    with pytest.raises(ValueError, match="features='scattering'"):
        study.by_program(Setting(dataset="digits", features="scattering"), seed=0)


def test_the_record_is_of_the_settings_that_are_committed():
    settings = json.loads((Path(study.__file__).parent / "networks.json").read_text())
    results = json.loads((RESULTS / "networks.json").read_text())
    assert list(results) == list(settings)
    for name, result in results.items():
        setting = Setting(**settings[name])
        assert Setting(**result["setting"]) == setting
        assert result["noise_multiplier"] == pytest.approx(setting.noise_multiplier, abs=1e-4)
        assert result["evaluated_on"] == "test rows"
        found = [run["accuracy"] for run in result["runs"]]
        assert len(found) >= 3
        assert result["accuracy_mean"] == pytest.approx(sum(found) / len(found), abs=2e-4)
    for result in json.loads((RESULTS / "networks-program.json").read_text()).values():
        assert all(run["strict_cell_epsilon"] <= 8 for run in result["runs"])
    held = json.loads((RESULTS / "networks-held-out.json").read_text())
    assert all(each["evaluated_on"] == "held-out training rows" for each in held.values())
