"""Processes that die, stall, or find their files damaged, in the midst of a job between organisations."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from deploy_homes import PARTIES, SERVER, Tables, aligned, make_homes, train_order
from deploy_processes import Death, Processes, charged, released
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.deploy.aligned_rows import AlignedRows
from pbmvfl.deploy.outcome import last_outcome
from pbmvfl.deploy.status import read_status
from pbmvfl.federation import Federation
from pbmvfl.party_setup import ROUNDS_AHEAD
from pbmvfl.plan import Plan

pytestmark = pytest.mark.xdist_group("deploy_faults")
PER_EPOCH, EPOCHS = 3, 8
ROUNDS = PER_EPOCH * EPOCHS


@pytest.fixture(scope="module")
def tables():
    return Tables.drawn(rows=60)


@pytest.fixture
def homes(tables, tmp_path):
    return make_homes(tmp_path, tables, limit=None)


def exact_plan(rows):
    """Without noise, so that two runs can be compared to the bit."""
    return Plan.of(
        num_parties=len(PARTIES),
        num_samples=rows.num_rows,
        num_classes=len(rows.class_names),
        num_test_samples=0,
        batch_size=20,
        num_epochs=EPOCHS,
        embedding_dim=4,
        encoder="mlp",
        learning_rate=0.3,
        momentum=0.5,
        evaluation="none",
        mechanism="none",
    )


def save_unharmed(homes, rows, plan, folder):
    """The same rows in the same order, in one process that nobody kills."""
    features = tuple(np.array(AlignedRows.load(homes[name].alignment("people")).features) for name in PARTIES)
    data = VerticalDataset(
        name="people",
        party_names=PARTIES,
        train_features=features,
        test_features=tuple(part[:0] for part in features),
        train_labels=rows.train_labels,
        test_labels=rows.test_labels,
        class_names=rows.class_names,
        default_encoder="mlp",
    )
    here = Federation(plan)
    here.fit(data)
    here.model.save(folder)


def test_killed_processes_cost_rounds_since_the_last_epoch_and_nothing_else(homes, tmp_path):
    """A party and the server die at rounds drawn here; the oracle of what left a party is a tap outside of it."""
    rows = aligned(homes)
    order = train_order(exact_plan(rows))
    chance = random.Random(int.from_bytes(os.urandom(4), "big"))
    first, second = sorted(chance.sample(range(1, ROUNDS), 2))
    with Processes(homes, order, "job-1", {"bank": Death(chance.choice(("before", "after")), first)}) as job:
        assert job.code("bank") == -signal.SIGKILL
        assert job.code(SERVER) == 1
        assert job.code("shop") == 0
    outcome = last_outcome(homes[SERVER].run(order.run))
    assert (outcome.ending, outcome.words) == ("failed", "lost bank: its process ended")
    resumed_at = PER_EPOCH * ((first - 1) // PER_EPOCH)  # the newest end of an epoch that everybody has

    with Processes(homes, order, "job-2", {SERVER: Death("after", second - resumed_at + 1)}) as job:
        assert job.code(SERVER) == -signal.SIGKILL
        assert {job.code(name) for name in PARTIES} == {0}
    assert read_status(homes["shop"].status).last_error.endswith("server: its process ended")

    with Processes(homes, order, "job-3") as job:
        assert set(job.codes().values()) == {0}
    assert last_outcome(homes[SERVER].run(order.run)).ending == "done"

    starts = [0, resumed_at, PER_EPOCH * (second // PER_EPOCH)]
    for name in PARTIES:
        left, book = released(homes[name]), charged(homes[name])
        sessions = list(dict.fromkeys(session for session, _ in left))
        begun = [min(number for session, number in left if session == each) for each in sessions]
        assert begun == starts[-len(begun) :]
        assert all(number in book[session] for session, number in left)  # never below what was released
        spare = sum(map(len, book.values())) - len(set(left))
        assert 0 <= spare <= 2 * ROUNDS_AHEAD  # and not far above it
    save_unharmed(homes, rows, order.plan, tmp_path / "unharmed")
    for name, folder in {**{each: each for each in PARTIES}, SERVER: "server"}.items():
        found = load_file(homes[name].model(order.run) / "weights.safetensors")
        unharmed = load_file(tmp_path / "unharmed" / folder / "weights.safetensors")
        assert {key: value.tobytes() for key, value in found.items()} == {
            key: value.tobytes() for key, value in unharmed.items()
        }
