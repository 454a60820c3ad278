"""Weights that may know people of one name are charged to them, under whatever name they are used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pbmvfl import FederatedModel, Federation
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.deploy.job.admission import accept_job, admit
from pbmvfl.deploy.site.job_spec import Work
from pbmvfl.errors import BudgetExceeded, LedgerError, PolicyError
from pbmvfl.federation.model_files import model_digest
from pbmvfl.federation.serving import release_for, serving_plan
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.units import COLUMN_UNITS, SERVER, Accounting, Unit
from pbmvfl.training.encoders import build_encoder
from support.ledger_books import charge, opening, paper_limit, small_plan
from support.policy_homes import PARTY_POLICY, RUN_ID, make_home, train_order, write_policy
from support.policy_homes import small_plan as site_plan

#: At one order divergences add up, so that a total is a number of releases times the price of one.
STRICT: Limit = paper_limit(accounting="strict")
PARTIES = ("bank", "shop", "clinic")
NOON = datetime.fromisoformat("2026-03-02 12:00:00+01:00")


def table(name: str, seed: int, rows: int = 30) -> VerticalDataset:
    known = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    parts = [(known.normal(size=(rows, 3)) + labels[:, None]).astype(np.float32) / 4 for _ in PARTIES]
    return VerticalDataset(
        name=name,
        party_names=PARTIES,
        train_features=tuple(parts),
        test_features=tuple(part[:0] for part in parts),
        train_labels=labels,
        test_labels=labels[:0],
        class_names=("no", "yes"),
        default_encoder="linear",
    )


def plain_plan(data: VerticalDataset) -> Plan:
    """Joint rounds whose steps have no noise: after the first one weights know rows exactly."""
    return Plan.for_data(
        data, embedding_dim=2, num_epochs=1, batch_size=10, num_trials=2, beta=0.1, evaluation="none"
    )  # fmt: skip


def price(plan: Plan, limit: Limit = STRICT) -> float:
    """Of one release, by the law of the plan alone."""
    return float(plan.release.event.rdp(limit.unit, SERVER, (limit.order,))[0])


@contextlib.contextmanager
def opened(path: Path, **how: Any) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(path, **how)) as ledger:
        yield ledger


def total(path: Path, dataset: str, limit: Limit = STRICT) -> float:
    with opened(path, read_only=True) as ledger:
        return spending(ledger, dataset, limit).worst


def set_limits(path: Path, **epsilons: float) -> None:
    with opened(path) as ledger:
        for dataset, epsilon in epsilons.items():
            ledger.set_limit(dataset, replace(STRICT, epsilon=epsilon))


def run_session(
    path: Path, dataset: str, *, public_start: bool, run: str, rounds: int | None = None, plan: Plan | None = None
) -> int:
    """Charge rounds of a session from the first one on, until a limit refuses; the number that went through."""
    plan = small_plan() if plan is None else plan
    session = Ledger(path).open_session(
        opening(dataset=dataset, plan=plan, run=run, session=run, public_start=public_start, exact_metrics=True)
    )
    done = 0
    try:
        for number in range(len(plan.schedule) if rounds is None else rounds):
            charge(session, plan, number)
            done += 1
    except BudgetExceeded:
        pass
    finally:
        session.close()
    return done


def releases(plan: Plan, rounds: int) -> int:
    return sum(plan.schedule[number].num_rows for number in range(rounds))


# --- the attack ---


def test_networks_that_learned_people_of_one_name_cannot_be_used_under_another_past_their_limit(tmp_path: Path) -> None:
    """The limit of `patients` has room for their own training and for two rounds more."""
    patients, others = table("patients", 1), table("others", 2)
    plan = plain_plan(patients)
    networks = [build_encoder(plan, index=index, input_shape=(3,)) for index in range(3)]
    Federation(plan, encoders=networks).fit(patients, ledger=tmp_path)
    spent = total(tmp_path / "bank.sqlite", "patients")
    for party in PARTIES:
        with opened(tmp_path / f"{party}.sqlite") as ledger:
            held = ledger.set_limit("patients", STRICT)
            room = held.epsilon_of(spent + 25 * price(plan))
            ledger.set_limit("patients", replace(held, epsilon=room))
            ledger.set_limit("others", replace(STRICT, epsilon=1e6))
    with pytest.raises(BudgetExceeded, match=r"round=2 .*dataset 'patients' from .*may know rows of 'patients'"):
        Federation(plan, encoders=networks).fit(others, ledger=tmp_path)
    result = Federation(plan, encoders=networks).fit(others, ledger=tmp_path, until_limit=True)
    assert "dataset 'patients'" in result.stopped
    assert total(tmp_path / "bank.sqlite", "patients") == pytest.approx(spent + 20 * price(plan), rel=1e-9)
    # the plan's own network knows nobody
    Federation(plan).fit(others, ledger=tmp_path)
    assert total(tmp_path / "bank.sqlite", "patients") == pytest.approx(spent + 20 * price(plan), rel=1e-9)


@pytest.mark.parametrize("when", ["before both", "between", "after both", "others come first"])
def test_it_does_not_matter_when_the_limit_is_set_or_who_comes_first(tmp_path: Path, when: str) -> None:
    """Oracle: after the first round of their own training every release of either name may be about any of them."""
    path, plan = tmp_path / "a.sqlite", small_plan()

    def limits() -> None:
        set_limits(path, patients=1e6, others=1e6)

    if when == "before both":
        limits()
    if when == "others come first":
        run_session(path, "others", public_start=False, run="b")
    run_session(path, "patients", public_start=True, run="a")
    if when == "between":
        limits()
    if when != "others come first":
        run_session(path, "others", public_start=False, run="b")
    if when in ("after both", "others come first"):
        limits()
    each, first = releases(plan, len(plan.schedule)), plan.schedule[0].num_rows
    assert total(path, "patients") == pytest.approx(price(plan) * (2 * each - (first - 1)), rel=1e-9)
    assert total(path, "others") == pytest.approx(price(plan) * each, rel=1e-9)
    with opened(path, read_only=True) as ledger:
        assert any("'others' with weights that may know its rows" in note for note in ledger.notes("patients"))
        assert not any("with weights that may know" in note for note in ledger.notes("others"))
        assert ledger.export()["datasets"]["patients"]["limits"][0]["spent_epsilon"] > 0


def test_a_limit_that_is_set_while_such_a_session_is_open_holds_from_its_next_round(tmp_path: Path) -> None:
    path, plan = tmp_path / "a.sqlite", small_plan()
    session = Ledger(path).open_session(
        opening(
            dataset="others", plan=plan, run="a", session="a", public_start=False, exact_metrics=True, rounds_ahead=8
        )
    )
    charge(session, plan, 0)
    set_limits(path, others=1e6, patients=STRICT.epsilon_of(price(plan) * (releases(plan, 2) + 0.5)))
    charge(session, plan, 1)
    with pytest.raises(BudgetExceeded, match=r"dataset 'patients' to epsilon .*first_weights"):
        charge(session, plan, 2)
    session.close()
    assert total(path, "patients") == pytest.approx(price(plan) * releases(plan, 2), rel=1e-9)


def test_a_forecast_names_the_round_and_the_name_that_charging_refuses(tmp_path: Path) -> None:
    path, plan = tmp_path / "a.sqlite", small_plan()
    set_limits(path, others=1e6, patients=STRICT.epsilon_of(price(plan) * (releases(plan, 7) + 0.5)))
    with opened(path, read_only=True) as ledger:
        found = ledger.forecast(opening(dataset="others", plan=plan, public_start=False, exact_metrics=True))
    assert [(each.dataset, each.stops_at) for each in found] == [("others", None), ("patients", 7)]
    assert run_session(path, "others", public_start=False, run="a") == 7
    with opened(path, read_only=True) as ledger:
        (known,) = ledger.forecast(opening(dataset="others", plan=plan, public_start=True, exact_metrics=True))
    assert (known.dataset, known.stops_at) == ("others", None)


def test_the_order_of_a_limit_stays_once_others_have_released_about_its_people(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with opened(path) as ledger:
        ledger.set_limit("patients", replace(STRICT, order=4.0))
        ledger.set_limit("others", STRICT)
    run_session(path, "others", public_start=False, run="a", rounds=1)
    with opened(path) as ledger:
        assert ledger.set_limit("patients", replace(STRICT, order=8.0)).order == 4.0


@pytest.mark.parametrize("unit", COLUMN_UNITS)
def test_the_price_is_that_of_the_limit_s_own_unit(tmp_path: Path, unit: Unit) -> None:
    path, plan, limit = tmp_path / "a.sqlite", small_plan(), replace(STRICT, unit=unit)
    run_session(path, "others", public_start=False, run="a", rounds=3)
    assert total(path, "patients", limit) == pytest.approx(price(plan, limit) * releases(plan, 3), rel=1e-9)
    # the paper counts a row's own releases alone, whatever weights know
    assert total(path, "patients", replace(limit, accounting=Accounting.PAPER)) == pytest.approx(
        price(plan, limit) * releases(plan, 3) if unit is Unit.PARTY else 0.0
    )


NAMES = ("patients", "others", "more")


@settings(max_examples=40, deadline=None)
@given(
    sessions=st.lists(
        st.tuples(st.sampled_from(NAMES), st.booleans(), st.integers(0, 7)), min_size=1, max_size=5
    ),
)  # fmt: skip
def test_totals_are_those_of_a_plain_count(
    sessions: list[tuple[str, bool, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Oracle: steps are plain, so that each release counts for all rows of its name, and if the run did not begin with
    public weights for all rows of every name; a public run's first round counts once for each row."""
    path, plan = tmp_path_factory.mktemp("ledger") / "a.sqlite", small_plan()
    counts = dict.fromkeys(NAMES, 0)
    for number, (name, public, rounds) in enumerate(sessions):
        run_session(path, name, public_start=public, run=f"run-{number}", rounds=rounds)
        released = releases(plan, rounds)
        if public:
            counts[name] += released - (plan.schedule[0].num_rows - 1 if rounds else 0)
        else:
            counts = {each: count + released for each, count in counts.items()}
    for name, count in counts.items():
        assert total(path, name) == pytest.approx(price(plan) * count, rel=1e-9)


