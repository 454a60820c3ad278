"""policy.toml: what is read, what is refused with which words, and what comes of its limits in the owner's book."""

from __future__ import annotations

import contextlib
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pbmvfl.deploy.site.policy_file import Hours, PolicyFile, own_ledger
from pbmvfl.errors import FederationError, PlanError, PolicyError, PolicyFileError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Counting, Limit
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan.policy import Permitted, Policy
from support.policy_homes import PARTY_POLICY, SERVER_POLICY, joint_plan, make_home, small_plan, write_policy

FULL = """
[data]
file = "rows.parquet"
id = "person"
columns = ["age", "job"]
schema = "schema.json"
dataset = "people"
version = "2026-02"
[encoder]
own = "bank_models.small:network"
[[limit]]
epsilon = 8
delta = 1e-6
[[limit]]
epsilon = 20
delta = 1e-6
unit = "record"
accounting = "strict"
counting = "renyi"
[plan]
smallest_num_parties = 3
mechanisms = ["pbm", "krr"]
needs_secure_aggregation = true
largest_epsilon = 8
unit = "cell"
delta = 1e-6
smallest_noise = 2.5
[plan.fields]
training = ["local"]
num_epochs = {most = 200}
[runs]
sessions = 7
hours = "07:00-19:30"
alignments = 3
largest_alignment = 50_000
smallest_alignment = 100
until_limit = true
[watch]
metrics_port = 9100
"""


def parse(text: str, *, is_server: bool = False) -> PolicyFile:
    return PolicyFile.parse(text, path=Path("/home/bank/policy.toml"), is_server=is_server)


# --- what is read ---


def test_every_name_of_the_file_is_read() -> None:
    found = parse(FULL)
    assert found.data.file == Path("/home/bank/rows.parquet")
    assert found.data.schema == Path("/home/bank/schema.json")
    assert (found.data.id, found.data.columns, found.dataset) == ("person", ("age", "job"), "people")
    assert found.data.version == "2026-02"
    assert found.encoder == "bank_models.small:network"
    assert [(str(each.unit), each.epsilon, each.counting) for each in found.limits] == [
        ("cell", 8.0, Counting.GAUSSIAN),
        ("record", 20.0, Counting.RENYI),
    ]
    policy = found.policy()
    assert policy.mechanisms == frozenset({"pbm", "krr"})
    assert (policy.smallest_num_parties, policy.needs_secure_aggregation) == (3, True)
    assert (policy.largest_epsilon, policy.delta, policy.smallest_noise) == (8, 1e-6, 2.5)
    assert policy.fields["num_epochs"] == Permitted(most=200)
    runs = found.runs
    assert (runs.sessions, str(runs.hours), runs.alignments) == (7, "07:00-19:30", 3)
    assert (runs.largest_alignment, runs.smallest_alignment, runs.until_limit) == (50_000, 100, True)
    assert found.metrics_port == 9100


def test_a_short_file_permits_no_exact_metrics_and_has_careful_defaults() -> None:
    found = parse(PARTY_POLICY)
    assert not found.policy().allows_exact_metrics
    assert (found.runs.sessions, found.runs.hours, found.runs.until_limit) == (100, None, False)
    assert (found.encoder, found.metrics_port, found.data.columns) == (None, None, None)
    assert found.data.version == ""


def test_the_label_holder_has_a_label_and_may_have_a_limit() -> None:
    found = parse(SERVER_POLICY, is_server=True)
    assert (found.data.label, found.data.id, found.limits) == ("sick", "person", ())
    assert (found.dataset, found.data.version) == ("labels", "")
    limited = parse(SERVER_POLICY + 'version = "2"\n[[limit]]\nepsilon = 8\ndelta = 1e-5\n', is_server=True)
    assert limited.data.version == "2"
    assert [(limit.unit, limit.epsilon) for limit in limited.limits] == [("label", 8.0)]


def test_a_label_holder_whose_policy_does_not_speak_of_labels_shows_none_in_clear() -> None:
    """So that a policy from before this was in it works further, and permits what is usual."""
    old = parse(SERVER_POLICY, is_server=True).policy()
    open_one = parse(
        SERVER_POLICY + "[plan]\nlabels_in_clear = true\nlargest_label_epsilon = 2", is_server=True
    ).policy()
    for make in (small_plan, joint_plan):
        old.check(make(label_epsilon=4.0))
        with pytest.raises(PolicyError, match=r"label_epsilon=4\.5: the policy permits 4 or less"):
            old.check(make(label_epsilon=4.5))
        with pytest.raises(PolicyError, match="label_epsilon=none: the policy permits no training labels in clear"):
            old.check(make(label_epsilon=None))
        open_one.check(make(label_epsilon=None))
        with pytest.raises(PolicyError, match=r"label_epsilon=4: the policy permits 2 or less"):
            open_one.check(make(label_epsilon=4.0))


