"""Transports to the parties: closed at every end of a run, in this process and in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pbmvfl import errors
from pbmvfl.errors import (
    CheckpointError,
    EncoderError,
    PartyLost,
    PartyRefused,
    PbmvflError,
    ProtocolError,
    TransportError,
    WrongPlan,
)
from pbmvfl.federation import party_processes
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.federation.federation import Federation, Parties
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.party_processes import Processes
from pbmvfl.federation.party_setup import ROUNDS_AHEAD
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.round_kinds import JOINT, Split
from support.federation_runs import (
    Killed,
    counted_uses,
    killer,
    limit_of,
    make_ledgers,
    own_networks,
    process_of,
    recorded_transports,
    set_limit,
    shown_uses,
    spans_of,
)

# --- transports ---


def closing_of(party: Any, closed: list[int], *, fails: bool = False) -> None:
    """Note that a party was closed; with `fails`, closing it also raises."""
    close = party.close

    def note() -> None:
        closed.append(party.index)
        close()
        if fails:
            raise RuntimeError(f"party {party.index} cannot be closed")

    party.close = note


def test_every_party_is_closed_although_one_fails_to(data, make_plan, monkeypatch):
    opened, closed = recorded_transports(monkeypatch), []

    def prepare(completed: int, *_: object) -> None:
        if completed == 1:
            for party in opened[0].parties:
                closing_of(party, closed, fails=party.index == 1)

    with pytest.raises(RuntimeError, match="party 1 cannot be closed"):
        Federation(make_plan(data)).fit(data, on_round=prepare)
    assert sorted(closed) == [0, 1, 2]


def test_what_ended_a_run_is_raised_and_not_what_closing_it_adds(data, make_plan, monkeypatch):
    opened, closed = recorded_transports(monkeypatch), []

    def kill(*_: object) -> None:
        for party in opened[0].parties:
            closing_of(party, closed, fails=party.index != 1)
        raise Killed

    with pytest.raises(Killed) as error:
        Federation(make_plan(data)).fit(data, on_round=kill)
    assert sorted(closed) == [0, 1, 2]
    assert [note for note in error.value.__notes__ if "cannot be closed" in note]


@pytest.mark.parametrize("kind", [InProcess, pytest.param(Processes, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["server", "party-1"])
def test_a_transport_is_closed_if_a_checkpoint_does_not_fit(role, kind, data, make_plan, monkeypatch, tmp_path):
    plan = make_plan(data)
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=killer())
    kept = Checkpoints(folder=tmp_path / role, plan=plan)
    first = plan.schedule.rounds_per_pass(JOINT)
    kept.save(kept.run_id, first, {name: torch.zeros(7, 7) for name in kept.load(kept.run_id, first)})
    opened = recorded_transports(monkeypatch, kind)
    where = Parties.PROCESSES if kind is Processes else Parties.IN_PROCESS
    with pytest.raises(CheckpointError, match=r"does not fit the network: .* has shape=\(7, 7\)"):
        Federation(plan, parties=where).fit(data, checkpoints=tmp_path)
    assert [transport.closed for transport in opened] == [True]
    assert no_process_is_left()


def test_nothing_is_held_if_a_later_party_cannot_be_made(data, make_plan, tmp_path):
    plan = make_plan(data)
    encoders = own_networks(plan, data)
    encoders[2] = nn.Linear(4, plan.embedding_dim)
    books = tmp_path / "books"
    with pytest.raises(EncoderError, match="party=2"):
        Federation(plan, encoders=encoders).fit(data, checkpoints=tmp_path / "run", ledger=books)
    assert not list(books.iterdir())
    # Neither the folder nor a ledger is held by the parties that had been made.
    assert len(Federation(plan).fit(data, checkpoints=tmp_path / "run", ledger=books).sessions) == 1


@pytest.mark.slow
def test_no_process_is_left_if_a_later_party_cannot_be_made(make_data, make_plan):
    data = make_data(num_parties=2)
    good, bad = Federation(make_plan(data)).party_setups(data, None, None, 1)
    with pytest.raises(WrongPlan, match="party=1: has 36 rows, the plan has 37"):
        Processes([good, replace(bad, train_features=bad.train_features[1:])])
    assert no_process_is_left()


error_from, error_text = party_processes._error_from, party_processes._error_text

#: Every error that is made of words; the others are never a party's own.
ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PbmvflError) and kind not in (PartyLost, PartyRefused)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_a_party_s_process_comes_back_as_its_own_kind(kind):
    assert len(ERRORS) > 15
    error = error_from(error_text(kind("round=7 was refused")))
    assert type(error) is kind
    assert str(error) == "round=7 was refused"


def test_an_error_that_nobody_knows_comes_back_as_one_of_this_package():
    error = error_from(b'["KeyError", "7"]')
    assert type(error) is PbmvflError
    assert str(error) == "7"
    for kind in (PartyLost, PartyRefused):  # these take more than words
        assert type(error_from(json.dumps([kind.__name__, "7"]).encode())) is PbmvflError
    assert error_from(error_text(None)) is None


# --- parties in processes of their own ---


def no_process_is_left() -> bool:
    return not multiprocessing.active_children()


@pytest.mark.slow
def test_a_party_killed_between_rounds_ends_the_run_by_its_name_and_the_others_in_order(
    make_data, make_plan, monkeypatch, tmp_path
):
    data = make_data(num_parties=2)
    plan = make_plan(data, num_epochs=6)
    opened = recorded_transports(monkeypatch, Processes)

    def kill(completed: int, *_: object) -> None:
        if completed != 5:
            return
        (transport,) = opened
        victim = process_of(transport, 1)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        for attempt in (lambda: transport.exact_embeddings(Split.TRAIN), lambda: transport.owner_error(1)):
            with pytest.raises(PartyLost, match="party=1: its process ended"):
                attempt()

    federation = Federation(plan, parties=Parties.PROCESSES)
    with pytest.raises(PartyLost, match="party=1: its process ended") as error:
        federation.fit(data, on_round=kill, ledger=tmp_path)
    assert set(error.value.reasons) == {1}
    assert isinstance(error.value, TransportError)
    assert not isinstance(error.value, ProtocolError)
    assert [transport.closed for transport in opened] == [True]
    assert no_process_is_left()
    # Party 0 answered round 5, and gave back what it had charged ahead; the killed one could not.
    charged = [Ledger(tmp_path / f"party-{m}.sqlite").sessions(data.name)[0].charged_until for m in range(2)]
    assert charged == [6, min(ROUNDS_AHEAD, len(plan.schedule))]


@pytest.mark.slow
def test_ledgers_count_the_same_in_processes_as_in_one_process(make_data, make_plan, tmp_path):
    data = make_data(num_parties=2)
    plan = make_plan(data, num_epochs=4)
    per_epoch = plan.schedule.rounds_per_pass(JOINT)
    rounds, stopped = [], []
    for where in Parties:
        make_ledgers(tmp_path / where, data.party_names)
        set_limit(tmp_path / where / "party-1.sqlite", data.name, limit_of(plan, 2.5))
        result = Federation(plan, parties=where).fit(
            data, ledger=tmp_path / where, exact_metrics=True, until_limit=True
        )
        books = [Ledger(tmp_path / where / f"party-{m}.sqlite") for m in range(2)]
        rounds.append([entry.charged_until for book in books for entry in book.sessions(data.name)])
        stopped.append(result.stopped)
        # Two epochs, and the refused round, which party 0 had answered: only its rows were used three times.
        assert spans_of(result) == [(0, 2 * per_epoch + 1)]
        assert shown_uses(result.row_uses) == counted_uses(plan, spans_of(result)) == {"joint": (3, 3, 2 * 37 + 10)}
    assert rounds[0] == rounds[1] == [2 * per_epoch + 1, 2 * per_epoch]
    assert stopped[0] == stopped[1] != ""
    assert no_process_is_left()


#: A federation of processes that gets Ctrl-C, as a terminal sends it, to its whole group.
INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.federation import Federation, Parties
from pbmvfl.plan.plan import Plan
from pbmvfl.federation import party_processes

started = []

def interrupt():
    os.killpg(os.getpgid(0), signal.SIGINT)

class Child(party_processes._Child):
    def __init__(self, setup):
        if started and sys.argv[2] == "starting":
            interrupt()  # the first party is on its way
        super().__init__(setup)
        started.append(self._process)

def main():
    # Whoever runs the tests in the background has Ctrl-C ignored, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 2
    data = VerticalDataset(
        name="small", party_names=("a", "b"), train_features=(x, x), test_features=(x, x), train_labels=y,
        test_labels=y, class_names=("no", "yes"), default_encoder="linear",
    )
    plan = Plan.for_data(data, num_epochs=50, batch_size=10, num_trials=2)
    party_processes._Child = Child
    stop = lambda completed, *_: completed == 3 and interrupt()
    try:
        Federation(plan, parties=Parties.PROCESSES).fit(data, ledger=Path(sys.argv[1]), on_round=stop)
    except KeyboardInterrupt:
        print([process.exitcode for process in started])
        sys.exit(130)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "training"])
def test_ctrl_c_ends_every_party_without_a_traceback_and_gives_back_what_was_charged_ahead(when, tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "books", when],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,  # ends a process that hangs
        check=False,
        start_new_session=True,  # Ctrl-C is for this group alone
    )
    assert (done.returncode, done.stderr) == (130, "")
    codes = json.loads(done.stdout)
    if when == "starting":  # one that takes too long to start is ended by the parent
        assert codes in ([0], [-signal.SIGKILL])
    else:
        assert codes == [0, 0]
    books = sorted((tmp_path / "books").glob("*.sqlite"))
    charged = [entry.charged_until for book in books for entry in Ledger(book).sessions("small")]
    assert charged == ([] if when == "starting" else [3, 3])
