"""A policy counts what is true of the weights that a session begins with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

from pbmvfl import FederatedModel, Federation, ReleaseOptions
from pbmvfl.cli import app
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.deploy.job import admission
from pbmvfl.deploy.job.admission import accept_job, admit
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec, Work
from pbmvfl.errors import PolicyError
from pbmvfl.federation import model_files
from pbmvfl.federation.model_files import INDEX, model_digest
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.federation.serving import release_for, serving_plan
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.policy import Policy
from pbmvfl.training.encoders import build_encoder
from support.local_plans import local_plan
from support.policy_homes import (
    PARTY_POLICY,
    RUN_ID,
    make_alignment,
    make_home,
    modules_after_admission,
    small_plan,
    train_order,
    write_policy,
)

NOON = datetime.fromisoformat("2026-03-02 12:00:00+01:00")
PARTIES = ("bank", "shop", "clinic")
#: As a part has them on disk.
WEIGHTS_FILE, PUBLIC_START = "weights.safetensors", "run.public_start"
FIVE, EIGHT = Policy(largest_epsilon=5), Policy(largest_epsilon=8)


def table(rows: int = 60) -> VerticalDataset:
    known = np.random.default_rng(5)
    labels = np.arange(rows) % 2
    parts_of = [(known.normal(size=(rows, 3)) + labels[:, None]).astype(np.float32) / 4 for _ in PARTIES]
    return VerticalDataset(
        name="people",
        party_names=PARTIES,
        train_features=tuple(parts_of),
        test_features=tuple(part[:0] for part in parts_of),
        train_labels=labels,
        test_labels=labels[:0],
        class_names=("no", "yes"),
        default_encoder="linear",
    )


def rows_to_predict(count: int) -> NewRows:
    known = np.random.default_rng(6)
    values = tuple(known.normal(size=(count, 3)).astype(np.float32) for _ in PARTIES)
    ids = tuple(f"asked-{number}" for number in range(count))
    return NewRows(name="people", party_names=PARTIES, features=values, ids=ids, labels=None)


@dataclass(frozen=True, eq=False, kw_only=True)
class CarefulSetup(PartySetup):
    """A party whose owner permits 8 in one plan."""

    policy: Policy = EIGHT


def careful_model(noise: float) -> FederatedModel:
    data = table()
    federation = Federation(local_plan(data, noise_multiplier=noise, evaluation="none"))
    federation.setup_kind = CarefulSetup
    model = federation.fit(data).model
    assert model is not None
    return model


# --- a party, wherever it runs ---


def test_predictions_with_weights_of_plain_training_are_counted_for_every_row_that_they_may_know() -> None:
    """1,000 predictions of epsilon 4 each, all of which may be about one row of the training."""
    with pytest.raises(PolicyError, match=r"epsilon=3,?\d\d\d.* weights that may know any row.* permits 8 or less"):
        careful_model(0.0).release(rows_to_predict(1000), ReleaseOptions(epsilon=4.0))


def test_predictions_with_weights_of_noisy_training_are_counted_for_one_row_each() -> None:
    assert careful_model(20.0).release(rows_to_predict(1000), ReleaseOptions(epsilon=4.0)).is_known.all()


def test_a_resumed_run_is_held_against_what_its_checkpoint_began_with(tmp_path: Path) -> None:
    """Begun with weights of the owner's own under a policy that accepts all, then resumed with the plan's network."""
    data = table()
    plan = Plan.for_data(
        data, embedding_dim=2, num_epochs=3, batch_size=20, num_trials=2, beta=0.1, noise_multiplier=30.0,
        evaluation="none",
    )  # fmt: skip

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Careful(PartySetup):
        policy: Policy = FIVE

    def networks() -> list[torch.nn.Module]:
        return [build_encoder(plan, index=index, input_shape=(3,)) for index in range(3)]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def resume(begun_with: list[torch.nn.Module], folder: Path) -> None:
        folders: dict[str, Any] = {"ledger": folder / "ledgers", "checkpoints": folder / "checkpoints"}
        with pytest.raises(KeyboardInterrupt):
            Federation(plan, encoders=begun_with).fit(data, on_epoch=interrupt, **folders)
        resumed = Federation(plan, encoders=networks())
        resumed.setup_kind = Careful
        resumed.fit(data, **folders)

    resume(networks(), tmp_path / "public")
    own = networks()
    with torch.no_grad():
        for network in own:
            next(network.parameters()).add_(1)
    with pytest.raises(PolicyError, match="or less in one plan"):
        resume(own, tmp_path / "own")


# --- the count itself ---


def epsilon_of_responses(epsilon: float, count: int, delta: float) -> float:
    """Binary randomised response so many times, all answers about one row: exact, from binomial probabilities."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))

    def delta_of(total: float) -> float:
        weights = [math.comb(count, hits) for hits in range(count + 1)]
        ours = [w * p**hits * (1 - p) ** (count - hits) for hits, w in enumerate(weights)]
        theirs = [w * (1 - p) ** hits * p ** (count - hits) for hits, w in enumerate(weights)]
        return sum(max(0.0, a - math.exp(total) * b) for a, b in zip(ours, theirs, strict=True))

    low, high = 0.0, epsilon * count
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("public", [True, False])
def test_the_count_is_that_of_one_answer_or_of_all_of_them(public: bool) -> None:
    """Oracle: binomial probabilities, of one response where weights are charged and of all twelve where not."""
    training = small_plan(
        evaluation="released", num_test_samples=12, prediction_mechanism="krr", prediction_symbols=2, vote="top",
        num_fusion_samples=2, prediction_response_epsilon=1.0, prediction_secure_aggregation=False,
    )  # fmt: skip
    release = release_for(training, epsilon=None, delta=1e-5, has_fusion=True)
    plan = serving_plan(training, model="ab" * 32, num_rows=12, release=release)
    expected = epsilon_of_responses(1.0, 1 if public else 12, 1e-5)
    Policy(largest_epsilon=expected * 1.001).check(plan, public_start=public)
    with pytest.raises(PolicyError):
        Policy(largest_epsilon=expected * 0.999).check(plan, public_start=public)
    if not public:
        with pytest.raises(PolicyError):  # not said is not known
            Policy(largest_epsilon=expected * 0.999).check(plan)


