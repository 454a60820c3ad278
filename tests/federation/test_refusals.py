"""What a federation refuses, before anything is sent wherever it can."""

from __future__ import annotations

import pytest
from torch import nn

from pbmvfl.errors import CheckpointError, EncoderError, LedgerError, PlanError, WrongSender
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan
from pbmvfl.training import updates
from support.federation_runs import Killed, Wire, killer, own_networks, recorded_transports

# --- own encoders ---


def refused(plan: Plan, data, encoders: list[nn.Module]) -> str:
    federation = Federation(plan, encoders=encoders)
    wire = Wire(federation)
    with pytest.raises(EncoderError) as error:
        federation.fit(data)
    assert not wire.messages
    return str(error.value)


def test_a_network_whose_output_can_leave_the_bound_is_refused(data, make_plan):
    plan = make_plan(data, bound=2.5)
    message = refused(plan, data, own_networks(plan, data, bound=None))
    assert "Linear" in message
    assert "[-C, C] = [-2.5, 2.5]" in message
    assert "pbmvfl.training.encoders.Bounded(network, bound=2.5)" in message


def test_a_network_that_only_ends_in_tanh_is_refused_too(data, make_plan):
    plan = make_plan(data)
    encoders = own_networks(plan, data)
    encoders[2] = nn.Sequential(nn.Linear(4, plan.embedding_dim), nn.Tanh())
    assert "party=2" in refused(plan, data, encoders)


def test_an_encoder_with_another_bound_is_refused(data, make_plan):
    plan = make_plan(data, bound=2.0)
    message = refused(plan, data, own_networks(plan, data, bound=1.5))
    assert "bound=1.5" in message
    assert "bound=2" in message


def test_one_encoder_for_each_party_is_needed(data, make_plan):
    plan = make_plan(data)
    with pytest.raises(PlanError, match="2 encoders for num_parties=3"):
        Federation(plan, encoders=own_networks(plan, data)[:2])


# --- plans that cannot be trained ---


def test_a_plan_whose_updates_cannot_be_made_is_refused_before_anything_is_sent(data, make_plan, tmp_path, monkeypatch):
    monkeypatch.delitem(updates._UPDATES, "rounded-gaussian-sum")
    federation = Federation(make_plan(data, noise_multiplier=1.5))
    wire = Wire(federation)
    with pytest.raises(PlanError, match=r"event=rounded-gaussian-sum: .* permitted: plain-update"):
        federation.fit(data, checkpoints=tmp_path / "checkpoints")
    assert not wire.messages
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("num_parties", 4), ("num_samples", 36), ("num_classes", 4), ("num_test_samples", 1)]
)
def test_a_plan_for_other_data_is_refused(name, value, data, make_plan):
    with pytest.raises(PlanError, match=f"{name}={value} in the plan, {getattr(data, name)} in the data"):
        Federation(make_plan(data, **{name: value})).fit(data)


# --- checkpoints and ledgers ---


def test_two_runs_do_not_share_a_folder_of_checkpoints(data, make_plan, tmp_path):
    """Each would write down its own releases and forget the other's."""
    plan = make_plan(data)

    def second(*_: object) -> None:
        with pytest.raises(CheckpointError, match="training in this folder"):
            Federation(plan).fit(data, checkpoints=tmp_path)

    result = Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=second)
    assert {session.plan_hash for session in result.sessions} == {plan.hash.hex()}
    assert len(Federation(plan).fit(data, checkpoints=tmp_path).sessions) == 2  # the first has let go of it


def test_a_checkpoint_of_another_plan_is_refused_by_what_differs(data, make_plan, tmp_path):
    with pytest.raises(Killed):
        Federation(make_plan(data)).fit(data, checkpoints=tmp_path, on_epoch=killer())
    with pytest.raises(CheckpointError, match="num_trials=5, this plan has num_trials=6"):
        Federation(make_plan(data, num_trials=6)).fit(data, checkpoints=tmp_path)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_distance_of_checkpoints_below_one_epoch_is_refused_before_anything_is_sent(every, data, make_plan, tmp_path):
    federation = Federation(make_plan(data))
    wire = Wire(federation)
    with pytest.raises(PlanError, match=f"checkpoint_every={every} must be an integer of at least 1"):
        federation.fit(data, checkpoints=tmp_path / "checkpoints", checkpoint_every=every)
    assert not wire.messages
    assert not (tmp_path / "checkpoints").exists()


def test_a_ledger_that_cannot_be_a_folder_is_refused_before_anything_is_sent(data, make_plan, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "books"):
        federation = Federation(make_plan(data))
        wire = Wire(federation)
        with pytest.raises(LedgerError, match=r"file.* is not a folder and cannot be made one"):
            federation.fit(data, ledger=path)
        assert not wire.messages


@pytest.mark.parametrize("missing", ["*", "party-1.sqlite*"])
def test_a_run_is_not_continued_with_ledgers_that_do_not_know_it(missing, data, make_plan, tmp_path):
    plan = make_plan(data)
    books = tmp_path / "books"
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path / "checkpoints", ledger=books, on_epoch=killer())
    for path in books.glob(missing):
        path.unlink()
    federation = Federation(plan)
    wire = Wire(federation)
    with pytest.raises(LedgerError, match=r"party-\d.sqlite' does not exist, but this run has released rounds"):
        federation.fit(data, checkpoints=tmp_path / "checkpoints", ledger=books)
    assert not wire.messages


# --- senders ---


def test_a_party_cannot_speak_in_another_s_name(data, make_plan, monkeypatch):
    """Two parties exchange their lines: every header is right, and comes from somebody else."""
    opened = recorded_transports(monkeypatch)
    federation = Federation(make_plan(data))

    def swap(*_: object) -> None:
        (transport,) = opened
        transport.parties[0], transport.parties[1] = transport.parties[1], transport.parties[0]

    with pytest.raises(WrongSender, match="sender=1: the message came from party 0"):
        federation.fit(data, on_epoch=swap)