# --- trained models ---


def predicting_plan(training: Plan, run: str, rows: int = 10) -> Plan:
    """Predict rows with the model of a run, as the run released them."""
    release = release_for(training, epsilon=None, delta=1e-5, has_fusion=False)
    return serving_plan(training, model=model_digest(training, bytes.fromhex(run)), num_rows=rows, release=release)


@pytest.mark.parametrize("name", ["others", "patients", "more"])
@pytest.mark.parametrize("public", [True, False])
def test_a_model_is_charged_to_the_people_that_its_training_knew(tmp_path: Path, name: str, public: bool) -> None:
    """Trained on `others` without noise, asked under any name. From public weights it knows those alone; else it may
    know everybody. Under its own name every prediction counts for all rows, as before."""
    path, training, run = tmp_path / "a.sqlite", small_plan(evaluation="none"), "ab" * 8
    set_limits(path, patients=1e6, others=1e6, more=1e6)
    run_session(path, "others", public_start=public, run=run, plan=training)
    before = {each: total(path, each) for each in NAMES}
    asked = predicting_plan(training, run)
    assert run_session(path, name, public_start=False, run="cd" * 8, plan=asked) == len(asked.schedule)
    known = {"others", name} if public else set(NAMES)
    for each in NAMES:
        more = 10 * price(training) if each in known else 0.0
        assert total(path, each) - before[each] == pytest.approx(more, rel=1e-9, abs=1e-12)


