"""Whole jobs between organisations' folders, over the line: the same weights as in one process, and what leaves."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from contextlib import closing

import numpy as np
import pytest
from benchmarks.deploy.together import differing_tensors, train_together

from pbmvfl.deploy.job.admission import PRIVATE_REASON
from pbmvfl.deploy.job.job_plans import prediction_plan
from pbmvfl.deploy.link.grpc_stream import Outbox
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.deploy.site.job_spec import Work
from pbmvfl.federation.results import Result
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.spending import spending
from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION
from support.deploy_homes import PARTIES, SERVER, Tables, aligned, make_homes, run_job, train_order
from support.label_draws import charged, made


@pytest.fixture(scope="module")
def tables():
    return Tables.drawn(rows=60)


def joint_plan(rows, **choices):
    """Joint rounds, where sums, gradients and both kinds of weights matter."""
    return Plan.of(
        num_parties=len(PARTIES),
        num_samples=rows.num_rows,
        num_classes=len(rows.class_names),
        num_test_samples=0,
        batch_size=20,
        num_epochs=3,
        embedding_dim=4,
        encoder="mlp",
        learning_rate=0.3,
        evaluation="none",
        **choices,
    )


def test_without_noise_weights_are_to_the_bit_those_of_one_process(tmp_path, tables):
    homes = make_homes(tmp_path, tables, limit=None)
    rows = aligned(homes)
    assert rows.num_rows == len(tables.ids)
    plan = joint_plan(rows, mechanism="none", momentum=0.5)
    outcome = run_job(homes, train_order(plan))
    assert outcome.ending == "done", outcome.words

    train_together(homes, plan, tmp_path / "here")
    assert differing_tensors(homes, "run-001", tmp_path / "here") == []
    other = plan.replace(seed=plan.seed + 1)  # the control: another seed, other weights, at everybody
    train_together(homes, other, tmp_path / "other")
    found = differing_tensors(homes, "run-001", tmp_path / "other")
    assert {each.split(":")[0] for each in found} == {SERVER, *PARTIES}


# --- what crosses the carrier's inside, before TLS ---


@pytest.fixture
def said(monkeypatch):
    """Every message that any role gives to gRPC: those before a stream is admitted, and all after."""
    heard: list[bytes] = []
    put, challenge, join = Outbox.put, ServerMessageAuth.challenge, PartyMessageAuth.join

    def heard_too(message):
        heard.append(message)
        return message

    monkeypatch.setattr(Outbox, "put", lambda self, frame: put(self, heard_too(frame)))
    monkeypatch.setattr(ServerMessageAuth, "challenge", lambda self: heard_too(challenge(self)))
    monkeypatch.setattr(PartyMessageAuth, "join", lambda self, said: heard_too(join(self, said)))
    return heard


@pytest.fixture
def drawn(monkeypatch):
    """What every party's mechanism drew, before masks: integers that nobody else may see."""
    found: list[np.ndarray] = []
    original = PoissonBinomial.randomize

    def randomize(self, *arguments, **named):
        released = original(self, *arguments, **named)
        found.append(np.array(released))
        return released

    monkeypatch.setattr(PoissonBinomial, "randomize", randomize)
    return found


def found_in(needles, heard):
    """Which of some pieces of bytes occur anywhere in what was said."""
    everything = b"".join(heard)
    return {needle for needle in needles if needle in everything}


def spellings(value):
    """A number as bytes and as words: float32 and float64 in both orders, and its digits."""
    as_bytes = {struct.pack(form, value) for form in ("<f", ">f", "<d", ">d")}
    return as_bytes | {repr(float(value)).encode(), f"{value:.6f}".encode()}


def unmasked(drawn, plan):
    """Each release as it would be packed without a mask: dozens of bytes, which do not occur by chance."""
    size = plan.batch_size * plan.embedding_dim  # of whole batches
    return {bytes(plan.release.payload.encode(each)) for each in drawn if each.size == size}


def test_neither_ids_nor_values_nor_unmasked_integers_cross_the_line(tmp_path, tables, said, drawn):
    homes = make_homes(tmp_path, tables, limit=1e6)
    rows = aligned(homes)
    while_aligning = list(said)
    assert sum(map(len, while_aligning)) > 1000
    plan = joint_plan(rows, mechanism="pbm", num_trials=4, beta=0.2, secure_aggregation=True).replace(num_epochs=4)
    assert sum(plan.schedule.num_rounds(kind) for kind in plan.schedule.kinds) >= 10
    outcome = run_job(homes, train_order(plan))
    assert outcome.ending == "done", outcome.words
    ids = {each.encode() for each in tables.ids}
    values = {each for part in tables.features.values() for value in part.ravel() for each in spellings(value)}
    assert len(unmasked(drawn, plan)) == len(PARTIES) * len(plan.schedule)
    assert found_in(ids, said) == set()
    assert found_in(values, said) == set()
    assert found_in(unmasked(drawn, plan), said) == set()


def test_the_search_finds_integers_that_have_no_mask(tmp_path, tables, said, drawn):
    homes = make_homes(tmp_path, tables, limit=1e6)
    rows = aligned(homes)
    plan = joint_plan(rows, mechanism="pbm", num_trials=4, beta=0.2, secure_aggregation=False)
    outcome = run_job(homes, train_order(plan))
    assert outcome.ending == "done", outcome.words
    released = unmasked(drawn, plan)
    assert len(released) == len(PARTIES) * len(plan.schedule)
    assert found_in(released, said) == released


def test_the_search_finds_an_id_and_a_value_that_cross_the_line(tables):
    heard = [b"..." + tables.ids[3].encode() + struct.pack("<f", tables.features["bank"][0, 0])]
    assert found_in({tables.ids[3].encode()}, heard)
    assert found_in(spellings(tables.features["bank"][0, 0]), heard)


