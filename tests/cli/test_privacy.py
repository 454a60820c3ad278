"""`pbmvfl privacy`, `pbmvfl plan` and `pbmvfl ledger`: figures, refusals, help, and that none loads what trains."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl.errors import RunFolderError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.flat_names import plan_settings
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.search import plan_for_budget
from support.ledger_books import opening


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> tuple[int, str, str]:
        return run_main(*arguments)

    return run


def options(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def sizes(m: int, b: int, beta: float, p: int, e: int, n: int = 50_000) -> list[str]:
    return options(num_parties=m, num_trials=b, beta=beta, embedding_dim=p, num_epochs=e, num_samples=n)


def one(rows: list[dict], **wanted: object) -> dict:
    found = [row for row in rows if wanted.items() <= row.items()]
    assert len(found) == 1
    return found[0]


CELL = {"unit": "cell", "accounting": "paper", "adversary": "server", "colluding_parties": 0}
BUDGET = {"epsilon": 8, "delta": 1e-5, "unit": "cell", "accounting": "paper"}
SIZES = {"num_parties": 4, "num_samples": 1437, "num_classes": 10}


# --- pbmvfl privacy ---


def test_bounds_name_unit_accounting_adversary_and_method(cli):
    code, out, err = cli("privacy", *sizes(3, 4, 0.1, 2, 2, 100), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["bounds"]
    for row in document["bounds"]:
        assert {
            "unit",
            "accounting",
            "adversary",
            "colluding_parties",
            "epsilon",
            "delta",
            "method",
            "advantage_upper_bound",
            "detection_upper_bound",
            "false_alarm_rate",
            "odds_upper_bound",
        } <= row.keys()
        assert 0 < row["advantage_upper_bound"] <= 1
        assert row["odds_upper_bound"] == pytest.approx(1000 * row["detection_upper_bound"])
        is_label = row["unit"] == "label"
        assert row["method"] in (("pure",) if is_label else ("rdp", "pld"))
        assert row["delta"] == (0 if is_label else 1e-5)
        assert row["conditions"]
    kinds = [tuple(row[name] for name in CELL) for row in document["bounds"] if row["unit"] != "label"]
    assert len(set(kinds)) == len(kinds) == 18
    assert {kind[2:] for kind in kinds} == {("server", 0), ("party", 1), ("server", 2)}
    plan = Plan.from_dict(document["plan"])
    assert (plan.num_parties, plan.num_trials, plan.embedding_dim, plan.num_epochs) == (3, 4, 2, 2)


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ((4, 16, 0.1, 16, 41), 250.0, 320.9),
        ((5, 2, 0.05, 16, 9), 7.25, 7.41),
        ((5, 1, 0.25, 1, 5), 5.0, 5.48 + 0.005),
    ],
)
def test_the_epsilon_of_a_cell_is_the_known_one(given, least, most, cli):
    code, out, _ = cli("privacy", *sizes(*given), "--delta", 1e-5, "--json")
    assert code == 0
    assert least <= one(json.loads(out)["bounds"], **CELL)["epsilon"] <= most


def test_the_strict_count_and_more_colluding_parties_never_cost_less(cli):
    code, out, _ = cli("privacy", *sizes(4, 4, 0.1, 2, 2, 100), "--json")
    assert code == 0
    rows = json.loads(out)["bounds"]
    for adversary in ({"adversary": "server", "colluding_parties": t} for t in (0, 3)):
        paper, strict = (one(rows, unit="cell", accounting=a, **adversary)["epsilon"] for a in ("paper", "strict"))
        assert strict > paper
    assert one(rows, **{**CELL, "colluding_parties": 3})["epsilon"] > one(rows, **CELL)["epsilon"]


def test_colluding_parties_choose_the_adversaries(cli):
    code, out, _ = cli("privacy", *sizes(5, 4, 0.1, 2, 2, 100), "--colluding-parties", 2, "--json")
    assert code == 0
    *columns, label = json.loads(out)["bounds"]
    kinds = {(row["adversary"], row["colluding_parties"]) for row in columns}
    assert kinds == {("server", 0), ("server", 2), ("party", 2)}
    assert (label["unit"], label["colluding_parties"]) == ("label", 5)


def test_without_secure_aggregation_and_without_noise_the_table_says_so(cli):
    code, out, _ = cli("privacy", *sizes(4, 4, 0.1, 2, 2, 100), "--no-secure-aggregation", "--json")
    assert code == 0
    rows = json.loads(out)["bounds"]
    assert one(rows, **CELL)["epsilon"] == one(rows, **{**CELL, "colluding_parties": 3})["epsilon"]
    code, out, _ = cli("privacy", *sizes(4, 4, 0.1, 2, 2, 100), "--mechanism", "none", "--json")
    assert code == 0
    assert {row["epsilon"] for row in json.loads(out)["bounds"]} == {"inf"}


def test_a_person_sees_that_the_paper_s_count_is_not_a_proof(cli):
    code, out, err = cli("privacy", *sizes(4, 4, 0.1, 2, 2, 100))
    assert (code, err) == (0, "")
    assert "paper *" in out
    assert "not a proof" in out
    assert "1e-05" in out


def test_a_person_sees_the_best_attack_beside_epsilon(cli):
    code, out, _ = cli("privacy", *sizes(5, 16, 0.11, 1, 4, 8844))
    assert code == 0
    assert out.count("epsilon adv.") == 3
    said = " ".join(out.split())
    # tests/privacy/test_advantage.py compares this plan with dp-accounting
    assert "advantage .59 (cell, paper *, server): the best possible attack" in said
    assert "guesses right in at most 80 of 100 tries" in said
    code, out, _ = cli("privacy", *sizes(4, 4, 0.1, 2, 2, 100), "--mechanism", "none")
    assert code == 0
    assert "no protection (cell, paper *, server)" in " ".join(out.split())


def test_a_plan_s_sentence_is_about_the_epsilon_that_was_asked_for(cli):
    budget = {**BUDGET, "unit": "record"}
    code, out, _ = cli("plan", *options(**budget, **SIZES, colluding_parties=2))
    assert code == 0
    assert "(record, paper *, server + 2 parties): the best possible attack" in " ".join(out.split())
    assert "from server + 2" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 0.4922}, ("beta=0.4922", "[1/128, 63/128]")),
        ({"beta": 0}, ("beta=0", "[1/128, 63/128]")),
        ({"beta": 0.001}, ("beta=0.001", "1/128")),
        ({"num_parties": 1}, ("num_parties=1", "at least 2")),
        ({"num_trials": 0}, ("num_trials=0", "at least 1")),
        ({"num_trials": 20_000}, ("num_trials*num_parties", "65535")),
        ({"embedding_dim": 0}, ("embedding_dim=0", "at least 1")),
        ({"delta": 0}, ("delta=0",)),
        ({"delta": 1}, ("delta=1",)),
        ({"colluding_parties": 4}, ("colluding_parties=4", "0 to 3")),
        ({"colluding_parties": -1}, ("colluding_parties=-1", "0 or more")),
        ({"mechanism": "gauss"}, ("mechanism='gauss'", "pbm, laplace, krr, ldp, none")),
        ({"noise_multiplier": -1}, ("noise_multiplier=-1", "0")),
    ],
)
def test_numbers_that_make_no_plan_are_refused_by_name(change, words, cli):
    usual = {"num_parties": 4, "num_trials": 4, "beta": 0.1, "embedding_dim": 2, "num_epochs": 2, "num_samples": 100}
    code, out, err = cli("privacy", *options(**{**usual, **change}), "--json")
    assert code == 2
    assert out == ""
    for word in words:
        assert word in " ".join(err.split())


# --- pbmvfl plan ---


@pytest.mark.parametrize(
    "budget",
    [
        {"epsilon": 8},
        {"epsilon": 1.5, "num_epochs": 3, "embedding_dim": 2},
        {"epsilon": 40, "num_trials": 5, "gradient_codec": "float32"},
    ],
)
def test_a_planned_run_costs_at_most_its_budget_by_the_other_command(budget, cli):
    code, out, err = cli("plan", *options(**{**BUDGET, **SIZES, **budget}), "--json")
    assert (code, err) == (0, "")
    planned = json.loads(out)
    plan = Plan.from_dict(planned["plan"]).flat()
    asked = ("num_parties", "num_trials", "beta", "embedding_dim", "num_epochs", "num_samples", "batch_size")
    code, out, _ = cli("privacy", *options(**{name: plan[name] for name in asked}), "--json")
    assert code == 0
    spent = one(json.loads(out)["bounds"], **CELL)["epsilon"]
    assert 0.9 * budget["epsilon"] < spent <= budget["epsilon"]
    assert planned["epsilon"] == spent
    # a five-hundredth more of beta would be beyond the budget, unless beta is at its end
    more = {**{name: plan[name] for name in asked}, "beta": plan["beta"] * (1 + 1 / 500)}
    if more["beta"] <= 1 / 4:
        code, out, _ = cli("privacy", *options(**more), "--json")
        assert code == 0
        assert one(json.loads(out)["bounds"], **CELL)["epsilon"] > budget["epsilon"]
    for name, value in budget.items():
        assert name == "epsilon" or plan[name] == value
    assert planned["traffic"] == Plan.from_dict(planned["plan"]).traffic().to_dict()


def test_a_plan_against_colluding_parties_holds_against_them(cli):
    code, out, _ = cli("plan", *options(**BUDGET, **SIZES, colluding_parties=2), "--json")
    assert code == 0
    document = json.loads(out)
    assert one(document["bounds"], **{**CELL, "colluding_parties": 2})["epsilon"] == document["epsilon"]
    plan = Plan.from_dict(document["plan"]).flat()
    given = (plan[name] for name in ("num_parties", "num_trials", "beta", "embedding_dim", "num_epochs", "num_samples"))
    code, out, _ = cli("privacy", *sizes(*given), "--colluding-parties", 2, "--json")
    assert one(json.loads(out)["bounds"], **{**CELL, "colluding_parties": 2})["epsilon"] <= 8


@pytest.mark.parametrize(
    ("mechanism", "deviation"),
    # Of the sum of 5 parties at b=16, beta=1/4, C=1. PBM: sqrt(M / (4 b beta^2)). Local Gaussian: every party adds a
    # variance of 2M / (b beta^2), and there are M of them.
    [("pbm", math.sqrt(5 / (4 * 16 / 16))), ("ldp", math.sqrt(5 * 2 * 5 / (16 / 16)))],
)
def test_a_plan_reports_the_noise_of_its_own_mechanism(mechanism, deviation, cli):
    fixed = {"mechanism": mechanism, "num_trials": 16, "beta": 0.25, "embedding_dim": 2, "num_epochs": 2}
    given = {**BUDGET, "num_parties": 5, "num_samples": 1000, "num_classes": 2, **fixed, "epsilon": 1000}
    code, out, err = cli("plan", *options(**given), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["noise_deviation"] == pytest.approx(deviation, rel=1e-12)
    assert Plan.from_dict(document["plan"]).mechanism == mechanism
    planned = plan_for_budget(Plan, **{**given, "delta": 1e-5})
    assert planned.noise == document["noise_deviation"]
    assert (1.11 < deviation < 1.12) if mechanism == "pbm" else (7.07 < deviation < 7.08)
    code, out, _ = cli("plan", *options(**given))
    assert code == 0
    assert f"noise: standard deviation {deviation:.3g} on sums within +-5" in out


@pytest.mark.parametrize(
    ("mechanism", "words"), [("none", "no plan is within epsilon 8"), ("gauss", "mechanism='gauss' is not one of")]
)
def test_a_mechanism_that_meets_no_budget_is_refused(mechanism, words, cli):
    code, out, err = cli("plan", *options(**BUDGET, **SIZES, mechanism=mechanism), "--json")
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize("mechanism", ["laplace", "krr"])
def test_other_mechanisms_are_planned_drawn_and_priced_too(mechanism, cli, tmp_path):
    small = {**SIZES, "num_samples": 200, "num_epochs": 2, "embedding_dim": 1, "mechanism": mechanism}
    code, out, err = cli("plan", *options(**BUDGET, **small, picture="plan.png"), "--json")
    assert code == 0, err
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    release = Plan.from_dict(json.loads(out)["plan"]).release
    own = {name: getattr(release, name) for name in type(release).own_settings() if name != "bounded_total"}
    sizes = {name: small[name] for name in ("num_parties", "num_samples", "num_epochs", "embedding_dim", "mechanism")}
    code, out, err = cli("privacy", *options(**sizes, **own), "--json")
    assert code == 0, err
    told = {(row["unit"], row["accounting"]): row["epsilon"] for row in json.loads(out)["bounds"][:6]}
    assert told["cell", "paper"] <= BUDGET["epsilon"]
    missing = dict(list(own.items())[:-1])
    code, _, err = cli("privacy", *options(**sizes, **missing), "--json")
    assert code == 2
    assert f"say --{list(own)[-1].replace('_', '-')}" in " ".join(err.split())


def test_out_is_a_plan_and_picture_is_a_picture(cli, tmp_path):
    small = {**SIZES, "num_samples": 200, "num_epochs": 2, "num_trials": 2, "embedding_dim": 1}
    code, out, err = cli("plan", *options(**BUDGET, **small, out="plan.json", picture="plan.png"), "--json")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(out)["plan"]
    start = (tmp_path / "plan.png").read_bytes()
    assert start[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", start[16:24])
    assert 600 <= width <= 4000
    assert 300 <= height <= 3000
    assert len(start) > 10_000


def test_an_existing_plan_is_not_overwritten(cli, tmp_path):
    (tmp_path / "plan.json").write_text("mine")
    code, _, err = cli("plan", *options(**BUDGET, **SIZES, out="plan.json"))
    assert code == 2
    assert "plan.json" in err
    assert (tmp_path / "plan.json").read_text() == "mine"


@pytest.mark.parametrize("option", ["out", "picture"])
def test_a_file_in_a_folder_that_does_not_exist_is_refused_by_name(option, cli, tmp_path):
    small = {**SIZES, "num_samples": 200, "num_epochs": 2, "num_trials": 2, "embedding_dim": 1}
    code, _, err = cli("plan", *options(**BUDGET, **small, **{option: "no/such/file.png"}))
    assert code == 2
    assert "no/such/file.png" in "".join(err.split())
    assert not list(tmp_path.iterdir())


def test_an_infeasible_budget_says_what_would_make_it_feasible_and_it_does(cli):
    code, out, err = cli("plan", *options(**{**BUDGET, **SIZES, "epsilon": 0.05}), "--json")
    assert (code, out) == (2, "")
    words = " ".join(err.split())
    assert "epsilon 0.05" in words
    enough, with_less = (
        float(re.search(pattern, words)[1]) for pattern in (r"epsilon of at least ([\d.]+)", r"then from ([\d.]+) on")
    )
    assert enough > 0.05
    assert cli("plan", *options(**{**BUDGET, **SIZES, "epsilon": enough}), "--json")[0] == 0
    least = {"epsilon": with_less, "num_epochs": 1, "embedding_dim": 1}
    assert cli("plan", *options(**{**BUDGET, **SIZES, **least}), "--json")[0] == 0


def test_a_byte_budget_that_cannot_be_met_says_so(cli):
    code, _, err = cli("plan", *options(**BUDGET, **SIZES, max_bytes=1000))
    assert code == 2
    words = " ".join(err.split())
    assert "1,000 bytes" in words
    assert "fewer epochs" in words


def test_the_epsilon_that_is_meant_is_a_cell_s_and_strict_unless_it_is_said(cli):
    code, out, err = cli("plan", *options(epsilon=8, **SIZES), "--json")
    assert code == 0, err
    assert json.loads(out)["budget"] == "epsilon 8 at delta 1e-05 for a cell against server, strict accounting"


@pytest.mark.parametrize("missing", ["num_parties", "num_samples", "num_classes"])
def test_sizes_must_be_said_where_nothing_else_says_them(missing, cli):
    given = {name: value for name, value in {**BUDGET, **SIZES}.items() if name != missing}
    code, out, err = cli("plan", *options(**given))
    assert (code, out) == (2, "")
    assert f"--{missing.replace('_', '-')}" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unit": "row"}, ("unit='row'", "cell, record, party")),
        ({"accounting": "lenient"}, ("accounting='lenient'", "paper, strict")),
        ({"epsilon": 0}, ("epsilon=0", "above 0")),
        ({"epsilon": "inf"}, ("epsilon=inf", "finite")),
        ({"delta": 2}, ("delta=2",)),
        ({"num_parties": 1}, ("num_parties=1", "at least 2")),
        ({"beta": 0.5}, ("beta=0.5", "[1/128, 63/128]")),
        ({"num_samples": 0}, ("num_samples=0", "at least 1")),
        ({"colluding_parties": 4}, ("colluding_parties=4", "0 to 3")),
    ],
)
def test_a_bad_budget_is_refused_by_name(change, words, cli):
    code, out, err = cli("plan", *options(**{**BUDGET, **SIZES, **change}), "--json")
    assert (code, out) == (2, "")
    for word in words:
        assert word in " ".join(err.split())


SMALL = {**SIZES, "num_samples": 200, "num_epochs": 2, "num_trials": 2, "embedding_dim": 1}


@pytest.mark.parametrize("name", ["x.foo", "x", "x.json"])
def test_a_picture_of_a_kind_that_cannot_be_drawn_is_refused_before_anything_is_written(name, cli, tmp_path):
    code, out, err = cli("plan", *options(**BUDGET, **SMALL, out="plan.json", picture=name))
    assert (code, out) == (2, "")
    assert f"picture='{name}' must end in one of .png, .pdf, .svg" in " ".join(err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["pdf", "svg", "PNG"])
def test_pictures_of_the_other_permitted_kinds_are_drawn(kind, cli, tmp_path):
    code, _, err = cli("plan", *options(**BUDGET, **SMALL, picture=f"x.{kind}"))
    assert (code, err) == (0, "")
    assert (tmp_path / f"x.{kind}").stat().st_size > 1000


def test_one_file_cannot_be_the_plan_and_its_picture(cli, tmp_path):
    code, _, err = cli("plan", *options(**BUDGET, **SMALL, out="x.png", picture="./x.png"))
    assert code == 2
    assert "are one file; name two" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["out", "picture"])
def test_a_folder_without_the_right_to_write_is_refused_before_the_search(option, cli, tmp_path, monkeypatch):
    # Asked of the system and not made by chmod: tests may run as root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    code, out, err = cli("plan", *options(**BUDGET, **SMALL, **{option: "x.png"}))
    assert (code, out) == (2, "")
    assert f"{option}='x.png' cannot be written: you have no right to write there" in " ".join(err.split())
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_leaves_no_plan_behind(cli, tmp_path, monkeypatch):
    def fails(*_):
        raise RunFolderError("the disk is full")

    monkeypatch.setattr("pbmvfl.report.plots.draw_budget", fails)
    code, _, _ = cli("plan", *options(**BUDGET, **SMALL, out="plan.json", picture="x.png"))
    assert code == 2
    assert not list(tmp_path.iterdir())


def test_square_brackets_in_names_are_shown_as_they_are_and_the_command_can_be_copied(cli, tmp_path):
    (tmp_path / "a [").mkdir()
    code, out, err = cli("plan", *options(**BUDGET, **SMALL, out="plan [jan].json", picture="a [/bold] [red].png"))
    assert (code, err) == (0, "")
    assert "written to plan [jan].json; train it with: pbmvfl train DATASET --plan 'plan [jan].json'" in out
    assert "drawn in a [/bold] [red].png" in out


def test_a_strict_plan_is_offered_for_training_like_any_other(cli):
    given = {**BUDGET, **SMALL, "accounting": "strict", "epsilon": 40}
    code, out, _ = cli("plan", *options(**given, out="plan.json"))
    assert code == 0
    words = " ".join(out.split())
    assert "noise_multiplier=" in words
    assert "written to plan.json; train it with: pbmvfl train DATASET --plan plan.json" in words
    _, out, _ = cli("plan", *options(**given), "--json")
    assert not any("does not train" in note for note in json.loads(out)["notes"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", *options(**{**BUDGET, **SIZES, "epsilon": 900, "delta": 1e-7})],
        ["plan", *options(**{**BUDGET, **SIZES, "num_parties": 12, "num_samples": 60_000})],
        ["privacy", *sizes(12, 16, 0.25, 16, 30)],
    ],
    ids=["plan", "plan with parties", "privacy"],
)
def test_nothing_of_a_table_is_lost_on_a_narrow_terminal(arguments, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, wide, _ = cli(*arguments)
    monkeypatch.setenv("COLUMNS", "60")
    _, narrow, _ = cli(*arguments)
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 60
    tables = [line for line in narrow.splitlines() if re.match(r"(chosen|or|cell|record|party) +[\dps]", line)]
    assert len(tables) == (10 if arguments[0] == "plan" else 6)
    whole = [line for line in wide.splitlines() if re.match(r"(chosen|or|cell|record|party) +[\dps]", line)]
    assert [line.split() for line in tables] == [line.split() for line in whole]  # every number on its line, in full
    for title in ("num_trials", "beta", "epsilon", "noise", "bytes") if arguments[0] == "plan" else ():
        assert title in narrow


@pytest.mark.parametrize(
    ("delta", "beta", "wanted"),
    [(1e-5, 0.01, ()), (0.01, 0.01, ("delta",)), (1e-5, 0.25, ("epsilon",)), (0.02, 0.25, ("delta", "epsilon"))],
)
def test_numbers_that_protect_nobody_are_noted_for_people_and_in_json(delta, beta, wanted, cli):
    given = [*sizes(4, 16, beta, 8, 8, 100), "--delta", delta]
    code, out, _ = cli("privacy", *given, "--json")
    assert code == 0
    notes = json.loads(out)["notes"]
    assert [re.match(r"\w+", note)[0] for note in notes] == list(wanted)
    code, out, _ = cli("privacy", *given)
    assert code == 0
    assert out.count("note:") == len(wanted)
    words = " ".join(out.split())
    assert ("publishing a row outright" in words) is ("delta" in wanted)
    assert ("protects nobody in practice; see pbmvfl plan --epsilon 8" in words) is ("epsilon" in wanted)


def test_a_plan_has_the_same_notes(cli):
    given = options(**{**BUDGET, **SMALL, "epsilon": 90, "delta": 0.005, "num_trials": 16, "embedding_dim": 8})
    _, out, _ = cli("plan", *given, "--json")
    first, second = json.loads(out)["notes"]
    assert first.startswith("delta=0.005 is not below 1/num_samples = 1/200")
    assert "protects nobody" in second
    _, out, _ = cli("plan", *given)
    assert out.count("note:") == 2


# --- pbmvfl ledger ---


LIMIT = {"dataset": "people", "unit": "cell", "accounting": "paper", "epsilon": 50}


def charged_book(path: Path, *fingerprints: str) -> Path:
    """A book with one short run for each fingerprint."""
    plan = Plan.from_dict({"num_parties": 3, "num_samples": 20, "num_classes": 2, "batch_size": 5, "num_epochs": 1})
    for run, fingerprint in enumerate(fingerprints):
        session = Ledger(path).open_session(
            opening(
                dataset="people",
                plan=plan,
                run=str(run),
                session="s",
                train_values=np.frombuffer(fingerprint.ljust(20).encode(), dtype=np.uint8),
            )
        )
        first = plan.schedule[0]
        session.charge(first, plan.events(first.kind))
        session.close()
    return path


def on_disk(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unit": "row"}, ("unit='row'", "cell, record, party")),
        ({"accounting": "lenient"}, ("accounting='lenient'", "paper, strict")),
        ({"order": "inf"}, ("order=inf", "finite number above 1")),
        ({"order": "nan"}, ("order=nan", "finite number above 1")),
        ({"order": 1}, ("order=1.0", "finite number above 1")),
        ({"delta": 0}, ("delta=0.0",)),
        ({"epsilon": "inf"}, ("epsilon=inf", "finite")),
        ({"colluding_parties": -1}, ("colluding_parties=-1", "0 or more")),
        ({"epsilon": None}, ("--epsilon, or --remove",)),
    ],
)
def test_a_bad_limit_is_refused_by_name_and_nothing_is_made(change, words, cli, tmp_path):
    given = {name: value for name, value in {**LIMIT, **change}.items() if value is not None}
    code, out, err = cli("ledger", "limit", "books/x.sqlite", *options(**given))
    assert (code, out) == (2, "")
    for word in words:
        assert word in " ".join(err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unit": "row"}, ("unit='row'", "cell, record, party")),
        ({"accounting": "lenient"}, ("accounting='lenient'", "paper, strict")),
        ({}, ("x.sqlite", "does not exist")),
    ],
)
def test_removing_a_limit_makes_no_book_and_names_what_is_wrong(change, words, cli, tmp_path):
    given = {name: value for name, value in {**LIMIT, **change}.items() if name != "epsilon"}
    code, out, err = cli("ledger", "limit", "x.sqlite", *options(**given), "--remove")
    assert (code, out) == (2, "")
    for word in words:
        assert word in " ".join(err.split())
    assert not list(tmp_path.iterdir())


def test_a_limit_can_be_set_before_the_first_run_and_removed_again(cli, tmp_path):
    names = options(**{name: value for name, value in LIMIT.items() if name != "epsilon"})
    assert cli("ledger", "limit", "x.sqlite", *names, "--epsilon", 50)[0] == 0
    assert [limit.epsilon for limit in Ledger(tmp_path / "x.sqlite").limits("people")] == [50]
    assert cli("ledger", "limit", "x.sqlite", *names, "--remove")[0] == 0
    assert Ledger(tmp_path / "x.sqlite").limits("people") == []
    code, _, err = cli("ledger", "limit", "x.sqlite", *names, "--remove")
    assert code == 2
    assert "has no limit" in err


@pytest.mark.parametrize("command", [("show",), ("show", "--json"), ("export",)], ids=" ".join)
def test_looking_at_books_leaves_every_byte_as_it_is(command, cli, tmp_path):
    charged_book(tmp_path / "books/party-0.sqlite", "values")
    charged_book(tmp_path / "books/party-1.sqlite", "values")
    before = on_disk(tmp_path)
    code, out, err = cli("ledger", command[0], "books", *command[1:])
    assert (code, err) == (0, "")
    assert "people" in out
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize("command", ["show", "export"])
def test_another_program_s_database_is_no_book(command, cli, tmp_path):
    theirs = sqlite3.connect(tmp_path / "x.sqlite")
    theirs.execute("CREATE TABLE shelf (title TEXT)")
    theirs.close()
    before = on_disk(tmp_path)
    code, out, err = cli("ledger", command, "x.sqlite")
    assert (code, out) == (2, "")
    assert "another program's database" in err
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize(
    ("fingerprints", "noted"), [(("before", "after"), True), (("before", "before"), False), ((), False)]
)
def test_show_notes_that_a_dataset_s_values_changed(fingerprints, noted, cli, tmp_path):
    path = charged_book(tmp_path / "x.sqlite", *fingerprints)
    Ledger(path).close()
    code, out, err = cli("ledger", "show", path)
    assert (code, err) == (0, "")
    assert ("note: its values changed between runs (2 different" in " ".join(out.split())) is noted
    for command in (("show", path, "--json"), ("export", path)):
        code, out, _ = cli("ledger", *command)
        assert code == 0
        datasets = json.loads(out)[str(path)]["datasets"].values()
        assert [bool(dataset["notes"]) for dataset in datasets] == ([noted] if fingerprints else [])


def test_a_folder_named_like_a_book_is_refused(cli, tmp_path):
    (tmp_path / "books/party-0.sqlite").mkdir(parents=True)
    code, out, err = cli("ledger", "show", "books")
    assert (code, out) == (2, "")
    assert "is a folder" in err


# --- light, and with help ---

SILENT = """
import sys
from pbmvfl.cli import main
try:
    main()
