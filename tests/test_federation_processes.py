"""Links to the parties: closed at every end of a run, in this process and in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from federation_runs import Killed, killer, limit_of, own_networks, recorded_links, set_limit
from pbmvfl.errors import (
    BudgetExceeded,
    CheckpointError,
    DataError,
    EncoderError,
    LedgerError,
    PlanError,
    ProtocolError,
    WrongSender,
)
from pbmvfl.federation import Federation, Parties
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.transport.links import ROUNDS_AHEAD, ProcessLink, _rebuilt

# --- links ---


def fails_to_close(link: object) -> None:
    close = link.close

    def fail() -> None:
        close()
        raise RuntimeError("this one cannot be closed")

    link.close = fail


def test_every_link_is_closed_although_one_fails_to(data, make_plan, monkeypatch):
    links = recorded_links(monkeypatch)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        Federation(make_plan(data)).fit(data, on_round=lambda number, *_: number == 1 and fails_to_close(links[1]))
    assert [link.closed for link in links] == [True] * 3


def test_what_ended_a_run_is_raised_and_not_what_closing_it_adds(data, make_plan, monkeypatch):
    links = recorded_links(monkeypatch)

    def kill(*_: object) -> None:
        fails_to_close(links[0])
        fails_to_close(links[2])
        raise Killed

    with pytest.raises(Killed) as error:
        Federation(make_plan(data)).fit(data, on_round=kill)
    assert [link.closed for link in links] == [True] * 3
    assert len([note for note in error.value.__notes__ if "cannot be closed" in note]) == 2


@pytest.mark.parametrize("role", ["server", "party-1"])
def test_links_are_closed_if_a_checkpoint_does_not_fit_them(role, data, make_plan, monkeypatch, tmp_path):
    plan = make_plan(data)
    with pytest.raises(Killed):
        Federation(plan).fit(data, checkpoints=tmp_path, on_epoch=killer())
    (path,) = tmp_path.glob(f"round-*/{role}.safetensors")
    save_file({name: torch.zeros(7, 7) for name in load_file(path)}, path)
    links = recorded_links(monkeypatch)
    with pytest.raises(CheckpointError):
        Federation(plan).fit(data, checkpoints=tmp_path)
    assert [link.closed for link in links] == [True] * 3


def test_links_are_closed_if_a_later_party_cannot_be_made(data, make_plan, monkeypatch):
    links = recorded_links(monkeypatch)
    plan = make_plan(data)
    encoders = own_networks(plan, data)
    encoders[2] = nn.Linear(4, plan.embedding_dim)
    with pytest.raises(EncoderError, match="party=2"):
        Federation(plan, encoders=encoders).fit(data)
    assert [link.closed for link in links] == [True] * 2


@pytest.mark.parametrize("kind", [BudgetExceeded, LedgerError, PlanError, WrongSender, DataError])
def test_an_error_of_a_party_s_process_comes_back_as_its_own_kind(kind):
    error = _rebuilt(json.dumps([kind.__name__, "round=7 was refused"]).encode())
    assert type(error) is kind
    assert str(error) == "round=7 was refused"


def test_an_error_that_nobody_knows_comes_back_as_a_protocol_error():
    assert type(_rebuilt(b'["KeyError", "7"]')) is ProtocolError


# --- parties in processes of their own ---


def no_process_is_left() -> bool:
    return not multiprocessing.active_children()


@pytest.mark.slow
def test_a_party_killed_between_rounds_ends_the_run_by_its_name_and_the_others_in_order(
    make_data, make_plan, monkeypatch, tmp_path
):
    data = make_data(num_parties=2)
    plan = make_plan(data, num_epochs=6)
    links = recorded_links(monkeypatch, ProcessLink)

    def kill(completed: int, *_: object) -> None:
        if completed != 5:
            return
        victim = links[1]
        os.kill(victim._process.pid, signal.SIGKILL)
        victim._process.join()
        attempts = (
            victim.hello,
            victim.state,
            lambda: victim.send(b"anything"),
            lambda: victim.exact_embeddings("train"),
            lambda: victim.load_state({"weight": torch.zeros(2)}),
        )
        for attempt in attempts:
            with pytest.raises(ProtocolError, match="party=1: its process ended"):
                attempt()

    federation = Federation(plan, parties=Parties.PROCESSES)
    with pytest.raises(ProtocolError, match="party=1: its process ended"):
        federation.fit(data, on_round=kill, ledger=tmp_path)
    assert [link.closed for link in links] == [True] * 2
    assert no_process_is_left()
    # party 0 may have answered round 5, and gave back what it had charged ahead; the killed one could not
    charged = [Ledger(tmp_path / f"party-{m}.sqlite").sessions(data.name)[0].charged_until for m in range(2)]
    assert charged[0] in (5, 6)
    assert charged[1] == min(ROUNDS_AHEAD, plan.num_rounds)


@pytest.mark.slow
def test_ledgers_count_the_same_in_processes_as_in_one_process(make_data, make_plan, tmp_path):
    data = make_data(num_parties=2)
    plan = make_plan(data, num_epochs=4)
    rounds, stopped = [], []
    for where in Parties:
        set_limit(tmp_path / where / "party-1.sqlite", data.name, limit_of(plan, 2.5))
        result = Federation(plan, parties=where).fit(data, ledger=tmp_path / where)
        books = [Ledger(tmp_path / where / f"party-{m}.sqlite") for m in range(2)]
        rounds.append([entry.charged_until for book in books for entry in book.sessions(data.name)])
        stopped.append(result.stopped)
        assert result.row_uses["train"] == 3
    assert rounds[0] == rounds[1] == [2 * plan.rounds_per_epoch + 1, 2 * plan.rounds_per_epoch]
    assert stopped[0] == stopped[1] != ""
    assert no_process_is_left()


#: A federation of processes that gets Ctrl-C, as a terminal sends it, to its whole group.
INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import pbmvfl.federation
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation import Federation, Parties
from pbmvfl.transport.links import ProcessLink
from pbmvfl.plan import Plan

processes = []

def interrupt():
    os.killpg(os.getpgid(0), signal.SIGINT)

class Link(ProcessLink):
    def __init__(self, inputs):
        if processes and sys.argv[2] == "starting":
            interrupt()  # the first party is on its way
        super().__init__(inputs)
        processes.append(self._process)

def main():
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 2
    data = VerticalDataset(
        name="small", party_names=("a", "b"), train_features=(x, x), test_features=(x, x), train_labels=y,
        test_labels=y, class_names=("no", "yes"), default_encoder="linear",
    )
    plan = Plan.for_data(data, num_epochs=50, batch_size=10, num_trials=2)
    pbmvfl.federation.ProcessLink = Link
    stop = lambda completed, *_: completed == 3 and interrupt()
    try:
        Federation(plan, parties=Parties.PROCESSES).fit(data, ledger=Path(sys.argv[1]), on_round=stop)
    except KeyboardInterrupt:
        print([process.exitcode for process in processes])
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
        timeout=120,
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