# --- labels ---


def staged_plan(rows, **choices):
    """Every party trains alone with labels that it is sent."""
    usual = {"training": "local", "labels": "parties", "head": "fixed", "mechanism": "none", "embedding_dim": 2}
    usual |= {"activation": "none", "start": "zero", "encoder": "linear", "batch_size": 60, "num_epochs": 2}
    sizes = {"num_parties": len(PARTIES), "num_samples": rows.num_rows, "num_classes": len(rows.class_names)}
    return Plan.of(
        **{**sizes, **usual, "noise_multiplier": 20.0, "evaluation": "none", "label_epsilon": 1.0, **choices}
    )


FUSED = {
    "num_fusion_samples": 20,
    "vote": "top",
    "prediction_mechanism": "krr",
    "prediction_symbols": 2,
    "prediction_response_epsilon": 4.0,
    "prediction_secure_aggregation": False,
}


def policy_of_labels(home, text):
    home.policy.write_text('[data]\nfile = "labels.csv"\nid = "id"\nlabel = "label"\n' + text)
    home.policy.chmod(0o600)


def logged(home):
    return "".join(path.read_text() for path in home.logs.rglob("*") if path.is_file())


def test_drawn_labels_cross_the_line_and_true_ones_never_whatever_is_trained(tmp_path, tables, said):
    homes = make_homes(tmp_path, tables, limit=1e6)
    clinic = homes[SERVER]
    policy_of_labels(clinic, "[[limit]]\nepsilon = 2.5\ndelta = 1e-5\n")
    rows = aligned(homes)
    true = rows.train_labels
    for number in range(2):
        assert run_job(homes, train_order(staged_plan(rows, seed=number), run=f"run-{number}")).ending == "done"
    assert run_job(homes, train_order(joint_plan(rows, label_epsilon=1.0), run="run-joint")).ending == "done"
    stored = (clinic.path / "labels" / "answers").read_bytes()
    drawn = np.frombuffer(stored[64 + 24 + 61 * 16 : -16], dtype="<u4")[:-1].astype(np.uint8)
    assert 0 < np.count_nonzero(drawn != true) < 60  # each differs with probability 0.27
    everything = b"".join(said)
    assert everything.count(drawn.tobytes()) == 2 * len(PARTIES)
    assert true.astype(np.uint8).tobytes() not in everything
    assert charged(clinic.path, "ledger.sqlite").total() == made(clinic.path) == 60
    assert "label" in clinic.status.read_text()  # what its ledger has spent of its limit is shown to its operators

    # Refused by its own limit: its log says how much is spent, and nothing of that reaches the parties.
    before = len(said)
    again = run_job(homes, train_order(staged_plan(rows, label_epsilon=2.0), run="again"))
    assert (again.ending, again.words) == ("refused", f"{SERVER}: {PRIVATE_REASON}")
    assert b"epsilon 2.5" not in b"".join(said[before:])
    assert "from epsilon 1.00 to 3.00" in logged(clinic)
    assert charged(clinic.path, "ledger.sqlite").total() == made(clinic.path) == 60

    # A store that is lost: another version is the owner's permission to draw anew, and is charged.
    shutil.rmtree(clinic.labels)
    assert run_job(homes, train_order(staged_plan(rows), run="lost")).words == f"{SERVER}: {PRIVATE_REASON}"
    assert "the store was lost" in logged(clinic)
    policy_of_labels(clinic, 'version = "2"\n[[limit]]\nepsilon = 2.5\ndelta = 1e-5\n')
    assert run_job(homes, train_order(staged_plan(rows), run="second")).ending == "done"
    assert charged(clinic.path, "ledger.sqlite").total() == 120


def test_fusion_rows_teach_a_model_that_only_the_label_holder_has(tmp_path, tables, said):
    homes = make_homes(tmp_path, tables, limit=1e6)
    rows = aligned(homes)
    plan = staged_plan(rows, **FUSED, label_epsilon=None)
    taught = plan.schedule.part_of(FUSION)
    before = len(said)
    training = train_order(plan)
    assert run_job(homes, training).ending == "done"
    everything = b"".join(said[before:])
    of_networks = np.delete(rows.train_labels, taught).astype(np.uint8)
    assert everything.count(of_networks.tobytes()) == len(PARTIES)  # the control: labels that are sent are found
    assert rows.train_labels[taught].astype(np.uint8).tobytes() not in everything
    figures = Result.read(homes[SERVER].run("run-001") / "result.json").fusion
    assert figures is not None
    assert 0 <= figures.accuracy <= 1
    for party in PARTIES:
        kept = [path for path in homes[party].path.rglob("*") if path.is_file()]
        assert not [path for path in kept if b"fusion.labels" in path.read_bytes()]
        assert not [path for path in kept if figures.description.encode() in path.read_bytes()]

    serving = prediction_plan(homes[SERVER], "run-001", rows)
    outcome = run_job(homes, dataclasses.replace(training, work=Work.PREDICT, plan=serving))
    assert outcome.ending == "done", outcome.words
    summary = json.loads((homes[SERVER].run("run-001") / "asked-people" / "summary.json").read_text())
    assert (summary["rows"], summary["predicted"]) == (60, 60)
    for party in PARTIES:
        with closing(Ledger(homes[party].ledger, must_exist=True, read_only=True)) as ledger:
            (limit,) = ledger.limits("people")
            spent = spending(ledger, "people", limit).epsilon
        assert spent >= 8.0  # of a fusion row: released by a law of epsilon 4, and once more to be predicted
