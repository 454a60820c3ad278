"""The table of a plan and of a run: what it counts, what it says besides, and how its numbers are written."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pbmvfl.cli.tables import plain_table, print_notes, print_privacy
from pbmvfl.errors import PlanError
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.predictions import Predictions
from pbmvfl.federation.results import Result
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT, PREDICTION
from pbmvfl.plan.schedule import RowUses
from pbmvfl.privacy.table import (
    PrivacyTable,
    attack_in_words,
    format_advantage,
    format_epsilon,
    label_in_words,
    privacy_notes,
    privacy_table,
)
from pbmvfl.privacy.units import CURIOUS_PARTY, Adversary

PLAN = Plan.of(
    num_parties=3,
    num_samples=40,
    num_classes=2,
    num_test_samples=20,
    num_trials=4,
    beta=0.1,
    embedding_dim=2,
    num_epochs=3,
    batch_size=8,
    evaluation="released",
)


def spent(train: int, test: int, plan: Plan = PLAN) -> PrivacyTable:
    """Every training row so many times in joint rounds, and every test row in predictions."""
    uses = (
        RowUses(kind=JOINT, releases=train, updates=train, total_releases=train * plan.num_samples),
        RowUses(kind=PREDICTION, releases=test, updates=0, total_releases=test * plan.num_test_samples),
    )
    return privacy_table(plan.training_run(uses), delta=1e-5)


def notes(plan: Plan, delta: float) -> list[str]:
    return privacy_notes(plan.training_run(), num_samples=plan.num_samples, delta=delta)


# --- what counts ---


@pytest.mark.parametrize(("train", "test"), [(3, 0), (3, 1), (3, 3), (3, 4), (1, 10), (0, 2)])
@pytest.mark.parametrize("unit", ["cell", "record"])
def test_a_row_costs_its_own_releases_whether_it_is_a_training_row_or_a_test_row(train, test, unit):
    alone = PLAN.replace(evaluation="simulator", num_epochs=max(train, test))
    assert spent(train, test).epsilon(unit, "paper") == alone.privacy().epsilon(unit, "paper")


@pytest.mark.parametrize("unit", ["cell", "record", "party"])
def test_released_test_rows_never_make_the_strict_account_smaller(unit):
    epsilons = [spent(3, test).epsilon(unit, "strict") for test in (0, 1, 3, 4, 10)]
    assert epsilons == sorted(set(epsilons))


def test_with_weight_noise_a_test_row_is_counted_too():
    plan = PLAN.replace(noise_multiplier=50.0)
    ten_releases = spent(10, 0, PLAN).epsilon("cell", "paper")
    assert spent(1, 0, plan).epsilon("cell", "strict") < ten_releases
    assert spent(1, 10, plan).epsilon("cell", "strict") == ten_releases  # no update ever used the test row
    assert spent(10, 1, plan).epsilon("cell", "strict") > ten_releases  # ten updates used the training row


def test_an_undisturbed_run_spends_what_its_plan_said():
    assert spent(3, 1).bounds == PLAN.privacy().bounds


def test_a_run_that_was_killed_again_and_again_while_it_predicted_says_so_in_its_epsilon(data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=1, evaluation="released")

    def kill(done, *_):
        if done == len(plan.schedule):
            raise KeyboardInterrupt

    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            Federation(plan).fit(data, checkpoints=tmp_path, on_round=kill)
    result = Federation(plan).fit(data, checkpoints=tmp_path)
    assert result.row_uses == (
        RowUses(kind=JOINT, releases=1, updates=1, total_releases=37),
        RowUses(kind=PREDICTION, releases=5, updates=0, total_releases=5 * 13),
    )
    five = plan.replace(num_epochs=5, evaluation="simulator").privacy().epsilon("cell", "paper")
    assert result.privacy().epsilon("cell", "paper") == five


@pytest.mark.parametrize(("num_samples", "delta"), [(1_000, 1e-5), (10_000, 1e-5), (32_561, 0.1 / 32_561)])
def test_a_plan_s_own_table_has_the_delta_that_it_was_planned_for(num_samples, delta):
    plan = Plan.for_budget(epsilon=8, num_parties=3, num_samples=num_samples, num_classes=2, columns=5)
    table = plan.privacy()
    assert {row.delta for row in table.of_columns} == {delta}
    assert 7.99 < table.epsilon("cell", "strict") <= 8
    assert table == plan.privacy(delta=delta)


def test_results_have_the_delta_of_their_plan_s_table():
    plan = PLAN.replace(num_samples=50_000)
    uses = (RowUses(kind=JOINT, releases=1, updates=1, total_releases=50_000),)
    common = {"plan": plan, "traffic": plan.traffic(), "seconds": 0.0}
    result = Result(**common, metrics={}, history=(), sessions=(), row_uses=uses)
    predicted = Predictions(**common, ids=(), class_names=("no", "yes"), scores_NK=np.zeros((0, 2), np.float32))
    assert {row.delta for row in predicted.privacy().of_columns} == {2e-6}
    assert {row.delta for row in result.privacy().of_columns} == {2e-6}
    assert {row["delta"] for row in result.to_dict()["privacy"] if row["unit"] != "label"} == {2e-6}
    assert {row["delta"] for row in result.to_dict(delta=1e-3)["privacy"] if row["unit"] != "label"} == {1e-3}


# --- what it says ---


def test_printed_it_says_once_below_the_table_that_the_paper_s_count_is_no_proof():
    lines = str(PLAN.privacy()).splitlines()
    assert [line for line in lines if "not a proof" in line] == lines[-1:]
    assert all(len(line) <= 80 for line in lines[:-1])
    assert lines[0].startswith("cell: ")
    rows = lines[2:20]
    assert lines[20].startswith("label ")
    assert lines[21].startswith("advantage ")
    for line in rows:
        unit, counting = line.split()[:2]
        assert ("*" in line) is (counting == "paper" and unit != "party")
    assert len({line.index("server") for line in rows if "server" in line}) == 1  # columns stay columns


def test_printed_it_has_only_theorems_where_the_paper_s_count_is_smaller_nowhere():
    table = Plan.for_budget(epsilon=8, num_parties=2, num_samples=1000, num_classes=2, columns=5).privacy()
    assert {row.accounting for row in table.bounds} == {"strict", "paper"}
    text = str(table)
    assert "paper" not in text
    assert "not a proof" not in text
    assert text.count("strict") == 9 + 1 + 1  # three units, three adversaries, labels, and the sentence below
    proved = [row for row in table.of_columns if row.accounting == "strict"]
    fewer = PrivacyTable((*proved, replace(proved[0], accounting="paper", epsilon=proved[0].epsilon / 2)))
    assert "paper" in str(fewer)  # one that is smaller brings all of them back


@pytest.mark.parametrize(("delta", "noted"), [(1 / 40, True), (0.5, True), (0.99 / 40, False), (1e-5, False)], ids=str)
def test_a_delta_that_permits_publishing_a_row_is_noted(delta, noted):
    found = [note for note in notes(PLAN, delta) if "publishing a row outright" in note]
    assert len(found) == noted
    assert not noted or f"delta={delta:g} is not below 1/num_samples = 1/40" in found[0]


@pytest.mark.parametrize("num_epochs", [1, 2, 4, 8, 10, 11, 12, 13, 14, 16, 32])
def test_an_epsilon_above_twenty_is_noted_by_the_exact_account(num_epochs):
    plan = PLAN.replace(num_epochs=num_epochs, beta=0.15)
    found = [note for note in notes(plan, 1e-5) if "protects nobody" in note]
    assert bool(found) is (plan.privacy().epsilon("cell", "paper") > 20)


def test_no_privacy_at_all_is_noted():
    (note,) = notes(PLAN.replace(mechanism="none", secure_aggregation=False), 1e-5)
    assert note.startswith("epsilon infinity")


# --- the best attack, in words ---


def row_of(advantage, detection, **other):
    row = PLAN.privacy().bounds[0]
    return replace(row, advantage_upper_bound=advantage, detection_upper_bound=detection, **other)


@pytest.mark.parametrize(
    ("advantage", "detection", "words"),
    [
        (0.42, 0.0345, ("advantage .42 (", "at most 71 of 100 tries", "at most 35 of 1,000 (a blind guess finds 1)")),
        (0.4201, 0.035, ("advantage .43 (", "at most 72 of 100 tries", "at most 35 of 1,000")),
        (0.0, 0.001, ("advantage 0 (", "at most 50 of 100 tries", "at most 1 of 1,000")),
        (1.0, 1.0, ("advantage 1.00 (", "at most 100 of 100 tries", "at most 1,000 of 1,000")),
        (0.003, 0.001009, ("advantage .003 (", "at most 51 of 100 tries", "at most 2 of 1,000")),
    ],
)
def test_an_advantage_is_said_as_right_guesses_of_a_hundred_rounded_up(advantage, detection, words):
    said = attack_in_words(row_of(advantage, detection))
    assert [part for part in words if part not in said] == []


@pytest.mark.parametrize(
    ("unit", "accounting", "words"),
    [
        ("cell", "paper", ("(cell, paper *, server)", "a row's own releases", "a cell is the true one or a given")),
        ("cell", "strict", ("(cell, strict, server)", "everything released", "a cell is the true one or a given")),
        ("record", "strict", ("everything released", "a record is the true one or a given other one")),
        (
            "party",
            "paper",
            ("(party, paper, server)", "everything released", "values are the true ones or given others"),
        ),
    ],
)
def test_the_sentence_says_what_is_told_apart_and_from_what(unit, accounting, words):
    said = attack_in_words(PLAN.privacy().bound(unit, accounting))
    assert [part for part in words if part not in said] == []


def test_where_epsilon_is_infinite_the_sentence_says_no_protection():
    table = PLAN.replace(mechanism="none", secure_aggregation=False).privacy()
    said = attack_in_words(table.bounds[0])
    assert said.startswith("no protection (cell, paper *, server)")
    assert "advantage" not in said
    assert {row["advantage_upper_bound"] for row in table.to_dicts()} == {1.0}


@pytest.mark.parametrize(
    ("advantage", "text"), [(0, "0"), (1e-9, ".001"), (0.0341, ".035"), (0.42, ".42"), (0.421, ".43"), (0.9951, "1.00")]
)
def test_an_advantage_has_two_or_three_decimals(advantage, text):
    assert format_advantage(advantage) == text


@given(st.floats(1e-9, 1.0))
def test_a_written_advantage_is_never_below_the_computed_one(advantage):
    text = format_advantage(advantage)
    assert advantage <= float(text) <= min(1.0, advantage + 0.0100001)
    assert len(text) <= 4


def test_a_row_of_a_table_can_be_asked_for():
    table = PLAN.privacy()
    row = table.bound("record", "paper", CURIOUS_PARTY)
    assert row.epsilon == table.epsilon("record", "paper", server=False, colluding_parties=1)
    with pytest.raises(PlanError, match=r"no row for server \+ 1 party; it has server, 1 party, server \+ 2 parties"):
        table.bound("cell", "paper", Adversary(colluding_parties=1))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("legend", [False, True])
def test_every_epsilon_of_a_printed_table_stands_beside_its_advantage(width, legend):
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    table = PLAN.privacy()
    print_privacy(console, table, title="epsilon", legend=legend)
    text = console.export_text()
    for row in table.of_columns:
        assert f"{format_epsilon(row.epsilon)} {format_advantage(row.advantage_upper_bound):>4}" in text
    assert label_in_words(table.label) in " ".join(text.split())
    assert attack_in_words(table.bounds[0]) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    explained = table.bound("record", "strict")
    print_privacy(console, table, title="epsilon", legend=legend, explained=explained)
    assert attack_in_words(explained) in " ".join(console.export_text().split())


# --- how numbers are written ---


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (8, "8.00"),
        (0.07, "0.0700"),
        (3.207, "3.21"),
        (12.341, "12.4"),
        (9.991, "10.0"),
        (849.0, "849"),
        (849.01, "850"),
        (2030, "2,030"),
        (2030.1, "2,040"),
        (15_301, "15,400"),
        (99_900, "99,900"),
        (99_901, "1.00e+05"),
        (310_000, "3.10e+05"),
        (1.2e-7, "1.20e-07"),
        (0, "0"),
        (math.inf, "infinity"),
        (math.nan, "infinity"),
    ],
)
def test_an_epsilon_has_three_digits(epsilon, text):
    assert format_epsilon(epsilon) == text


@given(st.floats(1e-9, 1e12))
def test_a_written_epsilon_is_never_below_the_computed_one_and_at_most_a_per_cent_above(epsilon):
    text = format_epsilon(epsilon)
    assert epsilon <= float(text.replace(",", "")) <= epsilon * 1.0100001
    shown = Decimal(text.replace(",", ""))
    assert len(shown.as_tuple().digits) == 3 or shown >= 1000


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_of_a_table_is_cut(width):
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    table = plain_table("  protects", "counting", "from", "limit", "spent", "as one plan", "delta")
    rows = [("  record", "strict", "server", "2000", "2,030", "3.10e+05", "1e-05")]
    rows.append(("  cell", "paper", "server + 3", "10.5", "infinity", "infinity", "1e-05"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    print_privacy(console, PLAN.replace(num_epochs=5000, num_trials=5000).privacy(), title="epsilon")
    text = console.export_text()
    assert "…" not in text
    words = text.split()
    for row in rows:
        for cell in row:
            assert set(cell.split()) <= set(words)


def test_notes_are_no_markup(capsys):
    print_notes(Console(width=100), ["column [red]x[/] of [/y]"])
    assert capsys.readouterr().out == "note: column [red]x[/] of [/y]\n"
