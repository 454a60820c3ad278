"""`pbmvfl audit`: verdicts, exit codes, JSON, and that it reads no rows, opens no ledger and charges nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pbmvfl.audit import audit as auditing
from pbmvfl.audit.audit import Report, Subject
from pbmvfl.audit.constants import FALSE_ALARM_RATE, LEVEL
from pbmvfl.audit.statistics import certain
from pbmvfl.data import datasets
from pbmvfl.errors import PlanError
from pbmvfl.federation.run_folder import NamedSource, TableSource
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan.plan import Plan
from support import planted_faults as faults
from support.cohorts import small_data
from support.local_plans import voting_plan

QUICK = ("--trials", 20_000, "--sessions", 10)
Command = Callable[..., tuple[int, str, str]]


def pbm_plan(**choices: Any) -> Plan:
    usual: dict[str, Any] = {"num_trials": 16, "beta": 0.25, "embedding_dim": 4, "label_epsilon": None}
    return Plan.of(num_parties=3, num_samples=50, num_classes=2, **{**usual, **choices})


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(pbm_plan().to_dict()))
    return path


def test_a_sound_plan_passes_with_code_0(run_main: Command, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = run_main("audit", "--plan", plan_file, *QUICK)
    assert (code, err) == (0, "")
    assert "sound:" in out
    assert "ALARM" not in out
    assert "epsilon, exact" in out
    assert "It does not mean that nobody can do better" in out
    assert "labels: this plan uses them in clear" in out
    assert "less than once in 1,000,000 audits" in out


def test_a_fault_ends_with_code_5_and_is_named(
    run_main: Command, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    faults.beta_times(1.05)(monkeypatch)
    code, out, _ = run_main("audit", plan_file, *QUICK)
    assert code == 5
    assert "ALARM" in out
    assert "alarm: PBM b=16, beta=0.25: beta:" in out
    assert "sound:" not in out
    code, out, _ = run_main("audit", plan_file, *QUICK, "--json")
    found = json.loads(out)
    assert code == 5
    assert found["sound"] is False
    assert {each["law"] for each in found["findings"] if each["alarm"]} >= {"beta", "mean"}


def test_json_has_every_number_and_nothing_else(run_main: Command, plan_file: Path) -> None:
    code, out, err = run_main("audit", plan_file, *QUICK, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["sound"] is True
    assert found["alarms"] == []
    assert (found["level"], found["false_alarm_rate"]) == (LEVEL, FALSE_ALARM_RATE)
    assert found["tests"] == len(found["findings"]) + len(found["epsilon"])
    (game,) = found["epsilon"]
    assert game["epsilon_lower_bound"] <= game["epsilon"]
    assert {"what", "law", "trials", "statistic", "p_value", "case", "alarm"} == set(found["findings"][0])
    assert found["training"] is None  # updates of this plan have no noise


def test_help_says_exit_codes_and_that_nothing_is_charged(run_main: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run_main("audit", "--help")
    assert code == 0
    for text in ("Exit code 0: sound. 5: alarm.", "nothing is charged", "Passing is no proof", "--trials", "--json"):
        assert text in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--trials", 5), "trials=5 must be in 20000..1000000000"),
        (("--sessions", 0), "sessions=0 must be in 10..1000000"),
        (("nowhere",), "source='nowhere' is neither a run folder"),
        (("digits", "--plan", "x.json"), "SOURCE and --plan both say what is audited"),
    ],
)
def test_bad_input_ends_with_code_2(run_main: Command, options: tuple[object, ...], named: str) -> None:
    code, _, err = run_main("audit", *options)
    assert code == 2
    assert named in " ".join(err.split())


# --- nothing of a run is used but public numbers ---


def test_an_audit_of_a_run_reads_no_row_opens_no_ledger_and_charges_nothing(
    run_main: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    books, folder = tmp_path / "books", tmp_path / "run"
    limit = ("--parties", "party-0,party-1,party-2,party-3", "--dataset", "digits", "--epsilon", 1e6)
    code, _, err = run_main("ledger", "limit", books, *limit)
    assert code == 0, err
    chosen = ("--mechanism", "pbm", "--num-epochs", 1, "--batch-size", 500, "--label-epsilon", "none")
    code, _, err = run_main("train", "digits", *chosen, "--ledger", books, "--exact-metrics", "--out", folder)
    assert code == 0, err

    def digest() -> dict[str, str]:
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = digest()
    assert any(name.endswith(".sqlite") for name in before)

    def refused(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an audit must not come here")

    for owner, name in (
        (Ledger, "__init__"),
        (Charging, "charge"),
        (NamedSource, "load"),
        (TableSource, "load"),
        (datasets, "load_dataset"),
    ):
        monkeypatch.setattr(owner, name, refused)
    code, out, err = run_main("audit", folder, *QUICK, "--json")
    assert code == 0, err
    assert json.loads(out)["subject"] == "the plan of run"
    kept = folder / "audit.json"
    assert json.loads(kept.read_text()) == json.loads(out)
    assert kept.stat().st_mode & 0o077 == 0
    kept.unlink()
    assert digest() == before


# --- what is audited of a plan ---


def test_of_a_plan_all_that_is_random_is_audited() -> None:
    data = small_data(num_parties=2, num_samples=24, num_test_samples=5)
    plan = voting_plan(data, label_epsilon=2.0)
    subject = Subject.of_plan(plan)
    assert [each.name for each in subject.mechanisms] == ["krr"]
    assert subject.label_response == plan.label_response
    assert subject.noise_multiplier == 6.0
    assert Subject.of_plan(plan.replace(noise_multiplier=0.0)).noise_multiplier == 0.0
    assert any("in clear" in text for text in Subject.of_plan(plan.replace(label_epsilon=None)).not_tested)


def test_without_a_plan_every_private_mechanism_is_audited() -> None:
    audited = {each.name for each in Subject.everything().mechanisms}
    assert audited >= {"pbm", "laplace", "krr", "ldp"}
    assert {kind.name for kind in MECHANISMS.values() if kind(num_parties=2).is_private} == audited


def test_a_whole_audit_of_local_training_is_sound_and_has_every_part() -> None:
    data = small_data(num_parties=2, num_samples=24, num_test_samples=5)
    seen: list[tuple[str, int, int]] = []
    report = auditing.audit(
        Subject.of_plan(voting_plan(data, label_epsilon=2.0)),
        trials=20_000,
        sessions=10,
        on_part=lambda *part: seen.append(part),
    )
    assert report.alarms == ()
    assert [number for _, number, _ in seen] == list(range(len(seen)))
    assert seen[-1] == ("", len(seen) - 1, len(seen) - 1)
    assert {each.law for each in report.findings} >= {
        "shift of the training",
        "other rows stay",
        "fresh at each party and start",
        "one draw for all rounds",
        "variance",
    }
    assert report.training is not None
    assert report.training.shift <= report.training.mu * 1.001
    assert json.dumps(report.to_dict(), allow_nan=False)


def test_one_odd_finding_is_an_alarm_and_more_tests_than_the_rate_is_shared_by_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, bad = (certain("masks", "cancel", 9, holds=holds, statistic="as said") for holds in (True, False))
    assert Report(subject="", findings=(good,)).sound
    assert Report(subject="", findings=(good, bad)).alarms == ("masks: cancel: as said",)
    monkeypatch.setattr(auditing, "MOST_TESTS", 3)
    with pytest.raises(PlanError, match="tests are more than 3"):
        auditing.audit(Subject(name="", mechanisms=(MECHANISMS["krr"](num_parties=2),)), trials=20_000)