finally:
    loaded = [name for name in ("torch", "numba", "sklearn") if name in sys.modules]
    print("loaded", loaded, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["privacy", *sizes(5, 2, 0.05, 16, 9), "--json"],
        ["privacy", *sizes(5, 2, 0.05, 16, 9)],
        ["plan", *options(**BUDGET, **SMALL, picture="plan.png")],
        ["ledger", "limit", "x.sqlite", *options(**LIMIT)],
        ["train", "--help"],
    ],
    ids=["privacy --json", "privacy", "plan", "ledger limit", "train --help"],
)
def test_commands_that_do_not_train_load_no_torch_and_no_numba(arguments, run_process, tmp_path):
    done = run_process(*arguments, program=SILENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "loaded []"


HELP = {
    (): ("train", "privacy", "plan", "ledger"),
    ("train",): (
        "--num-parties",
        "--num-trials",
        "--beta",
        "--embedding-dim",
        "--num-epochs",
        "--batch-size",
        "--learning-rate",
        "--optimizer",
        "--momentum",
        "--mechanism",
        "--gradient-codec",
        "--evaluation",
        "--seed",
        "--out",
        "--resume",
        "--json",
        "--data",
        "--label",
        "--columns",
        "--paper",
        "--record",
        "sgd | adam",
        "simulator | released",
    ),
    ("privacy",): (
        "--num-parties",
        "--num-trials",
        "--beta",
        "--embedding-dim",
        "--num-epochs",
        "--num-samples",
        "--delta",
        "--colluding-parties",
        "--data",
        "--plan",
        "--json",
    ),
    ("plan",): (
        "--data",
        "--label",
        "--plan",
        "--record",
        "--epsilon",
        "--delta",
        "--unit",
        "--accounting",
        "--num-parties",
        "--num-samples",
        "--max-bytes",
        "--out",
        "--picture",
        "--json",
    ),
    ("ledger",): ("show", "limit", "export"),
}


@pytest.mark.parametrize("command", HELP, ids=lambda command: " ".join(command) or "pbmvfl")
def test_help_names_every_option(command, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = cli(*command, "--help-all")
    assert (code, err) == (0, "")
    words = re.sub(r"[\s│]+", " ", out)
    for option in HELP[command]:
        assert option in words


@pytest.mark.parametrize("command", [command for command in HELP if command], ids=" ".join)
def test_no_option_s_name_is_cut_short_on_a_narrow_terminal(command, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option in ("--help", "--help-all"):
        _, out, _ = cli(*command, option)
        assert not re.findall(r"--[a-z-]+…", out)


@pytest.mark.parametrize("command", [("train",), ("privacy",), ("plan",)], ids=" ".join)
def test_options_of_a_plan_have_the_words_of_its_settings(command, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = cli(*command, "--help-all")
    found = 0
    for name, setting in plan_settings().items():
        if line := re.search(rf"--{name.replace('_', '-')} +<.*", out):
            assert setting.help in line[0]
            found += 1
        assert not setting.help_off or f"--no-{name.replace('_', '-')}" not in out or setting.help_off in out
    assert found >= 10


def test_both_flags_of_a_setting_contradict_each_other(cli):
    flags = ("--secure-aggregation", "--no-secure-aggregation")
    for command in (("privacy", *sizes(4, 4, 0.1, 2, 2, 100)), ("train", "digits")):
        code, out, err = cli(*command, *flags)
        assert (code, out) == (2, "")
        assert "--secure-aggregation and --no-secure-aggregation contradict each other" in err


NEW_MECHANISM = """
from dataclasses import dataclass
from typing import ClassVar
from pbmvfl.mechanisms import Exact, register
from pbmvfl._settings import setting

@register
@dataclass(frozen=True, kw_only=True)
class Wide(Exact):
    name: ClassVar[str] = "wide"
    words: ClassVar[str] = "wider than the rest"
    width: float = setting(2.0, help="W: how wide.", panel="Privacy mechanism")

from pbmvfl.cli import main
main()
"""


@pytest.mark.parametrize("command", ["train", "plan", "privacy"])
def test_a_new_mechanism_s_own_numbers_are_options_by_themselves(command, run_process, tmp_path):
    done = run_process(command, "--help-all", program=NEW_MECHANISM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = re.sub(r"[\s│]+", " ", done.stdout)
    assert re.search(r"--width <float> W: how wide\.", words)
    assert "wide (wider than the rest)" in words


def test_a_new_mechanism_s_own_numbers_reach_the_plan(run_process, tmp_path):
    given = ("--mechanism", "wide", "--width", 3.5)
    done = run_process("privacy", *sizes(3, 4, 0.1, 2, 2, 100), *given, "--json", program=NEW_MECHANISM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    release = json.loads(done.stdout)["plan"]["release"]
    assert (release["mechanism"], release["width"]) == ("wide", 3.5)


def test_an_unknown_command_is_refused(cli):
    code, out, err = cli("trane")
    assert (code, out) == (2, "")
    assert "trane" in err


def test_the_installed_command_is_this_one(tmp_path):
    script = Path(sys.executable).parent / "pbmvfl"
    if not script.exists():
        pytest.skip("the package's command is not installed beside this Python")
    done = subprocess.run(
        [script, "privacy", "--beta", "0.3"], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