def test_files_with_a_path_of_their_own_are_looked_for_there() -> None:
    assert parse(PARTY_POLICY.replace("rows.csv", "/data/rows.csv")).data.file == Path("/data/rows.csv")


# --- what is refused ---


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('id = "person"', 'ids = "person"', "[data] ids is not known; did you mean id? permitted: file, id"),
        ('dataset = "people"', "", "[data] dataset is missing"),
        ('dataset = "people"', 'dataset = "../people"', "[data] dataset ='../people'"),
        ('id = "person"', 'id = "person"\nversion = 2026', "[data] version =2026; permitted: a text of the form"),
        ('"rows.csv"', '"rows.pickle"', "permitted: a .csv or .parquet file"),
        ('"rows.csv"', "3", "[data] file =3; permitted: a text"),
        ("[data]", "[dta]", "[dta] is not known; did you mean data?"),
        ('id = "person"', 'id = "person"\ncolumns = ["age", "person"]', "columns has the id 'person'"),
        ('id = "person"', 'id = "person"\ncolumns = ["age", "age"]', "names one of them twice"),
        ('id = "person"', 'id = "person"\ncolumns = []', "permitted: a list of names"),
        ("epsilon = 8", "epsilon = inf", "epsilon=inf must be a finite number above 0"),
        ("epsilon = 8", "epsilon = nan", "must be a finite number above 0"),
        ("epsilon = 8", "epsilon = -1", "must be a finite number above 0"),
        ("epsilon = 8", "epsilon = true", "[[limit]] epsilon=True; permitted: a number above 0"),
        ("epsilon = 8", 'epsilon = "8"', "[[limit]] epsilon='8'; permitted: a number above 0"),
        ("epsilon = 8", "", "[[limit]] epsilon=None"),
        ("delta = 1e-5", "delta = 1", "delta=1; permitted: above 0 and below 1"),
        ("delta = 1e-5", 'delta = 1e-5\nunit = "row"', "permitted: unit cell, record, party"),
        ("delta = 1e-5", 'delta = 1e-5\ncounting = "none"', "permitted: gaussian, renyi"),
        ("delta = 1e-5", "delta = 1e-5\ncolluding_parties = -1", "colluding_parties=-1"),
        ("delta = 1e-5", "delta = 1e-5\n[[limit]]\nepsilon = 9\ndelta = 1e-5", "two [[limit]] are about cell, strict"),
        ("delta = 1e-5", "delta = 1e-5\n[encoder]\nown = 'os.system'", "[encoder] own ='os.system'"),
        ("delta = 1e-5", "delta = 1e-5\n[encoder]\nown = 'a:b; import os'", "[encoder] own"),
        ("delta = 1e-5", "delta = 1e-5\n[plan]\nsmallest_num_parties = 1", "whole number in 2..1000"),
        ("delta = 1e-5", "delta = 1e-5\n[plan]\nmechanisms = ['pbmm']", "did you mean pbm?"),
        ("delta = 1e-5", "delta = 1e-5\n[plan]\nneeds_secure_aggregation = 1", "permitted: true or false"),
        ("delta = 1e-5", "delta = 1e-5\n[plan]\nlargest_epsilon = 0", "largest_epsilon=0 must be a number above 0"),
        ("delta = 1e-5", "delta = 1e-5\n[plan]\nlargest_epsilon = nan", "must be a number above 0"),
        ("delta = 1e-5", "delta = 1e-5\n[plan]\nsmallest_noise = -1", "smallest_noise=-1"),
        ("delta = 1e-5", "delta = 1e-5\n[plan]\nfields = 3", "[plan.fields] is a table"),
        ("delta = 1e-5", "delta = 1e-5\n[plan.fields]\nnum_epoch = 3", "did you mean num_epochs?"),
        ("delta = 1e-5", "delta = 1e-5\n[plan.fields]\nphases = 3", "phases is no field of a plan"),
        ("delta = 1e-5", "delta = 1e-5\n[plan.fields]\nnum_epochs = {max = 3}", "numbers named least and most"),
        ("delta = 1e-5", "delta = 1e-5\n[plan.fields]\nnum_epochs = {least = 3, most = 2}", "nothing is permitted"),
        ("delta = 1e-5", "delta = 1e-5\n[plan.fields]\nnum_epochs = []", "give the permitted values"),
        ("delta = 1e-5", "delta = 1e-5\n[runs]\nhours = '7-19'", 'such as "07:00-19:00"'),
        ("delta = 1e-5", "delta = 1e-5\n[runs]\nhours = '24:00-25:00'", "hours='24:00-25:00'"),
        ("delta = 1e-5", "delta = 1e-5\n[runs]\nhours = '07:00-07:00'", "two times of the clock"),
        ("delta = 1e-5", "delta = 1e-5\n[runs]\nsessions = 0", "sessions=0; permitted: a whole number in 1.."),
        ("delta = 1e-5", "delta = 1e-5\n[runs]\nalignments = false", "alignments=False; permitted: a whole number"),
        ("delta = 1e-5", "delta = 1e-5\n[runs]\nsession = 3", "did you mean sessions?"),
        ("delta = 1e-5", "delta = 1e-5\n[watch]\nmetrics_port = 0", "metrics_port=0"),
        ("delta = 1e-5", "delta = 1e-5\n[watch]\nport = 1", "[watch] port is not known"),
        ("[data]", "[data", "is no TOML"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_permitted(before: str, after: str, words: str) -> None:
    assert before in PARTY_POLICY
    with pytest.raises(PolicyFileError) as refused:
        parse(PARTY_POLICY.replace(before, after, 1))
    assert words in str(refused.value)
    assert str(refused.value).startswith("/home/bank/policy.toml")


def test_a_party_without_a_limit_is_told_what_to_write_and_that_works() -> None:
    without = PARTY_POLICY.partition("[[limit]]")[0]
    with pytest.raises(PolicyFileError, match=r"has no .*limit") as refused:
        parse(without)
    advice = str(refused.value).partition(":\n")[2]
    assert parse(without + advice).limits == (Limit.choose(unit="cell", accounting="strict", epsilon=8, delta=1e-5),)


def test_a_label_holder_has_limits_of_labels_alone_no_encoder_and_two_columns() -> None:
    for added, words in (
        ("[[limit]]\nepsilon = 8\ndelta = 1e-5\nunit = 'cell'", "[[limit]] unit=cell; permitted here: label"),
        ("[[limit]]\nepsilon = 8", "[[limit]] delta=None"),
        ("[encoder]\nown = 'a:b'", "[encoder] is not known"),
        ("[plan]\nsmallest_num_parties = 3", "[plan] smallest_num_parties is not known"),
        ("[plan]\nlargest_label_epsilon = 0", "[plan] largest_label_epsilon: label_epsilon=0 must be in [0.01, 16]"),
        ("[plan]\nlargest_label_epsilon = 'none'", "[plan] largest_label_epsilon: label_epsilon='none'"),
        ("[plan]\nlabels_in_clear = 1", "[plan] labels_in_clear=1; permitted: true or false"),
    ):
        with pytest.raises(PolicyFileError) as refused:
            parse(SERVER_POLICY + added, is_server=True)
        assert words in str(refused.value)
    with pytest.raises(PolicyFileError, match="id and label are both"):
        parse(SERVER_POLICY.replace('"sick"', '"person"'), is_server=True)


def test_a_policy_that_others_can_write_is_refused_and_one_that_they_can_read_is_noted(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    assert PolicyFile.read(home).notes == ()
    os.chmod(home.policy, 0o644)
    assert "may be read by everybody (mode 644)" in PolicyFile.read(home).notes[0]
    for mode in (0o620, 0o602, 0o666):
        os.chmod(home.policy, mode)
        with pytest.raises(PolicyFileError, match="may be written by others"):
            PolicyFile.read(home)


def test_a_missing_a_huge_and_a_binary_policy_are_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    write_policy(home.path, PARTY_POLICY + "#" * (1 << 20))
    with pytest.raises(PolicyFileError, match="is longer than"):
        PolicyFile.read(home)
    home.policy.write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyFileError, match="cannot be read"):
        PolicyFile.read(home)
    home.policy.unlink()
    with pytest.raises(PolicyFileError, match="pbmvfl policy template"):
        PolicyFile.read(home)


def test_errors_of_a_policy_are_no_public_kind_of_error() -> None:
    """Sites say refusals of policies and federations as they are; what is in a policy file must not be among them."""
    assert not issubclass(PolicyFileError, PolicyError | FederationError | PlanError)


# --- hours ---


@pytest.mark.parametrize(
    ("hours", "clock", "permitted"),
    [
        ("07:00-19:00", "07:00", True),
        ("07:00-19:00", "18:59", True),
        ("07:00-19:00", "19:00", False),
        ("07:00-19:00", "06:59", False),
        ("22:00-06:00", "23:30", True),
        ("22:00-06:00", "05:59", True),
        ("22:00-06:00", "06:00", False),
        ("22:00-06:00", "12:00", False),
    ],
)
def test_hours_are_of_the_clock_and_may_go_over_midnight(hours: str, clock: str, permitted: bool) -> None:
    begin, end = (datetime.strptime(each, "%H:%M").time() for each in hours.split("-"))
    assert Hours(begin, end).permit(datetime.fromisoformat(f"2026-01-31 {clock}")) is permitted


# --- limits in the book ---


def held(home: Any) -> dict[tuple[str, str], tuple[float, float]]:
    with contextlib.closing(Ledger(home.ledger, read_only=True)) as book:
        return {(str(each.unit), str(each.accounting)): (each.epsilon, each.delta) for each in book.limits("people")}


def apply(home: Any) -> list[Limit]:
    with contextlib.closing(Ledger(home.ledger, owner=home.name)) as book:
        return PolicyFile.read(home).apply_limits(book)


def test_limits_are_written_once_and_lowered_by_the_file_alone(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    assert [each.epsilon for each in apply(home)] == [8.0]
    assert apply(home) == []
    assert held(home) == {("cell", "strict"): (8.0, 1e-5)}
    write_policy(home.path, PARTY_POLICY.replace("epsilon = 8", "epsilon = 5"))
    assert [each.epsilon for each in apply(home)] == [5.0]
    assert held(home) == {("cell", "strict"): (5.0, 1e-5)}


@pytest.mark.parametrize(
    "looser", [("epsilon = 8", "epsilon = 8.5"), ("delta = 1e-5", "delta = 2e-5"), ("1e-5", "1e-4\n#")]
)
def test_a_looser_limit_needs_the_owner_s_word_to_the_book(tmp_path: Path, looser: tuple[str, str]) -> None:
    home = make_home(tmp_path)
    apply(home)
    write_policy(home.path, PARTY_POLICY.replace(*looser))
    with pytest.raises(PolicyFileError, match=r"looser than the ledger's.*pbmvfl ledger limit"):
        apply(home)
    assert held(home) == {("cell", "strict"): (8.0, 1e-5)}
    limit = PolicyFile.read(home).limits[0]
    with contextlib.closing(Ledger(home.ledger)) as book:
        book.set_limit("people", limit)
    assert apply(home) == []


def test_a_limit_that_the_file_no_longer_has_stays_in_the_book(tmp_path: Path) -> None:
    record = '[[limit]]\nepsilon = 20\ndelta = 1e-5\nunit = "record"\n'
    home = make_home(tmp_path, policy=PARTY_POLICY + record)
    apply(home)
    write_policy(home.path, PARTY_POLICY)
    apply(home)
    assert held(home) == {("cell", "strict"): (8.0, 1e-5), ("record", "strict"): (20.0, 1e-5)}


def test_a_party_s_own_book_is_its_own_and_has_the_limits(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    with own_ledger(home, PolicyFile.read(home)) as book:
        assert (book.owner, len(book.limits("people"))) == ("bank", 1)
    assert os.stat(home.ledger).st_mode & 0o077 == 0


# --- what a policy says to a plan ---


@pytest.mark.parametrize(
    ("rules", "plan", "words"),
    [
        ({"fields": {"training": ["local"]}}, joint_plan(), "training=joint: the policy permits local"),
        ({"fields": {"algorithm": ["staged"]}}, joint_plan(), "algorithm=pbm: the policy permits staged"),
        ({"fields": {"num_epochs": {"most": 2}}}, small_plan(), "num_epochs=3: the policy permits at most 2"),
        ({"fields": {"num_epochs": {"least": 4}}}, small_plan(), "num_epochs=3: the policy permits at least 4"),
        ({"fields": {"num_epochs": {"least": 4, "most": 9}}}, small_plan(), "the policy permits 4 to 9"),
        ({"fields": {"labels": "server"}}, small_plan(), "labels=parties: the policy permits server"),
        (
            {"fields": {"beta": {"most": 0.1}}},
            small_plan(),
            "beta: the policy permits at most 0.1, and the plan has",
        ),
        ({"fields": {"nesterov": [1]}}, small_plan(nesterov=True, momentum=0.9), "nesterov=True: the policy permits 1"),
        ({"fields": {"prediction_mechanism": ["krr"]}}, joint_plan(), "prediction_mechanism=pbm"),
        ({"smallest_noise": 21}, small_plan(), "noise_multiplier=20 of local rounds: the policy permits 21 or more"),
        ({"smallest_noise": 1}, joint_plan(), "noise_multiplier=0 of joint rounds: the policy permits 1 or more"),
        ({"largest_epsilon": 0.5}, small_plan(), "the policy permits 0.5 or less in one plan"),
        ({"largest_epsilon": 1e6}, joint_plan(mechanism="none"), "epsilon=infinity"),
    ],
)
def test_a_refusal_names_the_value_and_what_is_permitted(rules: dict[str, Any], plan: Any, words: str) -> None:
    with pytest.raises(PolicyError) as refused:
        Policy(**rules).check(plan)
    assert words in str(refused.value)
    assert "change the policy" in str(refused.value)


@pytest.mark.parametrize(
    "rules",
    [
        {"fields": {"training": ["local", "joint"], "num_epochs": {"least": 3, "most": 3}, "labels": ["parties"]}},
        {"fields": {"algorithm": "staged"}},
        {"smallest_noise": 20},
        {"largest_epsilon": 8, "unit": "record"},
        {"fields": {"noise_multiplier": {"least": 20}, "noise_band": 1}},
    ],
)
def test_a_plan_within_the_conditions_is_accepted(rules: dict[str, Any]) -> None:
    Policy(**rules).check(small_plan())


def test_the_largest_epsilon_stands_exactly_between_refusal_and_acceptance() -> None:
    """Three steps with noise 20 move one row's sum by 2/20 standard deviations each: one Gaussian shift, in closed form
    (Balle and Wang, 2018, Theorem 8), computed here without the library."""
    shift = math.sqrt(3) * 2 / 20

    def delta_of(epsilon: float) -> float:
        def tail(x: float) -> float:
            return 0.5 * math.erfc(x / math.sqrt(2))

        return tail(epsilon / shift - shift / 2) - math.exp(epsilon) * tail(epsilon / shift + shift / 2)

    low, high = 0.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > 1e-5 else (low, middle)
    Policy(largest_epsilon=high * 1.001).check(small_plan())
    with pytest.raises(PolicyError, match="or less in one plan"):
        Policy(largest_epsilon=high * 0.999).check(small_plan())


def test_noise_that_is_correlated_over_steps_counts_for_what_it_hides() -> None:
    """A band mixes a row into several steps, so the same multiplier hides less."""
    banded = small_plan(noise_band=4)
    Policy(smallest_noise=20).check(small_plan())
    with pytest.raises(PolicyError, match="noise_multiplier="):
        Policy(smallest_noise=20).check(banded)


def test_a_mechanism_that_releases_nothing_is_no_reason_to_refuse() -> None:
    """Local training names mechanism none and lets nothing leave; a joint plan with it lets everything leave."""
    private = frozenset(set(MECHANISMS) - {"none"})
    Policy(mechanisms=private, needs_secure_aggregation=True).check(small_plan())
    with pytest.raises(PolicyError, match="mechanism=none"):
        Policy(mechanisms=private).check(joint_plan(mechanism="none"))
    told = small_plan(
        evaluation="released", num_test_samples=10, prediction_mechanism="krr", prediction_symbols=2, vote="top",
        num_fusion_samples=2, prediction_response_epsilon=2.0, prediction_secure_aggregation=False,
    )  # fmt: skip
    with pytest.raises(PolicyError, match="mechanism=krr: the policy permits pbm"):
        Policy(mechanisms=frozenset({"pbm"})).check(told)
    with pytest.raises(PolicyError, match="secure_aggregation=False"):
        Policy(needs_secure_aggregation=True).check(told)


def test_the_default_policy_accepts_what_it_always_did_and_can_be_compared() -> None:
    Policy().check(joint_plan(mechanism="none", evaluation="simulator"))
    assert Policy() == Policy()
    assert hash(Policy(fields={"seed": [1]})) == hash(Policy(fields={"seed": [1]}))
