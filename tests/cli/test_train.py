"""`pbmvfl train`: what it prints, what it leaves behind, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pbmvfl.cli.descriptions import coupling_notes
from pbmvfl.data import load_table
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.units import Accounting, Unit


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What was said on stderr without the line breaks of the terminal."""
        return "".join(self.err.split())


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path) -> Cli:
    """The command in this process, in an empty folder. Anything but a clean exit is an exception of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> Outcome:
        return Outcome(*run_main(*arguments))

    return run


@pytest.fixture
def in_a_process(run_process, tmp_path) -> Cli:
    """The command in a process of its own, in an empty folder."""

    def run(*arguments: object) -> Outcome:
        done = run_process(*arguments, cwd=tmp_path)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder with its time and its bytes; folders too."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else (0, b"")
        for path in sorted(folder.rglob("*"))
    }


def write_table(path: Path, *, num_rows: int = 60, num_classes: int = 2, spoil: Callable | None = None) -> None:
    """Numbers that tell the class, and a word."""
    random = np.random.default_rng(5)
    labels = random.integers(0, num_classes, num_rows)
    header = ["income", "debt", "visits", "job", "churn"]
    rows = [
        [f"{2 * label + n:.4f}" for n in random.normal(size=3)] + [("cook", "clerk")[label % 2], f"c{label}"]
        for label in labels
    ]
    if spoil is not None:
        spoil(header, rows)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def with_ids(header: list[str], rows: list[list[str]]) -> None:
    header.append("person")
    for number, row in enumerate(rows):
        row.append(f"p{number}")


TABLE = ("--label", "churn", "--columns", "bank=income,debt;shop=visits")
QUICK = ("--encoder", "linear", "--num-epochs", 2, "--batch-size", 10, "--embedding-dim", 2, "--num-trials", 4)


def strict_json(text: str) -> dict:
    """One JSON document; NaN and Infinity are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def png_size(path: Path) -> tuple[int, int]:
    start = path.read_bytes()[:24]
    assert start[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", start[16:24])


# --- what a run leaves ---


@pytest.mark.slow
def test_json_is_one_document_on_stdout_and_nothing_else(in_a_process, tmp_path):
    done = in_a_process("train", "digits", "--num-epochs", 1, "--batch-size", 50, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    result = strict_json(done.out)
    assert {"metrics", "history", "traffic", "seconds", "plan"} <= result.keys()
    assert {"train_accuracy", "test_accuracy"} <= result["metrics"].keys()
    assert not {"train_auprc", "test_auprc"} & result["metrics"].keys()
    assert set(result["traffic"]) == {"bytes_setup", "bytes_up", "bytes_down", "rounds"}
    assert all(isinstance(count, int) and count > 0 for count in result["traffic"].values())
    assert [line["epoch"] for line in result["history"]] == [1]
    assert result["seconds"] > 0
    plan = Plan.from_dict(result["plan"])
    assert (plan.num_parties, plan.num_samples, plan.num_classes) == (4, 1437, 10)
    assert result["traffic"] == plan.traffic().to_dict()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-001"]
    assert (tmp_path / "runs/digits-001/result.json").read_text() == done.out


@pytest.mark.usefixtures("rendered_curves")
def test_a_run_folder_has_its_plan_history_result_picture_and_checkpoint(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    done = cli("train", "--data", "people.csv", *TABLE, *QUICK, "--num-epochs", 3, "--out", "deep/er/run", "--json")
    assert done.code == 0, done.err
    folder = tmp_path / "deep/er/run"
    assert {path.name for path in folder.iterdir()} == {
        "plan.json",
        "data.json",
        "history.csv",
        "result.json",
        "curves.png",
        "sessions.json",
        "model",
        "checkpoints",
    }
    result = strict_json((folder / "result.json").read_text())
    assert strict_json(done.out) == result
    assert {"train_accuracy", "test_accuracy", "train_auprc", "test_auprc"} <= result["metrics"].keys()
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan.to_dict() == result["plan"]
    assert plan.hash.hex() == result["plan_hash"]
    assert (plan.num_trials, plan.embedding_dim, plan.batch_size, plan.encoder) == (4, 2, 10, "linear")
    with open(folder / "history.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["epoch"] for line in lines] == ["1", "2", "3"]
    for name in ("train_loss", "train_accuracy", "test_auprc", "bytes_up"):
        assert [float(line[name]) for line in lines] == [line[name] for line in result["history"]]
    width, height = png_size(folder / "curves.png")
    assert 600 <= width <= 4000
    assert 300 <= height <= 3000
    assert (folder / "curves.png").stat().st_size > 10_000
    states = {path.parent.name for path in folder.glob("checkpoints/*/round-*.safetensors")}
    assert states == {"server", "party-0", "party-1"}


def test_without_out_every_run_gets_a_new_folder(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    for _ in range(2):
        assert cli("train", "--data", "people.csv", *TABLE, *QUICK, "--num-epochs", 1, "--json").code == 0
    first = tree(tmp_path / "runs/people-001")
    assert cli("train", "--data", "people.csv", *TABLE, *QUICK, "--num-epochs", 1, "--json").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["people-001", "people-002", "people-003"]
    assert tree(tmp_path / "runs/people-001") == first


def test_without_json_a_person_sees_plan_epsilon_result_and_where_it_is(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    done = cli("train", "--data", "people.csv", *TABLE, *QUICK, "--out", "run", "-v")
    assert done.code == 0
    for words in ("epsilon that this will cost", "spent: epsilon", "accuracy", "AUPRC", "not a proof", "run"):
        assert words in done.out
    assert done.err == ""


def test_a_table_with_words_trains_with_a_schema_and_not_without(cli, tmp_path):
    write_table(tmp_path / "people.csv", num_classes=3)
    (tmp_path / "schema.json").write_text('{"columns": {"job": {"vocabulary": ["clerk", "cook"]}}}')
    command = ("train", "--data", "people.csv", "--label", "churn", "--columns", "bank=income,debt;shop=visits,job")
    refused = cli(*command, *QUICK, "--out", "bad")
    assert refused.code == 2
    assert "job" in refused.words
    assert not (tmp_path / "bad").exists()
    done = cli(*command, *QUICK, "--schema", "schema.json", "--out", "good", "--json", "--num-epochs", 10, "--seed", 4)
    assert done.code == 0, done.err
    result = strict_json(done.out)
    plan = Plan.from_dict(result["plan"])
    assert (plan.num_classes, plan.num_samples, plan.seed) == (3, 48, 4)


def test_a_run_that_can_learn_does(cli, tmp_path):
    write_table(tmp_path / "people.csv", num_rows=200)
    command = ("train", "--data", "people.csv", *TABLE, *QUICK, "--json", "--num-epochs", 8, "--learning-rate", 0.05)
    exact = strict_json(cli(*command, "--mechanism", "none").out)
    noisy = strict_json(cli(*command, "--num-trials", 64).out)
    assert exact["metrics"]["train_accuracy"] > 0.85
    assert noisy["metrics"]["train_accuracy"] > 0.75
    assert exact["history"][0]["train_loss"] > exact["history"][-1]["train_loss"]
    assert {row["epsilon"] for row in exact["privacy"]} == {"inf"}
    *columns, label = noisy["privacy"]
    assert all(math.isfinite(row["epsilon"]) for row in columns)
    assert (label["unit"], label["epsilon"]) == ("label", "inf")  # numbers by hand: labels in clear


def test_test_rows_may_come_from_a_file_of_their_own(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    write_table(tmp_path / "more.csv", num_rows=17)
    done = cli(
        *("train", "--data", "people.csv", "--test-data", "more.csv", *TABLE, *QUICK, "--json"),
        *("--evaluation", "released", "--optimizer", "adam", "--gradient-codec", "int8"),
    )
    assert done.code == 0, done.err
    plan = Plan.from_dict(strict_json(done.out)["plan"])
    assert (plan.num_samples, plan.num_test_samples, plan.evaluation) == (60, 17, "released")
    assert (plan.optimizer, plan.gradient_codec) == ("adam", "int8")


def test_every_option_reaches_the_plan(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    given = {
        "num_trials": 7,
        "beta": 0.125,
        "embedding_dim": 3,
        "bound": 2.0,
        "num_epochs": 1,
        "batch_size": 9,
        "learning_rate": 0.03,
        "optimizer": "sgd",
        "momentum": 0.5,
        "mechanism": "ldp",
        "gradient_codec": "bfloat16",
        "evaluation": "released",
        "activation": "softsign",
        "encoder": "linear",
        "seed": 11,
    }
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = cli("train", "--data", "people.csv", *TABLE, *options, "--num-parties", 2, "--json")
    assert done.code == 0, done.err
    assert given.items() <= Plan.from_dict(strict_json(done.out)["plan"]).flat().items()


def test_a_plan_file_is_followed_and_options_win(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    plan = Plan.of(num_parties=2, num_samples=48, num_classes=2, num_trials=9, beta=0.2, num_epochs=1, embedding_dim=1)
    (tmp_path / "plan.json").write_text(plan.to_json())
    done = cli("train", "--data", "people.csv", *TABLE, "--plan", "plan.json", "--beta", 0.1, "--json")
    assert done.code == 0, done.err
    trained = Plan.from_dict(strict_json(done.out)["plan"])
    assert (trained.num_trials, trained.beta, trained.embedding_dim) == (9, 0.1, 1)


def test_a_plan_file_s_seed_also_splits_the_table(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    plan = Plan.of(num_parties=2, num_samples=48, num_classes=2, num_epochs=1, embedding_dim=1, seed=7)
    (tmp_path / "plan.json").write_text(plan.to_json())
    command = ("train", "--data", "people.csv", *TABLE, "--plan", "plan.json", "--json")
    for name, options, seed in (("of-plan", (), 7), ("of-option", ("--seed", 4), 4)):
        done = cli(*command, *options, "--out", name)
        assert done.code == 0, done.err
        assert strict_json(done.out)["plan"]["seed"] == seed
        assert strict_json((tmp_path / name / "data.json").read_text())["seed"] == seed


def test_the_epsilons_of_a_result_are_at_the_delta_that_was_asked_for(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    command = ("train", "--data", "people.csv", *TABLE, *QUICK, "--json")
    usual, asked = (cli(*command, *options) for options in ((), ("--delta", 0.001)))
    for done, delta in ((usual, 1e-5), (asked, 1e-3)):
        *columns, label = strict_json(done.out)["privacy"]
        assert {row["delta"] for row in columns} == {delta}
        assert label["delta"] == 0
    assert (tmp_path / "runs/people-002/result.json").read_text() == asked.out
    plan = Plan.from_dict(strict_json(asked.out)["plan"])
    assert strict_json(asked.out)["privacy"] == plan.privacy(delta=1e-3).to_dicts()


# --- ledgers ---


def test_a_ledger_knows_a_person_whatever_the_split(cli, tmp_path):
    """Runs with other seeds and other test rows: the book has as many uses of each person as there were."""
    write_table(tmp_path / "people.csv")
    uses: Counter[float] = Counter()
    people = np.loadtxt(tmp_path / "people.csv", delimiter=",", skiprows=1, usecols=2, dtype=np.float32)
    for seed, fraction in ((1, 0.2), (2, 0.5), (3, 0.5)):
        options = ("--seed", seed, "--test-fraction", fraction, "--ledger", "books", "--num-epochs", 1, "--json")
        done = cli("train", "--data", "people.csv", *TABLE, *QUICK, *options)
        assert done.code == 0, done.err
        data = load_table("people.csv", label=TABLE[1], columns=TABLE[3], seed=seed, test_fraction=fraction)
        uses.update(data.train_features[1][:, 0].tolist())  # visits, which tell a person
    limit = Limit.choose(unit="cell", accounting="paper", epsilon=1000.0, delta=1e-5, order=4.0)
    plan = Plan.from_dict(strict_json(done.out)["plan"])
    one = rdp_curve(plan.training_run(), Unit.CELL, Accounting.PAPER, orders=(limit.order,))[0]
    spent = spending(Ledger("books/bank.sqlite", must_exist=True), "people", limit).rows / one
    assert len(set(people.tolist())) == 60
    assert sorted(np.round(spent, 6)) == sorted(uses[visits] for visits in people.tolist())
    assert max(uses.values()) == 3


@pytest.mark.usefixtures("rendered_curves")
@pytest.mark.parametrize("evaluation", ["simulator", "released"])
def test_a_run_whose_first_round_is_refused_shows_what_there_is_and_returns_3(evaluation, cli, tmp_path):
    write_table(tmp_path / "people.csv", spoil=with_ids)
    limit = ("ledger", "limit", "--dataset", "people", "--unit", "cell", "--accounting", "paper", "--epsilon")
    assert cli(*limit, 1000, "books/party-0.sqlite").code == 0
    assert cli(*limit, 0.1, "books/party-1.sqlite").code == 0
    command = ("train", "--data", "people.csv", *TABLE, *QUICK, "--id", "person", "--ledger", "books")
    command += ("--evaluation", evaluation)
    command += ("--exact-metrics", "--until-limit") if evaluation == "simulator" else ("--until-limit",)
    shown = cli(*command, "--out", "shown")
    assert (shown.code, shown.err) == (3, "")
    assert "None" not in shown.out
    assert "stopped by a ledger: round=0 would bring" in " ".join(shown.out.split())
    done = cli(*command, "--out", "run", "--json")
    assert (done.code, done.err) == (3, "")
    result = strict_json(done.out)
    assert "train_loss" not in result["metrics"]
    assert all(isinstance(value, float) for value in result["metrics"].values())
    with open(tmp_path / "run/history.csv", newline="") as file:
        assert [line["epoch"] for line in csv.DictReader(file)] == ["0"]
    assert png_size(tmp_path / "run/curves.png")


@pytest.mark.parametrize("path", ["people.csv", "people.csv/books"])
def test_a_ledger_that_cannot_be_a_folder_is_refused_and_leaves_nothing(path, cli, tmp_path):
    write_table(tmp_path / "people.csv")
    before = tree(tmp_path)
    done = cli("train", "--data", "people.csv", *TABLE, *QUICK, "--ledger", path)
    assert done.code == 2
    assert f"ledger='{tmp_path / path}'isnotafolder" in done.words
    assert tree(tmp_path) == before


# --- what a person is told ---


def test_an_encoder_that_couples_rows_is_said_to_be_charged_for_whole_batches(make_data):
    data = make_data()
    plan = Plan.for_data(data, encoder="resnet18-batchnorm", batch_size=10)
    (note,) = coupling_notes(plan)
    assert "charged as its whole batch" in note
    assert "does not hold" not in note
    apart = plan.replace(encoder="linear")
    assert coupling_notes(apart) == []
    assert plan.privacy().epsilon("cell", "paper") > apart.privacy().epsilon("cell", "paper")


# --- bad input ---

BAD_NUMBERS = [
    (("--beta", "0"), ("beta=0", "[1/128, 63/128]")),
    (("--beta", "-0.1"), ("beta=-0.1", "[1/128, 63/128]")),
    (("--beta", "0.5"), ("beta=0.5", "[1/128, 63/128]")),
    (("--beta", "0.001"), ("beta=0.001", "[1/128, 63/128]", "lower num_trials")),
    (("--beta", "nan"), ("beta=nan", "finite")),
    (("--beta", "much"), ("--beta", "number")),
    (("--num-trials", "0"), ("num_trials=0", "at least 1")),
    (("--num-trials", "1.5"), ("--num-trials", "integer")),
    (("--num-trials", "40000"), ("num_trials=40000", "at most 32767")),
    (("--num-parties", "1"), ("num_parties=1", "at least 2")),
    (("--num-parties", "3"), ("num_parties=3", "2 parties")),
    (("--embedding-dim", "0"), ("embedding_dim=0", "at least 1")),
    (("--num-epochs", "0"), ("num_epochs=0", "at least 1")),
    (("--batch-size", "0"), ("batch_size=0", "at least 1")),
    (("--learning-rate", "0"), ("learning_rate=0", "above 0")),
    (("--momentum", "1"), ("momentum=1", "[0, 1)")),
    (("--momentum", "0.9", "--optimizer", "adam"), ("momentum=0.9", "sgd")),
    (("--bound", "0"), ("bound=0", "1e-06")),
    (("--seed", "-1"), ("seed=-1", "0..2^63-1")),
    (("--delta", "0"), ("delta=0", "1")),
    (("--test-fraction", "1"), ("test_fraction=1", "between 0 and 1")),
    (("--activation", "relu"), ("activation='relu'", "tanh", "can leave [-C, C]")),
    (("--mechanism", "gauss"), ("mechanism='gauss'", "pbm, laplace, krr, ldp, none")),
    (("--gradient-codec", "int4"), ("gradient_codec='int4'", "float32, bfloat16, int8")),
    (("--optimizer", "lion"), ("optimizer='lion'", "sgd, adam")),
    (("--evaluation", "guessed"), ("evaluation='guessed'", "simulator, released")),
    (("--mechanism", "ldp", "--secure-aggregation"), ("mechanism=ldp", "secure_aggregation=False")),
    (("--checkpoint-every", "0"), ("--checkpoint-every", "1")),
    (("--num-trial", "4"), ("--num-trial",)),
    (("--encoder", "transformer"), ("encoder='transformer'", "mlp, linear")),
    (("--encoder", "resnet18"), ("encoder=resnet18", "(channels, height, width)")),
    (("--parties", "clouds"), ("parties='clouds'", "in-process, processes")),
]


@pytest.mark.parametrize(("options", "words"), BAD_NUMBERS, ids=lambda value: " ".join(value))
def test_a_bad_option_is_refused_by_name_and_leaves_nothing(options, words, cli, tmp_path):
    write_table(tmp_path / "people.csv")
    before = tree(tmp_path)
    done = cli("train", "--data", "people.csv", *TABLE, *QUICK, *options)
    assert done.code == 2
    for word in words:
        assert "".join(word.split()) in done.words
    assert tree(tmp_path) == before


def column_of_nan(header: list, rows: list) -> None:
    del header
    rows[3][1] = "NaN"


def infinity(header: list, rows: list) -> None:
    del header
    rows[7][0] = "inf"


def no_label(header: list, rows: list) -> None:
    del header
    rows[5][4] = ""


def one_class(header: list, rows: list) -> None:
    del header
    for row in rows:
        row[4] = "same"


BAD_TABLES = [
    (None, "churn", "bank=income,debt;shop=visits,income", ("column='income'", "twice")),
    (None, "churn", "bank=income,income;shop=visits", ("column='income'", "twice")),
    (None, "churn", "bank=income,depth;shop=visits", ("depth", "debt")),
    (None, "churned", "bank=income,debt;shop=visits", ("churned", "churn")),
    (None, "debt", "bank=income,debt;shop=visits", ("label='debt'", "party='bank'")),
    (None, "churn", "bank=income,debt;shop=", ("party='shop'", "no columns")),
    (None, "churn", "bank=income,debt", ("1 party", "at least 2")),
    (None, "churn", "bank:income,debt", ("bank:income,debt", "party=column")),
    (column_of_nan, "churn", "bank=income,debt;shop=visits", ("debt",)),
    (infinity, "churn", "bank=income,debt;shop=visits", ("income",)),
    (no_label, "churn", "bank=income,debt;shop=visits", ("churn",)),
    (one_class, "churn", "bank=income,debt;shop=visits", ("label='churn'", "'same'", "at least 2 classes")),
]


@pytest.mark.parametrize(("spoil", "label", "columns", "words"), BAD_TABLES)
def test_a_table_that_cannot_be_used_is_refused_by_name_and_leaves_nothing(spoil, label, columns, words, cli, tmp_path):
    write_table(tmp_path / "people.csv", spoil=spoil)
    before = tree(tmp_path)
    done = cli("train", "--data", "people.csv", "--label", label, "--columns", columns, *QUICK)
    assert done.code == 2
    for word in words:
        assert "".join(word.split()) in done.words
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("digitz",), ("digitz", "digits, phishing, activity")),
        ((), ("DATASET", "--data")),
        (("digits", "--data", "people.csv"), ("DATASET", "--data")),
        (("digits", "--label", "churn"), ("--label", "--data")),
        (("--data", "people.csv", "--columns", "a=b;c=d"), ("--label",)),
        (("--data", "people.csv", "--label", "churn"), ("--columns",)),
        (("--data", "nobody.csv", *TABLE), ("nobody.csv", "does not exist")),
        (("--data", "people.csv", *TABLE, "--schema", "none.json"), ("none.json", "cannot be read")),
        (("digits", "--num-parties", "1"), ("num_parties=1", "at least 2")),
        (("digits", "--num-parties", "100"), ("num_parties=100", "64")),
        (("digits", "--plan", "none.json"), ("none.json", "cannot be read")),
        (("digits", "--plan", "people.csv"), ("people.csv", "cannot be read")),
        (("digits", "--resume", "nowhere"), ("nowhere", "not a run folder")),
        (("--resume", "."), ("'.'", "not a run folder", "plan.json")),
        (("digits", "--out", "people.csv"), ("people.csv", "exists already")),
        (("digits", "--root", "nowhere"), ("nowhere", "not a folder")),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_what_does_not_say_which_data_is_refused_and_leaves_nothing(arguments, words, cli, tmp_path):
    write_table(tmp_path / "people.csv")
    before = tree(tmp_path)
    done = cli("train", *arguments)
    assert done.code == 2
    for word in words:
        assert "".join(word.split()) in done.words
    assert tree(tmp_path) == before


@pytest.mark.parametrize("content", [None, "notes.txt"])
def test_an_existing_folder_is_refused_and_unchanged(content, cli, tmp_path):
    write_table(tmp_path / "people.csv")
    (tmp_path / "mine").mkdir()
    if content is not None:
        (tmp_path / "mine" / content).write_text("keep me")
    before = tree(tmp_path)
    done = cli("train", "--data", "people.csv", *TABLE, *QUICK, "--out", "mine")
    assert done.code == 2
    assert "out='mine'existsalready" in done.words
    assert tree(tmp_path) == before


def test_a_plan_made_for_other_data_is_refused_and_leaves_nothing(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    (tmp_path / "plan.json").write_text(Plan.of(num_parties=2, num_samples=47, num_classes=2).to_json())
    before = tree(tmp_path)
    done = cli("train", "--data", "people.csv", *TABLE, "--plan", "plan.json")
    assert done.code == 2
    assert "num_samples=47,thedatahas48" in done.words
    assert tree(tmp_path) == before


def test_a_plan_that_cannot_be_trained_leaves_nothing(cli, tmp_path):
    """Batch statistics and noisy updates exclude each other, and so do an encoder for pictures and a table."""
    write_table(tmp_path / "people.csv")
    before = tree(tmp_path)
    for options, words in (
        (("--encoder", "resnet18-batchnorm", "--noise-multiplier", 2), "noise_multiplier=2"),
        (("--encoder", "resnet18"), "needspictures"),
    ):
        done = cli("train", "--data", "people.csv", *TABLE, *options)
        assert done.code == 2
        assert words in done.words
    assert tree(tmp_path) == before


def test_a_plan_with_noisy_updates_is_trained(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    plan = Plan.of(num_parties=2, num_samples=48, num_classes=2, noise_multiplier=2.0, num_epochs=1)
    (tmp_path / "plan.json").write_text(plan.to_json())
    done = cli("train", "--data", "people.csv", *TABLE, "--plan", "plan.json", "--json")
    assert done.code == 0
    (uses,) = json.loads(done.out)["row_uses"].values()
    assert uses == {"releases": 1, "updates": 1, "total_releases": 48}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--num-trials", 5), ("num_trials=4", "num_trials=5")),
        (("--beta", 0.2), ("beta=0.25", "beta=0.2")),
        (("--num-epochs", 3), ("num_epochs=2", "num_epochs=3")),
        (("--seed", 1), ("seed=0", "seed=1")),
        (("--num-parties", 3), ("num_parties=2", "num_parties=3")),
        (("--out", "other"), ("--out other", "--resume run")),
        (("digits",), ("dataset=None", "digits")),
        (("--data", "more.csv"), ("people.csv", "more.csv")),
        (("--num-trials", 0), ("num_trials=0", "at least 1")),
        (("--plan", "plan.json"), ("num_trials=4", "num_trials=5")),
        (("--label", "job"), ("churn", "job")),
        (("--columns", "bank=income;shop=visits"), ("debt",)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_run_is_not_resumed_with_another_plan_or_other_data(options, words, cli, tmp_path):
    write_table(tmp_path / "people.csv")
    write_table(tmp_path / "more.csv", num_rows=70)
    assert cli("train", "--data", "people.csv", *TABLE, *QUICK, "--out", "run", "--json").code == 0
    trained = Plan.from_json((tmp_path / "run/plan.json").read_text())
    (tmp_path / "plan.json").write_text(trained.replace(num_trials=5).to_json())
    (tmp_path / "run/result.json").unlink()  # as if it had been killed at its very end
    before = tree(tmp_path)
    done = cli("train", "--resume", "run", *options)
    assert done.code == 2
    for word in words:
        assert "".join(word.split()) in done.words
    assert tree(tmp_path) == before


def test_the_same_options_may_be_given_again_with_resume(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    command = ("train", "--data", "people.csv", *TABLE, *QUICK)
    first = cli(*command, "--out", "run", "--json")
    again = cli(*command, "--resume", "run", "--json")
    assert again.code == 0, again.err
    assert again.out == first.out


# --- exit codes of a real process ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "digits", "--beta", "0.5"), "beta=0.5 must be in [1/128, 63/128]"),
        (("train", "digitz"), "Did you mean digits?"),
    ],
)
def test_bad_input_ends_a_process_with_code_2_a_message_and_no_traceback(arguments, words, in_a_process, tmp_path):
    done = in_a_process(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert words in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_a_message_is_not_broken_into_lines_where_no_terminal_shows_it(cli):
    assert cli("train", "digits", "--resume", "a-folder-" * 12).err.count("\n") == 1


def test_names_in_brackets_are_names_and_a_pipe_gets_a_line_an_epoch(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    done = cli("train", "--data", "people.csv", *TABLE, *QUICK, "--num-epochs", 3, "--out", "run [jan][/x]", "-v")
    assert done.code == 0
    assert "are in run [jan][/x]" in done.out
    assert [line.split(" after")[0] for line in done.out.splitlines() if line.startswith("epoch ")] == [
        f"epoch {number} of 3" for number in (1, 2, 3)
    ]


def test_a_run_is_not_continued_on_changed_values(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    assert cli("train", "--data", "people.csv", *TABLE, *QUICK, "--num-epochs", 1, "--out", "run").code == 0
    assert not {"fingerprint", "sha256"} & json.loads((tmp_path / "run/data.json").read_text()).keys()
    before = (tmp_path / "people.csv").read_bytes()
    (tmp_path / "run/result.json").unlink()  # as if it had not ended
    os.utime(tmp_path / "people.csv", ns=(1, 1))
    again = cli("train", "--resume", "run", "--verbose")
    assert again.code == 0
    assert "people.csvwaswrittentosincetherunbegan" in "".join(again.out.split())
    (tmp_path / "people.csv").write_bytes(before + before.splitlines()[-1] + b"\n")
    done = cli("train", "--resume", "run")
    assert done.code == 2
    assert "arunonothervalues" in done.words


def test_ledgers_count_by_the_owners_name_for_the_people(cli, tmp_path):
    write_table(tmp_path / "people.csv")
    options = (*TABLE, *QUICK, "--num-epochs", 1, "--ledger", "books", "--dataset-name", "customers")
    assert cli("train", "--data", "people.csv", *options, "--out", "first").code == 0
    (tmp_path / "copy.csv").write_bytes((tmp_path / "people.csv").read_bytes())
    assert cli("train", "--data", "copy.csv", *options, "--out", "second").code == 0
    ledger = Ledger(tmp_path / "books" / "bank.sqlite")
    assert ledger.datasets() == ["customers"]
    assert len(ledger.sessions("customers")) == 2
    assert cli("train", "digits", "--dataset-name", "x").code == 2
