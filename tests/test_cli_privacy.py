"""`pbmvfl privacy` and `pbmvfl plan`: figures, refusals, help, and that neither loads what trains."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pbmvfl.plan import Plan


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
        } <= row.keys()
        assert row["method"] in ("rdp", "pld")
        assert row["delta"] == 1e-5
        assert row["conditions"]
    kinds = [tuple(row[name] for name in CELL) for row in document["bounds"]]
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
    code, out, _ = cli("privacy", *sizes(*given), "--json")
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
    kinds = {(row["adversary"], row["colluding_parties"]) for row in json.loads(out)["bounds"]}
    assert kinds == {("server", 0), ("server", 2), ("party", 2)}


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 0.3}, ("beta=0.3", "(0, 1/4]")),
        ({"beta": 0.001}, ("beta=0.001", "1/128")),
        ({"num_parties": 1}, ("num_parties=1", "at least 2")),
        ({"num_trials": 0}, ("num_trials=0", "at least 1")),
        ({"num_trials": 20_000}, ("num_trials*num_parties", "65535")),
        ({"embedding_dim": 0}, ("embedding_dim=0", "at least 1")),
        ({"delta": 0}, ("delta=0",)),
        ({"delta": 1}, ("delta=1",)),
        ({"colluding_parties": 4}, ("colluding_parties=4", "0 to 3")),
        ({"colluding_parties": -1}, ("colluding_parties=-1", "0 or more")),
        ({"mechanism": "laplace"}, ("mechanism='laplace'", "pbm, ldp, none")),
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
    plan = planned["plan"]
    asked = ("num_parties", "num_trials", "beta", "embedding_dim", "num_epochs", "num_samples", "batch_size")
    code, out, _ = cli("privacy", *options(**{name: plan[name] for name in asked}), "--json")
    assert code == 0
    spent = one(json.loads(out)["bounds"], **CELL)["epsilon"]
    assert 0.9 * budget["epsilon"] < spent <= budget["epsilon"]
    assert planned["epsilon"] == spent
    for name, value in budget.items():
        assert name == "epsilon" or plan[name] == value
    assert planned["traffic"] == Plan.from_dict(plan).traffic().to_dict()


def test_a_plan_against_colluding_parties_holds_against_them(cli):
    code, out, _ = cli("plan", *options(**BUDGET, **SIZES, colluding_parties=2), "--json")
    assert code == 0
    plan = json.loads(out)["plan"]
    given = (plan[name] for name in ("num_parties", "num_trials", "beta", "embedding_dim", "num_epochs", "num_samples"))
    code, out, _ = cli("privacy", *sizes(*given), "--colluding-parties", 2, "--json")
    assert one(json.loads(out)["bounds"], **{**CELL, "colluding_parties": 2})["epsilon"] <= 8


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


@pytest.mark.parametrize("missing", ["unit", "accounting", "epsilon", "delta", "num_parties"])
def test_which_epsilon_is_meant_must_be_said(missing, cli):
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
        ({"beta": 0.5}, ("beta=0.5", "(0, 1/4]")),
        ({"colluding_parties": 4}, ("colluding_parties=4", "0 to 3")),
    ],
)
def test_a_bad_budget_is_refused_by_name(change, words, cli):
    code, out, err = cli("plan", *options(**{**BUDGET, **SIZES, **change}), "--json")
    assert (code, out) == (2, "")
    for word in words:
        assert word in " ".join(err.split())


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
        ["plan", *options(**BUDGET, **SIZES, picture="plan.png")],
        ["train", "--help"],
    ],
    ids=["privacy --json", "privacy", "plan", "train --help"],
)
def test_commands_that_do_not_train_load_no_torch_and_no_numba(arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SILENT, *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
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
        "--json",
    ),
    ("plan",): (
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
    code, out, err = cli(*command, "--help")
    assert (code, err) == (0, "")
    words = re.sub(r"[\s│]+", " ", out)
    for option in HELP[command]:
        assert option in words


@pytest.mark.parametrize("command", [command for command in HELP if command], ids=" ".join)
def test_no_option_s_name_is_cut_short_on_a_narrow_terminal(command, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = cli(*command, "--help")
    assert not re.findall(r"--[a-z-]+…", out)


def test_an_unknown_command_is_refused(cli):
    code, out, err = cli("trane")
    assert (code, out) == (2, "")
    assert "trane" in err


def test_the_installed_command_is_this_one(tmp_path):
    script = Path(sys.executable).parent / "pbmvfl"
    if not script.exists():
        pytest.skip("the package's command is not installed beside this Python")
    done = subprocess.run(
        [script, "privacy", "--beta", "0.3"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