def test_where_the_start_is_not_known_both_counts_must_be_permitted() -> None:
    """Noise on updates that stay is charged to a public start alone: without one, later releases are charged in full.
    So that neither is a bound for the other."""
    quiet = small_plan(noise_multiplier=1.0)
    policy = Policy(largest_epsilon=8)
    policy.check(quiet, public_start=False)
    for known in (True, None):
        with pytest.raises(PolicyError):
            policy.check(quiet, public_start=known)


# --- a site of a deployment ---


@pytest.fixture
def home(tmp_path: Path) -> SiteFolder:
    home = make_home(tmp_path)
    make_alignment(home, count=10)
    accept_job(home, train_order(), NOON)
    return home


def order_to_predict(home: SiteFolder, **flags: Any) -> JobSpec:
    """Ask for ten rows at epsilon 4 each; the site's part has these tensors beside its weights."""
    training = small_plan()
    model = model_digest(training, bytes.fromhex(RUN_ID))
    folder = home.model("monday")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(f'{{"model": "{model}"}}')
    save_file({"model.weight": np.zeros(3, np.float32), **flags}, folder / WEIGHTS_FILE)
    release = release_for(training, epsilon=4.0, delta=1e-5, has_fusion=False)
    return train_order(serving_plan(training, model=model, num_rows=10, release=release), work=Work.PREDICT)


def flag(*values: int) -> dict[str, Any]:
    return {PUBLIC_START: np.array(values, np.uint8)}


def row_ids(*_: object) -> tuple[None, list[str]]:
    return None, [f"person-{number}" for number in range(10)]


NOT_CHARGED = [flag(0), {}, flag(), flag(1, 1), flag(1, 0)]


