"""What a server and a party must agree on before a session: any difference ends the work, with both values in words."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.alignment.aligned_rows import AlignedRows
from pbmvfl.deploy.job.agreement import Answer, Question, check_answer, disagreement, facts
from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import AlignmentError, FederationError
from pbmvfl.plan.plan import Plan
from support.deploy_homes import SERVER, Tables, align_order, aligned, make_homes, run_job, train_order

FACTS = {"version": "1", "protocol": "2", "federation": "ab", "identities": "cd", "plan": "ef", "rows": "7"}


@pytest.fixture
def homes(tmp_path):
    """Organisations whose rows are aligned."""
    found = make_homes(tmp_path, Tables.drawn(rows=30), limit=None)
    aligned(found)
    return found


def small_plan(**choices):
    sizes = {"num_parties": 2, "num_samples": 30, "num_classes": 2, "num_test_samples": 0}
    usual = {"batch_size": 15, "num_epochs": 2, "embedding_dim": 2, "mechanism": "none", "evaluation": "none"}
    return Plan.of(**{**sizes, **usual, **choices})


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_that_differs_is_named_with_both_values(name):
    words = disagreement(FACTS, {**FACTS, name: "other"}, me="clinic", them="bank")
    assert words is not None
    assert f"clinic has '{FACTS[name]}'" in words
    assert "bank has 'other'" in words


def test_facts_that_agree_are_no_disagreement():
    assert disagreement(FACTS, dict(FACTS), me="clinic", them="bank") is None


def test_an_answer_with_another_proof_is_another_order_of_rows():
    good = Answer(facts=FACTS, proof=b"p" * 32)
    check_answer(good, mine=FACTS, server="clinic", party="bank", proof=b"p" * 32)
    with pytest.raises(AlignmentError, match="bank has its rows in another order than clinic"):
        check_answer(good, mine=FACTS, server="clinic", party="bank", proof=b"q" * 32)


def test_a_refusal_is_said_with_the_name_of_who_refused():
    answer = Answer(facts={}, proof=b"", refused="not at this hour")
    with pytest.raises(FederationError, match="bank refused: not at this hour"):
        check_answer(answer, mine=FACTS, server="clinic", party="bank", proof=b"")


@given(st.binary(max_size=300))
def test_whatever_bytes_come_they_are_read_or_refused(data):
    for kind in (Question, Answer):
        try:
            found = kind.from_bytes(data)
        except FederationError:
            continue
        assert kind.from_bytes(found.to_bytes()) == found


@given(st.text(max_size=900))
def test_words_of_a_refusal_can_be_printed_whatever_the_party_wrote(words):
    answer = Answer(facts=FACTS, proof=b"", refused=words)
    assert Answer.from_bytes(answer.to_bytes()).refused.isprintable()


def test_too_many_bytes_are_refused_unread():
    with pytest.raises(FederationError, match="not of the form"):
        Answer.from_bytes(Answer(facts={}, proof=b"", public_start=True).to_bytes() + b" " * 10**5)


def test_a_challenge_of_another_length_is_refused():
    with pytest.raises(FederationError, match="hexadecimal"):
        Question.from_bytes(Question(facts=FACTS, challenge=b"short").to_bytes())


def test_facts_hold_nothing_private(homes):
    order = train_order(small_plan())
    rows = AlignedRows.load(homes["bank"].alignment("people"))
    said = json.dumps(facts(homes["bank"], order, rows=rows.count))
    secret = homes["bank"].identity().private_bytes().hex()
    assert secret not in said
    assert not any(each in said for each in rows.ids)
    assert str(homes["bank"].path) not in said


# --- whole jobs ---


def test_all_agree_and_the_job_ends_well(homes):
    assert run_job(homes, train_order(small_plan())).ending == "done"


def test_a_party_whose_rows_stand_in_another_order_is_found_out(homes):
    """Both files are whole and sealed, of the same people: only their orders differ."""
    assert run_job(homes, align_order(homes, "again")).ending == "done"
    bank = homes["bank"]
    shutil.rmtree(bank.alignment("people"))
    shutil.copytree(bank.alignment("again"), bank.alignment("people"))
    result = run_job(homes, train_order(small_plan()))
    assert result.ending == "refused"
    assert "bank" in result.words
    assert "another order" in result.words
    assert not (bank.run("run-001") / "checkpoints").exists()


def test_another_federation_file_at_a_party_ends_the_job_before_a_session(homes):
    path = homes["shop"].path / "federation.toml"
    path.write_text(path.read_text().replace("epsilon = 8", "epsilon = 9"))
    digests = {FederationFile.read(homes[name].path).digest[:16] for name in (SERVER, "shop")}
    result = run_job({name: SiteFolder(home.path) for name, home in homes.items()}, train_order(small_plan()))
    assert result.ending == "refused"
    assert "shop" in result.words
    assert len(digests) == 2
    assert all(each in result.words for each in digests)


def test_other_pinned_identities_at_a_party_end_the_job_before_a_session(homes):
    """The bank was given another identity for the shop, as somebody between them would."""
    bank = homes["bank"]
    pins = {"bank": bank.identity().public, "shop": Identity.generate().public}
    bank.write_pins(homes[SERVER].identity().public, pins)
    result = run_job(homes, train_order(small_plan()))
    assert result.ending == "refused"
    assert "identities" in result.words


def test_another_plan_than_the_parties_were_told_is_refused(homes):
    """A server that deploys one order and runs another."""
    order = train_order(small_plan())
    changed = dataclasses.replace(order, plan=small_plan(seed=5))
    result = run_job(homes, order, servers=changed)
    assert result.ending == "refused"
    assert "plan hash" in result.words
    assert order.plan.hash.hex()[:16] in result.words
    assert changed.plan.hash.hex()[:16] in result.words
