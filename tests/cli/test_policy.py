"""`pbmvfl policy`: a file to start from, and what is said about one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pbmvfl.cli import app
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.policy_file import PolicyFile, own_ledger
from pbmvfl.deploy.site.policy_text import policy_template
from pbmvfl.errors import FederationError, PolicyFileError
from support.policy_homes import PARTY_POLICY, make_home, small_plan, write_policy


@pytest.fixture
def home(tmp_path: Path) -> SiteFolder:
    home = make_home(tmp_path)
    (home.path / "rows.csv").write_text("person,age,job\np1,40,2\n")
    return home


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["policy", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def fails(*arguments: str) -> Exception:
    done = CliRunner().invoke(app, ["policy", *arguments])
    assert isinstance(done.exception, FederationError | PolicyFileError)
    return done.exception


# --- template ---


@pytest.mark.parametrize("name", ["bank", "clinic"])
def test_a_template_is_private_accepted_as_it_is_and_never_written_over(tmp_path: Path, name: str) -> None:
    home = make_home(tmp_path, name)
    home.policy.unlink()
    run("template", "--home", str(home.path), "--file", "mine.csv", "--id", 'a "b"')
    assert os.stat(home.policy).st_mode & 0o777 == 0o600
    found = PolicyFile.read(home)
    assert (found.data.file.name, found.data.id, found.notes) == ("mine.csv", 'a "b"', ())
    before = home.policy.read_bytes()
    assert "is there already" in str(fails("template", "--home", str(home.path)))
    assert home.policy.read_bytes() == before


def test_what_a_template_has_commented_out_is_accepted_too() -> None:
    """A comment that names something which the program does not know, or explains another range, is found here."""
    said = {"home": ".", "num_parties": 3, "file": "a.csv", "id": "id", "dataset": "people", "label": "sick"}
    for is_server, name in ((False, "bank"), (True, "clinic")):
        text = policy_template(is_server=is_server, name=name, **said)
        lines = [re.sub(r"^# (?=(\[|[a-z_]+ = ))", "", line) for line in text.splitlines()]
        assert sum(line.startswith("# ") for line in lines) < 6
        found = PolicyFile.parse("\n".join(lines), path=Path("policy.toml"), is_server=is_server)
        assert found.metrics_port == 9108
        assert str(found.runs.hours) == "07:00-19:00"
        assert is_server or (found.encoder == "package.module:function" and found.runs.until_limit)
        assert all(len(line) <= 120 for line in text.splitlines())


def test_a_template_that_is_only_shown_is_not_written(home: SiteFolder) -> None:
    before = home.policy.read_bytes()
    assert "[[limit]]" in run("template", "--home", str(home.path), "--show")
    assert home.policy.read_bytes() == before


# --- check ---


def test_check_says_what_is_accepted_and_writes_nothing(home: SiteFolder) -> None:
    before = sorted(each.name for each in home.path.iterdir())
    said = run("check", "--home", str(home.path))
    for words in (
        "bank, party",
        "2 columns: age, job",
        "epsilon 8 at delta 1e-05, will be in the ledger",
        "no exact sums",
    ):
        assert words in said
    assert sorted(each.name for each in home.path.iterdir()) == before


def test_check_names_a_column_that_the_file_has_not(home: SiteFolder) -> None:
    write_policy(home.path, PARTY_POLICY.replace('id = "person"', 'id = "persn"'))
    error = fails("check", "--home", str(home.path))
    assert "column='persn' is not in rows.csv (did you mean 'person'?)" in str(error)
    said = json.loads(run("check", "--home", str(home.path), "--json", code=2))
    assert said["fine"] is False
    assert "persn" in said["faults"][0]


def test_check_names_a_file_that_is_not_there(home: SiteFolder) -> None:
    (home.path / "rows.csv").unlink()
    assert "does not exist" in str(fails("check", "--home", str(home.path)))


def test_check_compares_limits_with_the_book(home: SiteFolder) -> None:
    with own_ledger(home, PolicyFile.read(home)):
        pass
    for epsilon, words in (
        ("8", "as in the ledger"),
        ("5", "will be lowered from epsilon 8 at delta 1e-05"),
        ("9", "LOOSER than the ledger's epsilon 8 at delta 1e-05: every order is refused"),
    ):
        write_policy(home.path, PARTY_POLICY.replace("epsilon = 8", f"epsilon = {epsilon}"))
        said = json.loads(run("check", "--home", str(home.path), "--json"))
        assert words in said["limits"][0]


def test_check_notes_what_protects_nobody(home: SiteFolder) -> None:
    weak = PARTY_POLICY.replace("epsilon = 8", 'epsilon = 100\naccounting = "paper"')
    write_policy(home.path, weak + '[encoder]\nown = "surely_not_installed.here:network"\n')
    os.chmod(home.policy, 0o644)
    said = json.loads(run("check", "--home", str(home.path), "--json"))["notes"]
    for words in ("may be read by everybody", "no limit is strict", "protects nobody", "has no such package"):
        assert any(words in note for note in said), words


def test_check_notes_rows_that_are_said_to_be_nobody_s(home: SiteFolder) -> None:
    write_policy(home.path, PARTY_POLICY.partition("[[limit]]")[0] + "made_up = true\n")
    said = json.loads(run("check", "--home", str(home.path), "--json"))
    assert said["limits"] == []
    assert any("the owner declares" in note for note in said["notes"])
    write_policy(home.path, PARTY_POLICY.partition("[[limit]]")[0] + "made_up = false\n")
    assert "has no [[limit]]" in str(fails("check", "--home", str(home.path)))


def test_check_says_whether_a_plan_would_be_accepted(home: SiteFolder, tmp_path: Path) -> None:
    write_policy(home.path, PARTY_POLICY + "[plan]\nlargest_epsilon = 8\n")
    file = tmp_path / "plan.json"
    for plan, code, words in (
        (small_plan(), 0, "this plan would be accepted"),
        (small_plan(noise_multiplier=1.0), 1, "or less in one plan"),
        (small_plan(num_parties=4), 1, "federation people has 3 parties"),
        (small_plan(evaluation="simulator"), 1, "evaluation=simulator"),
    ):
        file.write_text(plan.to_json())
        assert words in run("check", "--home", str(home.path), "--plan", str(file), code=code)