@pytest.mark.parametrize("flags", NOT_CHARGED, ids=str)
def test_a_site_counts_predictions_by_what_its_own_part_says(home: SiteFolder, flags: dict[str, Any]) -> None:
    write_policy(home.path, PARTY_POLICY + "[plan]\nlargest_epsilon = 8\n")
    with pytest.raises(PolicyError, match="permits 8 or less in one plan"):
        admit(home, order_to_predict(home, **flags), NOON)
    admit(home, order_to_predict(home, **flag(1)), NOON)


@pytest.mark.parametrize("flags", NOT_CHARGED, ids=str)
def test_a_site_looks_ahead_by_what_its_own_part_says(home: SiteFolder, flags: dict[str, Any]) -> None:
    """The ledger permits 8: ten predictions of 4 fit for ten rows, and not for one row that all may be about."""
    with pytest.raises(PolicyError, match="a limit of this site would end it"):
        admit(home, order_to_predict(home, **flags), NOON, row_ids=row_ids)
    admit(home, order_to_predict(home, **flag(1)), NOON, row_ids=row_ids)


def test_a_part_that_cannot_be_read_is_not_charged(home: SiteFolder) -> None:
    write_policy(home.path, PARTY_POLICY + "[plan]\nlargest_epsilon = 8\n")
    order = order_to_predict(home, **flag(1))
    for damage in (b"", b"no tensors", (home.model("monday") / WEIGHTS_FILE).read_bytes()[:-1]):
        (home.model("monday") / WEIGHTS_FILE).write_bytes(damage)
        with pytest.raises(PolicyError, match="permits 8 or less in one plan"):
            admit(home, order, NOON)
    (home.model("monday") / WEIGHTS_FILE).unlink()
    with pytest.raises(PolicyError, match="permits 8 or less in one plan"):
        admit(home, order, NOON)


def test_an_own_network_at_a_site_is_held_against_both_counts(home: SiteFolder) -> None:
    """Whether its weights are public is known to the job's process alone."""
    rules = "[plan]\nlargest_epsilon = 8\n"
    quiet = train_order(small_plan(noise_multiplier=1.0))
    releases = {"vote": "top", "prediction_mechanism": "krr", "prediction_symbols": 2, "num_fusion_samples": 10}
    law = {"prediction_response_epsilon": 1.0, "prediction_secure_aggregation": False}
    counted = train_order(small_plan(**releases, **law))
    write_policy(home.path, PARTY_POLICY + rules)
    admit(home, replace(counted, run="tuesday"), NOON)
    write_policy(home.path, PARTY_POLICY + '[encoder]\nown = "mine:network"\n' + rules)
    for order in (quiet, counted):
        with pytest.raises(PolicyError, match="permits 8 or less in one plan"):
            admit(home, replace(order, run="tuesday"), NOON)


def test_a_site_reads_its_part_without_torch(home: SiteFolder, tmp_path: Path) -> None:
    write_policy(home.path, PARTY_POLICY + "[plan]\nlargest_epsilon = 8\n")
    assert modules_after_admission(home, order_to_predict(home, **flag(1)), ["torch"], tmp_path) == "[]"


def test_the_names_that_are_not_imported_are_those_of_a_part() -> None:
    model = careful_model(20.0)
    assert admission.WEIGHTS_FILE == model_files.WEIGHTS_FILE == WEIGHTS_FILE
    assert admission.PUBLIC_START == PUBLIC_START
    assert all(PUBLIC_START in part.state for part in model._parties)


def test_policy_check_counts_a_plan_that_asks_a_model_as_one_whose_weights_may_know_any_row(
    home: SiteFolder, tmp_path: Path
) -> None:
    (home.path / "rows.csv").write_text("person,age,job\np1,40,2\n")
    write_policy(home.path, PARTY_POLICY + "[plan]\nlargest_epsilon = 8\n")
    order = order_to_predict(home, **flag(1))
    assert order.plan is not None
    (tmp_path / "plan.json").write_text(order.plan.to_json())
    said = CliRunner().invoke(app, ["policy", "check", "--home", str(home.path), "--plan", str(tmp_path / "plan.json")])
    assert said.exit_code == 1
    assert "weights that may know any row" in said.output
