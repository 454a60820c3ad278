"""Processes that die, stall, or find their files damaged, in the midst of a job between organisations."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading

import pytest
from benchmarks.deploy.together import differing_tensors, train_together

from pbmvfl.deploy.job.link_factory import party_link
from pbmvfl.deploy.job.party_job import PartySite
from pbmvfl.deploy.job.process import PartyJob, ServerJob
from pbmvfl.deploy.link.grpc_server import GrpcServerLink
from pbmvfl.deploy.link.tls import Certificate, check
from pbmvfl.deploy.monitoring.status import read_status
from pbmvfl.errors import FederationError, LedgerError
from pbmvfl.federation.party_setup import ROUNDS_AHEAD
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.plan import Plan
from pbmvfl.wire.messages import Message, MessageKind
from support.certificates import Authority
from support.deploy_homes import DATASET, PARTIES, SERVER, Tables, aligned, make_homes, run_job, train_order
from support.deploy_processes import Death, charged, released, run_with_death, tap_parties
from support.ledger_books import opening

pytestmark = pytest.mark.slow
PER_EPOCH, EPOCHS = 3, 8
ROUNDS = PER_EPOCH * EPOCHS
#: Seconds after which a party lets go of a server that asks nothing.
IDLE = 2.0


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


def assert_weights_as_unharmed(homes, order, folder):
    """To the bit those of the same rows in the same order, in one process that nobody harms."""
    train_together(homes, order.plan, folder / "unharmed")
    assert differing_tensors(homes, order.run, folder / "unharmed") == []


def test_killed_processes_cost_rounds_since_the_last_epoch_and_nothing_else(homes, monkeypatch, tmp_path):
    """A party and the server die at rounds drawn here; the oracle of what left a party is a tap outside of it."""
    rows = aligned(homes)
    order = train_order(exact_plan(rows))
    monkeypatch.setattr(PartySite, "handle", tap_parties(Death()))
    chance = random.Random(int.from_bytes(os.urandom(4), "big"))
    first, second = sorted(chance.sample(range(1, ROUNDS), 2))
    code, result = run_with_death(homes, order, "job-1", "bank", Death(chance.choice(("before", "after")), first))
    assert code == -signal.SIGKILL
    assert (result.ending, result.words) == ("failed", "lost bank: its process ended")

    resumed_at = PER_EPOCH * ((first - 1) // PER_EPOCH)  # the newest end of an epoch that everybody has
    code, _ = run_with_death(homes, order, "job-2", SERVER, Death("after", second - resumed_at + 1))
    assert code == -signal.SIGKILL
    assert read_status(homes["shop"].status).last_error.endswith("server: its process ended")

    assert run_job(homes, order).ending == "done"
    starts = [0, resumed_at, PER_EPOCH * (second // PER_EPOCH)]
    for name in PARTIES:
        left, book = released(homes[name]), charged(homes[name])
        sessions = list(dict.fromkeys(session for session, _ in left))
        begun = [min(number for session, number in left if session == each) for each in sessions]
        assert begun == starts[-len(begun) :]
        assert all(number in book[session] for session, number in left)  # never below what was released
        spare = sum(map(len, book.values())) - len(set(left))
        assert 0 <= spare <= 2 * ROUNDS_AHEAD  # and not far above it
    assert_weights_as_unharmed(homes, order, tmp_path)


def test_a_server_that_stalls_loses_the_party_and_the_ledger_is_free_again(homes, monkeypatch):
    """Its connection stays open, as with a process that is stopped: nothing but the silence tells."""
    rows = aligned(homes)
    order = train_order(exact_plan(rows))
    home = homes["bank"]
    exchange, stalls, goes_on = GrpcServerLink.exchange, threading.Event(), threading.Event()

    def stall(self, message, *, timeout=None):
        asked = Message.from_bytes(message)
        if asked.kind is MessageKind.ROUND and asked.round_number == 1:
            for line in lines:
                line._idle = IDLE  # from now on: until here a loaded machine may take its time
        if asked.kind is MessageKind.ROUND and asked.round_number == 2:
            stalls.set()
            goes_on.wait(120)
        return exchange(self, message, timeout=timeout)

    def open_book():
        book = Ledger(home.ledger)
        book.open_session(opening(dataset=DATASET, plan=order.plan, run="other", session="other")).close()
        book.close()

    monkeypatch.setattr(GrpcServerLink, "exchange", stall)
    served = ServerJob(homes[SERVER], order, job="job")
    lines = [party_link(homes[name], "job") for name in PARTIES]
    parties = [PartyJob(homes[name], order, job="job", link=line) for name, line in zip(PARTIES, lines, strict=True)]
    server, *threads = [threading.Thread(target=each.run, daemon=True) for each in (served, *parties)]
    for thread in (server, *threads):
        thread.start()
    assert stalls.wait(120), served.result
    with pytest.raises(LedgerError, match="another session"):
        open_book()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert f"asked nothing for {IDLE:g} seconds; the party lets go" in read_status(home.status).last_error
    open_book()
    goes_on.set()
    server.join(120)
    assert (served.result.ending, served.result.words) == (
        "failed",
        "lost bank: its process ended; shop: its process ended",
    )


# --- files ---


@pytest.fixture
def half_done(homes, monkeypatch):
    """A run that a full disk at one party has ended after some epochs."""
    rows = aligned(homes)
    order = train_order(exact_plan(rows))
    with monkeypatch.context() as patch:
        _no_space_for(patch, homes["bank"].run(order.run) / "checkpoints", after=5)
        result = run_job(homes, order)
    return homes, order, result


def _no_space_for(patch, folder, *, after):
    """As a full disk: so many files below a folder can be forced to disk, and no more."""
    sync, count = os.fsync, 0

    def fsync(descriptor):
        nonlocal count
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(str(folder)) and os.path.isfile(path):
            count += 1
            if count > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    patch.setattr(os, "fsync", fsync)


def test_a_full_disk_at_a_party_is_named_and_the_run_goes_on_once_there_is_room(half_done, tmp_path):
    homes, order, result = half_done
    assert result.ending == "failed"
    assert result.words.startswith("bank refused: ")
    assert "No space left on device" in read_status(homes["bank"].status).last_error
    assert run_job(homes, order).ending == "done"
    assert_weights_as_unharmed(homes, order, tmp_path)


@pytest.mark.parametrize("site", ["bank", SERVER])
def test_a_damaged_checkpoint_is_named_at_its_site_and_nothing_is_lost_if_it_is_restored(site, half_done, tmp_path):
    homes, order, _ = half_done
    kept = sorted((homes[site].run(order.run) / "checkpoints").glob("round-*.safetensors"))
    whole = {path: path.read_bytes() for path in kept}
    for path, content in whole.items():
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = run_job(homes, order)
    assert result.ending in ("failed", "refused")
    assert result.words.startswith(f"{site}")
    assert "; restore " in read_status(homes[site].status).last_error
    for path, content in whole.items():
        path.write_bytes(content)
    assert run_job(homes, order).ending == "done"
    assert_weights_as_unharmed(homes, order, tmp_path)


# --- clocks ---


def _give(home, issued):
    shutil.copy(issued.certificate, home.certificate)
    shutil.copy(issued.private_key, home.private_key)
    shutil.copy(issued.authority, home.authority)
    home.private_key.chmod(0o600)


def test_a_clock_that_is_behind_is_named_before_anything_starts(homes, tmp_path):
    """A certificate that begins tomorrow is what a clock that is a day late sees."""
    home = homes["bank"]
    issued = Authority(tmp_path / "authority-again").issue("bank", first_day=1)
    _give(home, issued)
    with pytest.raises(FederationError, match=r"client\.crt is not valid yet: .* is the clock right\?"):
        check(Certificate.read(home.certificate), home.private_key, Certificate.read(home.authority), name="bank")


def test_a_site_whose_certificate_is_refused_by_date_is_named_at_the_end_of_the_job(homes):
    """Its own clock may be right: then the server's words are the only ones that it hears."""
    rows = aligned(homes)
    late = Authority(homes["bank"].path.parent / "authority-again")
    for name, home in homes.items():
        issued = late.issue(name, first_day=1 if name == "bank" else -1)
        _give(home, issued)
    job = PartyJob(homes["bank"], train_order(exact_plan(rows)), job="job")
    served = ServerJob(homes[SERVER], train_order(exact_plan(rows)), job="job")
    server = threading.Thread(target=served.run, daemon=True)
    server.start()
    job.run()
    served.stop()
    server.join(120)
    assert "check its dates" in read_status(homes["bank"].status).last_error
    assert served.result.ending == "failed"
    assert "bank" in served.result.words
