"""Whole jobs between organisations' folders, over the line: the same weights as in one process, and what leaves."""

from __future__ import annotations

import ssl
import struct

import numpy as np
import pytest
from benchmarks.deploy.together import differing_tensors, train_together

from pbmvfl.mechanisms.poisson_binomial import PoissonBinomial
from pbmvfl.plan.plan import Plan
from support.deploy_homes import PARTIES, SERVER, Tables, aligned, make_homes, run_job, train_order


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
    """Every byte that any role gives to TLS, in one piece for each call."""
    heard: list[bytes] = []
    original = ssl.SSLSocket.send

    def send(self, data, flags=0):
        sent = original(self, data, flags)
        heard.append(bytes(data)[:sent])
        return sent

    monkeypatch.setattr(ssl.SSLSocket, "send", send)
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
    size = plan.batch_size * plan.embedding_dim  # the warm-up before a job draws, too, and much less
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
