"""Which orders a site takes, in whose words it refuses others, and what it writes down when it takes one up."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pbmvfl.deploy.job.admission import MODEL_INDEX, PRIVATE_REASON, accept_job, admit, own_row_ids
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec, Work
from pbmvfl.deploy.site.policy_file import PolicyFile, own_ledger
from pbmvfl.errors import FederationError, OrderError, PolicyError
from pbmvfl.federation.model_files import INDEX, WEIGHTS_FILE, model_digest
from pbmvfl.federation.serving import release_for, serving_plan
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.plan import Plan
from support.ledger_books import charge_all, opening
from support.policy_homes import (
    PARTY_POLICY,
    RUN_ID,
    SERVER_POLICY,
    align_order,
    joint_plan,
    make_alignment,
    make_home,
    modules_after_admission,
    small_plan,
    train_order,
    write_policy,
)

NOON = datetime.fromisoformat("2026-03-02 12:00:00+01:00")


@pytest.fixture
def home(tmp_path: Path) -> SiteFolder:
    return ready(tmp_path, "bank")


@pytest.fixture
def server(tmp_path: Path) -> SiteFolder:
    return ready(tmp_path, "clinic")


def ready(folder: Path, name: str) -> SiteFolder:
    """A site that has the rows of an alignment."""
    home = make_home(folder, name)
    home.alignment("first").mkdir(parents=True)
    return home


def refused(home: SiteFolder, order: JobSpec, now: datetime = NOON, **options: Any) -> str:
    with pytest.raises((PolicyError, OrderError)) as error:
        admit(home, order, now, **options)
    said = str(error.value)
    assert str(home.path) not in said
    return said


def with_rules(home: SiteFolder, rules: str) -> None:
    write_policy(home.path, PARTY_POLICY + rules)


def first_rows(count: int = 100) -> Callable[[SiteFolder, JobSpec], tuple[list[str], list[str]]]:
    return lambda _, order: (
        [f"person-{number}" for number in range(count)],
        [f"asked-{number}" for number in range(0 if order.plan is None else order.plan.num_test_samples)],
    )


# --- what is taken ---


@pytest.mark.parametrize("name", ["bank", "shop", "insurer", "clinic"])
def test_an_order_of_the_federation_is_taken_at_every_site(tmp_path: Path, name: str) -> None:
    home = make_home(tmp_path, name)
    admit(home, align_order(), NOON)
    home.alignment("first").mkdir(parents=True)
    admit(home, train_order(), NOON)


def test_admitting_an_order_leaves_no_trace_of_it_but_limits_are_in_the_book(home: SiteFolder) -> None:
    before = sorted(path.name for path in home.path.iterdir())
    admit(home, train_order(), NOON)
    after = {path.name for path in home.path.iterdir() if not path.name.startswith("ledger.sqlite")}
    assert after == set(before)
    with contextlib.closing(Ledger(home.ledger, read_only=True)) as book:
        assert [each.epsilon for each in book.limits("people")] == [8.0]
        assert book.sessions("people") == []


# --- what the label holder takes ---


def test_a_label_holder_takes_what_its_policy_permits_of_labels_and_no_more(server: SiteFolder) -> None:
    for make in (small_plan, joint_plan):
        admit(server, train_order(make()), NOON)
        assert "label_epsilon=5: the policy permits 4 or less" in refused(server, train_order(make(label_epsilon=5.0)))
        clear = train_order(make(label_epsilon=None))
        assert "no training labels in clear" in refused(server, clear)
        write_policy(server.path, SERVER_POLICY + "[plan]\nlabels_in_clear = true\n")
        admit(server, clear, NOON)
        write_policy(server.path, SERVER_POLICY)


def test_a_label_holder_has_the_limits_of_its_policy_in_its_own_ledger(server: SiteFolder) -> None:
    write_policy(server.path, SERVER_POLICY + "[[limit]]\nepsilon = 8\ndelta = 1e-5\n")
    admit(server, train_order(small_plan()), NOON)
    with contextlib.closing(Ledger(server.ledger, read_only=True)) as ledger:
        assert ledger.owner == "clinic"
        assert [(each.unit, each.epsilon) for each in ledger.limits("labels")] == [("label", 8.0)]
    write_policy(server.path, SERVER_POLICY + "[[limit]]\nepsilon = 9\ndelta = 1e-5\n")
    # It is looser than the ledger's, which is nobody else's affair.
    assert refused(server, train_order(small_plan())) == PRIVATE_REASON


# --- what is refused everywhere ---


def test_an_order_of_another_federation_is_refused(home: SiteFolder, server: SiteFolder) -> None:
    for each in (home, server):
        for order in (align_order(federation="others"), train_order(federation="others")):
            assert refused(each, order) == "federation=others: this site is of federation people"


@pytest.mark.parametrize("parties", [2, 4])
def test_a_plan_for_another_number_of_parties_is_refused(home: SiteFolder, server: SiteFolder, parties: int) -> None:
    """With more, the server could play a party of its own; with fewer, one of the named is not asked."""
    for each in (home, server):
        said = refused(each, train_order(small_plan(num_parties=parties)))
        assert f"num_parties={parties}: federation people has 3 parties" in said


def test_exact_sums_are_refused_at_every_site_whatever_a_policy_says(home: SiteFolder, server: SiteFolder) -> None:
    for each in (home, server):
        for plan in (small_plan(evaluation="simulator"), joint_plan(evaluation="simulator")):
            assert "evaluation=simulator: nobody sees exact sums" in refused(each, train_order(plan))


@pytest.mark.parametrize("name", ["../other", "a/b", ".", "..", "", "A", "-x", "x" * 61, "x\n", "x\0y", "ü", "C:x"])
def test_names_that_are_paths_never_become_an_order(name: str) -> None:
    for field in ("alignment", "run", "federation"):
        with pytest.raises(FederationError):
            train_order(None, **{field: name})
    text = train_order().to_text().replace('"monday"', json.dumps(name))
    with pytest.raises(OrderError):
        JobSpec.from_text(text)


def test_rows_that_are_not_aligned_are_not_trained_on(home: SiteFolder) -> None:
    assert "alignment=second: this site has no such rows" in refused(home, train_order(alignment="second"))
    (home.path / "alignments" / "third").write_text("no folder")
    assert "this site has no such rows" in refused(home, train_order(alignment="third"))


# --- what a party's policy refuses ---


def test_the_plan_is_held_against_the_policy(home: SiteFolder) -> None:
    with_rules(home, '[plan]\nmechanisms = ["pbm"]\nlargest_epsilon = 0.1\n')
    assert "the policy permits 0.1 or less" in refused(home, train_order())
    assert "mechanism=none: the policy permits pbm" in refused(home, train_order(joint_plan(mechanism="none")))
    with_rules(home, "[plan]\nsmallest_num_parties = 4\n")
    assert "num_parties=3: the policy permits 4 or more" in refused(home, train_order())


def test_hours_are_those_of_the_clock_that_was_passed_in(home: SiteFolder) -> None:
    with_rules(home, '[runs]\nhours = "07:00-19:00"\n')
    admit(home, train_order(), NOON)
    for clock in ("06:59", "19:00", "23:59"):
        late = datetime.fromisoformat(f"2026-03-02 {clock}:00+01:00")
        for order in (train_order(), align_order()):
            said = refused(home, order, late)
            assert said == f"time={clock} at this site: the policy permits 07:00-19:00; submit it then"


def test_sessions_of_a_run_are_counted_by_the_book_and_by_what_was_taken_up(home: SiteFolder) -> None:
    with_rules(home, "[runs]\nsessions = 2\n")
    accept_job(home, train_order(), NOON)
    accept_job(home, train_order(), NOON)
    assert "begun 2 times: the policy permits 2 sessions" in refused(home, train_order())
    with pytest.raises(PolicyError, match="permits 2 sessions"):
        accept_job(home, train_order(), NOON)
    admit(home, train_order(run="tuesday", run_id="f" * 16), NOON)
    # A run folder that was removed does not begin the count anew.
    (home.run("monday") / "bound.json").unlink()
    for number in range(2):
        with own_ledger(home, PolicyFile.read(home)) as book:
            book.open_session(
                opening(dataset="people", plan=small_plan(), run=RUN_ID, session=f"{number:016x}")
            ).close()
    assert "has had 2 sessions: the policy permits 2" in refused(home, train_order())


def test_alignments_are_counted_when_they_are_taken_up_whatever_they_are_called(home: SiteFolder) -> None:
    """Each tells the label holder which of the ids that it names are here: with enough of them it would know all."""
    with_rules(home, "[runs]\nalignments = 2\n")
    for _ in range(3):
        admit(home, align_order(), NOON)  # looking costs nothing
    accept_job(home, align_order(), NOON)
    accept_job(home, align_order(), NOON)
    for name in ("first", "second"):
        said = refused(home, align_order(alignment=name))
        assert said == "alignments=2 were made here: the policy permits 2; use one that is there"
    with_rules(home, "[runs]\nalignments = 0\n")
    assert "permits 0" in refused(home, align_order())


def test_rows_that_a_run_stands_on_are_not_aligned_anew(home: SiteFolder) -> None:
    """It would go on with other rows, and nobody would see it."""
    admit(home, align_order(), NOON)
    accept_job(home, train_order(), NOON)
    admit(home, align_order(), NOON)  # no ledger knows of a release
    with own_ledger(home, PolicyFile.read(home)) as book:
        book.open_session(opening(dataset="people", plan=small_plan(), run=RUN_ID, session="0" * 16)).close()
    said = refused(home, align_order())
    assert said == (
        "alignment=first: run=monday was begun here with these rows; align under another name: `pbmvfl align first-2`"
    )
    home.alignment("first-2").mkdir()
    assert refused(home, align_order()).endswith("`pbmvfl align first-3`")
    admit(home, align_order(alignment="second"), NOON)


# --- runs and their names ---


def test_a_run_s_name_stands_for_one_number_one_plan_and_one_order_of_rows(home: SiteFolder) -> None:
    home.alignment("second").mkdir()
    admit(home, train_order(run_id="f" * 16), NOON)  # nobody has taken it up yet
    accept_job(home, train_order(), NOON)
    admit(home, train_order(), NOON)
    said = refused(home, train_order(run_id="f" * 16))
    assert said.startswith(f"run=monday, run_id=ffffffffffffffff: here that name stands for run_id={RUN_ID}")
    assert "begun with another plan" in refused(home, train_order(small_plan(num_epochs=4)))
    assert "begun with another alignment" in refused(home, train_order(alignment="second"))
    for changed in (train_order(run_id="f" * 16), train_order(small_plan(seed=1))):
        with pytest.raises(OrderError):
            accept_job(home, changed, NOON)
    admit(home, train_order(), NOON)


def test_what_was_taken_up_is_written_for_the_owner_alone(home: SiteFolder) -> None:
    accept_job(home, train_order(), NOON)
    accept_job(home, align_order(alignment="second"), NOON)
    for path in (home.run("monday") / "bound.json", home.path / "alignments.json"):
        assert os.stat(path).st_mode & 0o077 == 0
    said = json.loads((home.run("monday") / "bound.json").read_text())
    assert said == {"alignment": "first", "plan": small_plan().hash.hex(), "run_id": RUN_ID, "taken_up": 1}


def test_a_damaged_record_of_a_run_is_refused_and_not_begun_anew(
    home: SiteFolder, caplog: pytest.LogCaptureFixture
) -> None:
    accept_job(home, train_order(), NOON)
    for damage in ("", "{}", "[]", '{"run_id": 1}', "\xff"):
        (home.run("monday") / "bound.json").write_text(damage)
        assert refused(home, train_order()) == PRIVATE_REASON
    assert "bound.json" in caplog.text


def test_sites_that_take_up_at_the_same_moment_are_all_counted(home: SiteFolder) -> None:
    """Eight threads, each with a file of its own, as processes have; the label holder may submit jobs at once."""
    with_rules(home, "[runs]\nalignments = 5\n")
    start, taken = threading.Barrier(8), []

    def take() -> None:
        start.wait()
        with contextlib.suppress(PolicyError):
            accept_job(home, align_order(), NOON)
            taken.append(True)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(taken) == 5
    assert json.loads((home.path / "alignments.json").read_text()) == {"made": 5}


# --- predictions ---


def asking(home: SiteFolder, *, digest: str | None = None, **changes: Any) -> JobSpec:
    """An order that asks the model of the run `monday`, whose part this site has; its training was noisy."""
    training = small_plan()
    model = model_digest(training, bytes.fromhex(RUN_ID))
    folder = home.model("monday")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"model": model}))
    save_file({"run.public_start": np.ones(1, np.uint8)}, folder / WEIGHTS_FILE)
    release = release_for(training, epsilon=4.0, delta=1e-5, has_fusion=False)
    plan = serving_plan(training, model=digest or model, num_rows=10, release=release)
    return train_order(plan, work=Work.PREDICT, **changes)


def test_a_model_that_this_site_has_trained_is_asked(home: SiteFolder) -> None:
    order = asking(home)
    assert "run=monday: this site has trained no such run" in refused(home, order)
    accept_job(home, train_order(), NOON)
    admit(home, order, NOON)
    with_rules(home, '[plan]\nsmallest_noise = 3\n[plan.fields]\ntraining = ["local"]\nnum_epochs = {least = 2}\n')
    admit(home, order, NOON)  # what is about training says nothing to a question


def test_a_model_that_is_another_or_not_here_is_not_asked(home: SiteFolder) -> None:
    accept_job(home, train_order(), NOON)
    assert "about another model" in refused(home, asking(home, digest=hashlib.sha256(b"other").hexdigest()))
    assert "here that name stands for" in refused(home, asking(home, run_id="f" * 16))
    order = asking(home)
    (home.model("monday") / INDEX).unlink()
    assert "run=monday: this site has no part of its model" in refused(home, order)
    assert MODEL_INDEX == INDEX


# --- limits ---


def test_a_run_that_a_limit_would_end_is_refused_beforehand_unless_the_owner_says_otherwise(
    home: SiteFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """100 rows, 3 passes, noise 20: epsilon is far below 8. Noise 0.5 is far above it."""
    loud, quiet = train_order(), train_order(small_plan(noise_multiplier=0.5))
    admit(home, loud, NOON, row_ids=first_rows())
    said = refused(home, quiet, row_ids=first_rows())
    assert said.startswith("run=monday: a limit of this site would end it before its plan does")
    assert not any(figure in said for figure in ("epsilon", "8", "people"))
    assert "owner's limit" in caplog.text  # with the figures
    with_rules(home, "[runs]\nuntil_limit = true\n")
    admit(home, quiet, NOON, row_ids=first_rows())


def test_what_rows_have_spent_before_counts_and_other_rows_have_their_own(home: SiteFolder) -> None:
    """One run of noise 2.3 costs most of epsilon 8; a second on the same rows does not fit, on others it does."""
    plan = small_plan(noise_multiplier=2.3)
    order = train_order(plan)
    admit(home, order, NOON, row_ids=first_rows())
    ids = first_rows()(home, order)[0]
    with own_ledger(home, PolicyFile.read(home)) as book:
        assert charge_all(book, plan, run="a" * 16, session="b" * 16, train_ids=ids) == len(plan.schedule)
    assert "a limit of this site would end it" in refused(home, order, row_ids=first_rows())
    admit(home, order, NOON, row_ids=lambda *_: ([f"other-{number}" for number in range(100)], []))


def test_rows_that_are_asked_about_are_looked_at_by_their_own_ids(home: SiteFolder) -> None:
    """A prediction of epsilon 4 fits in 8 twice, whatever training has spent on other rows; a third does not."""
    accept_job(home, train_order(), NOON)
    order = asking(home)
    make_alignment(home, "asked", count=10)
    order = replace(order, alignment="asked")
    assert order.plan is not None
    plan, ids = order.plan, [f"person-{number}" for number in range(10)]
    for number in range(2):
        admit(home, order, NOON, row_ids=own_row_ids)
        with own_ledger(home, PolicyFile.read(home)) as book:
            assert charge_all(book, plan, run=f"{number:016x}", session="", test_ids=ids) == len(plan.schedule)
    assert "a limit of this site would end it" in refused(home, order, row_ids=own_row_ids)
    admit(home, order, NOON, row_ids=lambda *_: (None, [f"other-{number}" for number in range(10)]))
    (home.model("monday") / "answers").mkdir()  # with answers that can be given again for nothing, nobody foresees it
    admit(home, order, NOON, row_ids=own_row_ids)


def test_a_file_that_permits_more_than_the_book_stops_every_order(
    home: SiteFolder, caplog: pytest.LogCaptureFixture
) -> None:
    admit(home, train_order(), NOON)
    write_policy(home.path, PARTY_POLICY.replace("epsilon = 8", "epsilon = 80"))
    for order in (train_order(), align_order()):
        assert refused(home, order) == PRIVATE_REASON
    assert "looser than the ledger's" in caplog.text


# --- what is private ---


@pytest.mark.parametrize(
    "damage",
    [
        lambda home: home.policy.unlink(),
        lambda home: home.policy.chmod(0o666),
        lambda home: write_policy(home.path, "[data]\nfile = 'secret-place.csv'"),
        lambda home: home.ledger.write_bytes(b"no database" * 1000),
        lambda home: home.ledger.mkdir(),
    ],
)
def test_what_is_wrong_at_home_is_said_at_home_alone(
    home: SiteFolder, damage: Callable[[SiteFolder], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(home)
    with caplog.at_level(logging.ERROR):
        assert refused(home, train_order()) == PRIVATE_REASON
    assert str(home.path) in caplog.text


def test_looking_at_an_order_needs_no_torch(tmp_path: Path, home: SiteFolder) -> None:
    """It happens in the process that is there all the time; torch would make it four times as large."""
    home.alignment("first").rmdir()
    make_alignment(home)
    heavy = ["torch", "numba", "nvflare", "private_set_intersection"]
    assert modules_after_admission(home, train_order(), heavy, tmp_path) == "[]"


def test_a_plan_that_would_take_for_ever_to_count_is_answered_all_the_same(home: SiteFolder) -> None:
    """Ten million passes over the rows: nothing is gone through round by round."""
    with_rules(home, "[plan]\nlargest_epsilon = 8\n")
    endless: Plan = small_plan(num_epochs=10_000_000)
    assert "or less in one plan" in refused(home, train_order(endless), row_ids=first_rows())
    with_rules(home, "")
    admit(home, train_order(endless), NOON, row_ids=first_rows())