def test_a_run_that_was_charged_under_two_names_knows_both(tmp_path: Path) -> None:
    path, training, run = tmp_path / "a.sqlite", small_plan(evaluation="none"), "ab" * 8
    for name in ("others", "patients"):
        run_session(path, name, public_start=True, run=run, plan=training, rounds=2)
    run_session(path, "others", public_start=False, run="cd" * 8, plan=predicting_plan(training, run))
    with opened(path, read_only=True) as ledger:
        assert ledger.sessions("others")[-1].terms.known_datasets == ("others", "patients")


def test_a_model_of_another_run_or_plan_says_nothing_about_whom_it_knows(tmp_path: Path) -> None:
    path, training = tmp_path / "a.sqlite", small_plan(evaluation="none")
    run_session(path, "others", public_start=True, run="ab" * 8, plan=training)
    run_session(path, "others", public_start=True, run="no hex", plan=training)
    asked = [predicting_plan(training, "ac" * 8), predicting_plan(small_plan(evaluation="none", seed=9), "ab" * 8)]
    for number, plan in enumerate(asked):
        run_session(path, "others", public_start=False, run=f"{number:016x}", plan=plan)
    with opened(path, read_only=True) as ledger:
        assert [each.terms.known_datasets for each in ledger.sessions("others")[2:]] == [None, None]


