"""Trackers: after every epoch the metrics, what was spent and the best attack; at the end what the ledgers say.

Oracles: the parties' ledger files, MLflow's own store, and TensorBoard's own reader.
"""

from __future__ import annotations

import contextlib
import math

import pytest

import pbmvfl
from pbmvfl.errors import PbmvflError
from pbmvfl.federation.trackers import Callback, MLflowTracker, TensorBoardTracker, Tracker
from pbmvfl.ledger.spending import fixed_plan_epsilon
from pbmvfl.privacy.units import Accounting, Unit
from support.cohorts import small_data

DATA = small_data(num_samples=60)
DELTA = 1e-6
JOINT = {"algorithm": "pbm", "num_epochs": 2, "batch_size": 30, "num_trials": 4, "beta": 0.1, "embedding_dim": 2}
BUDGETS = {
    "staged": {"epsilon": 8},
    "predicted": {"epsilon": 8, "prediction_epsilon": 2},
}


def plan_of(name: str) -> pbmvfl.Plan:
    if name == "pbm":
        return pbmvfl.Plan.for_data(DATA, **JOINT)
    return pbmvfl.Plan.for_budget(delta=DELTA, data=DATA, **BUDGETS[name])


def in_ledger(folder, unit: Unit) -> float:
    with contextlib.closing(pbmvfl.Ledger(folder / "party-0.sqlite", read_only=True)) as ledger:
        return fixed_plan_epsilon(
            ledger, DATA.name, unit=unit, accounting=Accounting.STRICT, colluding_parties=0, delta=DELTA
        )


class Kept(Tracker):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.steps: list[tuple[int, dict[str, float]]] = []

    def log(self, figures, step):
        self.steps.append((step, dict(figures)))


@pytest.mark.parametrize("name", [*BUDGETS, "pbm"])
def test_the_last_epsilon_is_the_ledger_s_and_none_falls(name, tmp_path):
    plan, kept = plan_of(name), Kept(delta=DELTA)
    result = pbmvfl.Federation(plan).fit(DATA, ledger=tmp_path, callbacks=[kept])
    assert [step for step, _ in kept.steps][: plan.num_epochs] == list(range(1, plan.num_epochs + 1))
    for unit in (Unit.CELL, Unit.RECORD):
        curve = [figures[f"epsilon_{unit}"] for _, figures in kept.steps]
        assert curve == sorted(curve)
        assert 0 < curve[0] <= curve[-1] == pytest.approx(in_ledger(tmp_path, unit), rel=1e-9)
        bound = result.privacy(delta=DELTA).bound(unit, "strict")
        assert kept.steps[-1][1][f"advantage_{unit}"] == bound.advantage_upper_bound
        assert curve[-1] == pytest.approx(bound.epsilon, rel=0.2)
    assert kept.steps[-1][1]["test_accuracy"] == result.metrics["test_accuracy"]
    if plan.num_epochs > 1:  # the control: an epoch less is another number
        assert kept.steps[0][1]["epsilon_cell"] < in_ledger(tmp_path, Unit.CELL) * (1 - 1e-6)


def test_a_resumed_run_goes_on_where_the_earlier_session_ended(tmp_path):
    """A run counts the round that an interrupt cut off; the ledger knows that it was not sent."""
    plan = plan_of("staged")

    class Ends(Callback):
        def on_epoch(self, line, spent):
            del spent
            if line.epoch >= 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pbmvfl.Federation(plan).fit(DATA, checkpoints=tmp_path / "run", ledger=tmp_path / "l", callbacks=[Ends()])
    kept = Kept(delta=DELTA)
    folders = {"checkpoints": tmp_path / "run", "ledger": tmp_path / "l"}
    result = pbmvfl.Federation(plan).fit(DATA, **folders, callbacks=[kept])
    assert kept.steps[0][0] == 3
    last = kept.steps[-1][1]["epsilon_cell"]
    assert in_ledger(tmp_path / "l", Unit.CELL) < last
    assert last == pytest.approx(result.privacy(delta=DELTA).epsilon("cell", "strict"), rel=1e-3)


def test_the_usual_delta_is_that_of_the_plan():
    plan, kept, given = plan_of("staged"), Kept(), Kept(delta=1e-5)
    pbmvfl.Federation(plan).fit(DATA, callbacks=[kept, given])
    assert kept.steps[-1][1]["epsilon_cell"] == given.steps[-1][1]["epsilon_cell"]
    with pytest.raises(PbmvflError, match="delta"):
        Kept(delta=2.0)


@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_run_ends_at_the_ledger_s_epsilon(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    plan = plan_of("staged")
    result = pbmvfl.Federation(plan).fit(DATA, ledger=tmp_path / "l", callbacks=[MLflowTracker(delta=DELTA)])
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    (found,) = client.search_runs(["0"])
    assert found.info.status == "FINISHED"
    curve = client.get_metric_history(found.info.run_id, "epsilon_cell")
    assert [point.step for point in curve][: plan.num_epochs] == list(range(1, plan.num_epochs + 1))
    assert curve[-1].value == pytest.approx(in_ledger(tmp_path / "l", Unit.CELL), rel=1e-9)
    assert found.data.metrics["test_accuracy"] == result.metrics["test_accuracy"]
    with mlflow.start_run() as own:  # an active run is used, and left open
        pbmvfl.Federation(plan).fit(DATA, callbacks=[MLflowTracker(delta=DELTA)])
        assert mlflow.active_run().info.run_id == own.info.run_id


@pytest.mark.filterwarnings("ignore")
def test_a_tensorboard_file_ends_at_the_ledger_s_epsilon(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = plan_of("staged")
    tracker = TensorBoardTracker(tmp_path / "board", delta=DELTA)
    result = pbmvfl.Federation(plan).fit(DATA, ledger=tmp_path / "l", callbacks=[tracker])
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    curve = board.Scalars("epsilon_cell")
    assert [point.step for point in curve][: plan.num_epochs] == list(range(1, plan.num_epochs + 1))
    assert curve[-1].value == pytest.approx(in_ledger(tmp_path / "l", Unit.CELL), rel=1e-6)
    assert math.isclose(board.Scalars("test_accuracy")[-1].value, result.metrics["test_accuracy"], rel_tol=1e-6)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for make, extra in ((MLflowTracker, "mlflow"), (lambda: TensorBoardTracker(tmp_path), "tensorboard")):
        with pytest.raises(PbmvflError, match=rf'pip install "pbmvfl\[{extra}\]"'):
            make()