def test_a_plainly_trained_model_is_asked_in_a_folder_with_other_limits(tmp_path: Path) -> None:
    """What it costs its own people is no matter of others that it cannot know."""
    data, ledgers = table("others", 2), tmp_path / "ledgers"
    plan = plain_plan(data)
    for party in PARTIES:
        with opened(ledgers / f"{party}.sqlite", owner=party) as ledger:
            ledger.set_limit("others", replace(STRICT, epsilon=1e6))
            ledger.set_limit("patients", replace(STRICT, epsilon=5.0))
    model = Federation(plan).fit(data, ledger=ledgers).model
    assert isinstance(model, FederatedModel)
    known = np.random.default_rng(3)
    rows = NewRows(
        name="others",
        party_names=PARTIES,
        features=tuple(known.normal(size=(40, 3)).astype(np.float32) for _ in PARTIES),
        ids=tuple(f"new-{number}" for number in range(40)),
        labels=None,
    )
    before = total(ledgers / "bank.sqlite", "others")
    assert model.release(rows).is_known.all()
    assert total(ledgers / "bank.sqlite", "others") == pytest.approx(before + 40 * price(plan), rel=1e-9)
    assert total(ledgers / "bank.sqlite", "patients") == 0


def test_a_site_looks_ahead_at_the_limits_of_all_people_that_its_part_may_know(tmp_path: Path) -> None:
    """Ten predictions of 4 each, by a part without a charge, under a name that permits 1000; `patients` permit 8."""
    home = make_home(tmp_path)
    write_policy(home.path, PARTY_POLICY.replace("epsilon = 8", "epsilon = 1000"))
    home.alignment("first").mkdir(parents=True)
    accept_job(home, train_order(), NOON)
    training = site_plan()
    model = model_digest(training, bytes.fromhex(RUN_ID))
    home.model("monday").mkdir(parents=True)
    (home.model("monday") / "part.json").write_text(json.dumps({"model": model}))
    save_file({"run.public_start": np.zeros(1, np.uint8)}, home.model("monday") / "weights.safetensors")
    release = release_for(training, epsilon=4.0, delta=1e-5, has_fusion=False)
    plan = serving_plan(training, model=model, num_rows=10, release=release)
    order = train_order(plan, work=Work.PREDICT)
    ids = [f"person-{number}" for number in range(10)]
    admit(home, order, NOON, row_ids=lambda *_: (None, ids))
    with opened(home.ledger) as ledger:
        ledger.set_limit("patients", Limit.choose(unit="cell", accounting="strict", epsilon=8, delta=1e-5))
    with pytest.raises(PolicyError, match="a limit of this site would end it"):
        admit(home, order, NOON, row_ids=lambda *_: (None, ids))


# --- what is written ---


def test_terms_say_whose_rows_weights_know_only_where_that_is_known() -> None:
    plan = small_plan()
    for public in (True, False):
        text = SessionTerms.of(plan, public_start=public).to_json()
        assert "known_datasets" not in text  # as it was written before there were such names
        assert SessionTerms.from_json(text).known_datasets is None
    named = SessionTerms.of(plan, public_start=False, known_datasets=("others",))
    assert SessionTerms.from_json(named.to_json()) == named
    assert named.may_know("others")
    assert not named.may_know("patients")
    assert not replace(named, public_start=True).may_know("others")


@pytest.mark.parametrize("bad", ["others", [1], [None], {"others": 1}, 7])
def test_terms_with_names_that_are_none_are_refused(bad: Any) -> None:
    text = json.dumps(
        {**json.loads(SessionTerms.of(small_plan(), public_start=False).to_json()), "known_datasets": bad}
    )
    with pytest.raises(LedgerError, match="cannot price"):
        SessionTerms.from_json(text)
