"""The count of releases: one writer at a time, one plan, and nothing that is forgotten."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.errors import CheckpointError
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.release_log import ReleasedRounds, ReleaseLog
from pbmvfl.plan.plan import Plan
from support.federation_runs import counted_uses, shown_uses

#: A process that trains in the folder until it is killed.
HOLDER = """
import sys
from pathlib import Path
from pbmvfl.federation.release_log import ReleaseLog
log = ReleaseLog(Path(sys.argv[1]))
log.open("ab", first_round=0, until=8, noise_is_seeded=False)
print("open", flush=True)
sys.stdin.read()
"""
MINE, OTHER = "11" * 32, "22" * 32


def opened(folder: Path, *, until: int = 8, **choices: object) -> ReleaseLog:
    log = ReleaseLog(folder, **choices)  # type: ignore[arg-type]
    log.open("ab", first_round=0, until=until, noise_is_seeded=False)
    return log


# --- one writer ---


def test_a_second_process_is_refused_until_the_first_one_is_gone(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"open\n"
        before = (tmp_path / "sessions.json").read_bytes()
        with pytest.raises(CheckpointError, match="another process is training in this folder"):
            ReleaseLog(tmp_path)
        assert (tmp_path / "sessions.json").read_bytes() == before
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    again = ReleaseLog(tmp_path)
    assert [record.session for record in again.records] == ["ab"]
    again.close()


def test_a_federation_releases_nothing_in_a_folder_that_another_one_uses(data, make_plan, tmp_path: Path) -> None:
    federation, heard = Federation(make_plan(data)), []
    federation.taps.append(lambda *message: heard.append(message))
    log = opened(tmp_path)
    with pytest.raises(CheckpointError, match="another process is training"):
        federation.fit(data, checkpoints=tmp_path)
    assert not heard
    log.close()
    assert len(federation.fit(data, checkpoints=tmp_path).sessions) == 2


def test_the_lock_goes_with_close_and_with_the_last_reference(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.close()
    first.close()
    second = ReleaseLog(tmp_path)
    del second
    gc.collect()
    ReleaseLog(tmp_path).close()


def test_a_log_that_only_a_cycle_holds_does_not_stop_the_next_one(tmp_path: Path) -> None:
    class Run:
        pass

    gc.disable()
    try:
        run = Run()
        run.log, run.itself = ReleaseLog(tmp_path), run
        del run
        ReleaseLog(tmp_path).close()
    finally:
        gc.enable()


def test_another_thread_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    log, refused = ReleaseLog(tmp_path), []

    def second() -> None:
        try:
            ReleaseLog(tmp_path)
        except CheckpointError as error:
            refused.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    assert len(refused) == 1
    log.close()


def test_a_closed_log_writes_nothing_more(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.close()
    before = (tmp_path / "sessions.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"sessions\.json was closed"):
        log.charge_until(20)
    assert (tmp_path / "sessions.json").read_bytes() == before


def test_a_refused_log_does_not_keep_the_folder_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "sessions.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="must be a list of sessions"):
            ReleaseLog(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sessions.json"]


def test_where_folders_cannot_be_locked_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def as_on_a_network_file_system(descriptor: int, operation: int) -> None:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(9, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_a_network_file_system)
    log = ReleaseLog(tmp_path)
    with pytest.raises(CheckpointError, match="another process is training"):
        ReleaseLog(tmp_path)
    log.close()
    ReleaseLog(tmp_path).close()

    def nowhere(_: int, __: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", nowhere)
    with pytest.raises(CheckpointError, match=r"cannot be locked.*Operation not supported"):
        ReleaseLog(tmp_path)


def test_without_a_folder_there_is_nothing_to_lock_or_to_write() -> None:
    logs = [ReleaseLog(None, plan_hash=MINE) for _ in range(2)]
    for log in logs:
        log.open("ab", first_round=0, until=3, noise_is_seeded=False)
        log.must_cover(100)
        log.close()
        log.charge_until(4)
    assert [log.records[0].charged_until for log in logs] == [4, 4]


# --- one plan ---


def test_releases_of_another_plan_are_not_counted_as_this_one_s(tmp_path: Path) -> None:
    opened(tmp_path, plan_hash=OTHER).close()
    before = (tmp_path / "sessions.json").read_bytes()
    with pytest.raises(CheckpointError, match=f"belongs to another plan: .*{OTHER}, this plan is {MINE}"):
        ReleaseLog(tmp_path, plan_hash=MINE)
    assert (tmp_path / "sessions.json").read_bytes() == before
    log = ReleaseLog(tmp_path, plan_hash=OTHER)
    assert [record.plan_hash for record in log.records] == [OTHER]
    log.close()


def test_records_of_versions_that_wrote_no_plan_are_continued(tmp_path: Path) -> None:
    old = {"session": "cd", "first_round": 0, "charged_until": 4, "noise_is_seeded": False}
    (tmp_path / "sessions.json").write_text(json.dumps([old]))
    log = ReleaseLog(tmp_path, plan_hash=MINE)
    log.open("ab", first_round=4, until=8, noise_is_seeded=False)
    log.close()
    written = json.loads((tmp_path / "sessions.json").read_text())
    assert {name: value for name, value in written[0].items() if name != "sha256"} == {**old, "public_start": True}
    assert written[1]["plan_hash"] == MINE


@pytest.mark.parametrize("damage", [7, [], {}, True])
def test_a_damaged_plan_hash_is_refused(damage: object, tmp_path: Path) -> None:
    record = {"session": "cd", "first_round": 0, "charged_until": 4, "noise_is_seeded": False, "plan_hash": damage}
    (tmp_path / "sessions.json").write_text(json.dumps([record]))
    with pytest.raises(CheckpointError, match="plan_hash"):
        ReleaseLog(tmp_path, plan_hash=MINE)


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    for plan_hash in (MINE, None):
        record = ReleasedRounds(session="ab", first_round=3, charged_until=9, noise_is_seeded=True, plan_hash=plan_hash)
        assert ReleasedRounds.from_value(record.to_dict(), tmp_path, CheckpointError) == record


# --- every row by itself ---


@given(spans=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=4), goes_on=st.integers(0, 13))
def test_rows_are_counted_one_by_one_however_sessions_overlap(spans, goes_on) -> None:
    """Three epochs of four rounds and one round of test rows."""
    plan = Plan.of(
        num_parties=2,
        num_samples=37,
        num_test_samples=5,
        num_classes=2,
        batch_size=10,
        num_epochs=3,
        evaluation="released",
    )
    log = ReleaseLog(None)
    for first, until in spans:
        log.open("ab", first_round=first, until=until, noise_is_seeded=False)
    assert shown_uses(log.uses(plan)) == counted_uses(plan, spans)
    # A run that ended among the test rows asks for all of them again.
    after = [*spans, (min(goes_on, 12), 13)]
    assert shown_uses(log.uses_after(plan, first_round=goes_on)) == counted_uses(plan, after)


# --- nothing forgotten ---


def test_a_log_in_the_run_s_own_folder_survives_its_checkpoints(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    opened(tmp_path, moved_from=checkpoints).close()
    shutil.rmtree(checkpoints)
    log = ReleaseLog(tmp_path, moved_from=checkpoints)
    assert [record.charged_until for record in log.records] == [8]
    log.close()


def test_a_log_where_an_earlier_version_kept_it_is_read_and_written_to_the_new_place(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    opened(checkpoints, until=8).close()
    log = ReleaseLog(tmp_path, moved_from=checkpoints)
    log.must_cover(8)
    log.open("cd", first_round=8, until=12, noise_is_seeded=False)
    log.close()
    assert [record["session"] for record in json.loads((tmp_path / "sessions.json").read_text())] == ["ab", "cd"]
    # from then on the new one counts: the old one does not know of the last session
    log = ReleaseLog(tmp_path, moved_from=checkpoints)
    assert [record.session for record in log.records] == ["ab", "cd"]
    log.close()


@pytest.mark.parametrize("rounds", [0, 9])
def test_a_checkpoint_that_the_log_does_not_cover_is_refused(rounds: int, tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"sessions\.json counts releases of 0 rounds, the checkpoint has {rounds}"
    ):
        log.must_cover(rounds)
    log.close()
    log = opened(tmp_path, until=8)
    log.must_cover(8)
    with pytest.raises(CheckpointError, match="counts releases of 8 rounds, the checkpoint has 9"):
        log.must_cover(9)
    log.close()


def test_a_flipped_bit_of_a_log_is_refused_by_name_or_means_the_same(tmp_path: Path) -> None:
    """It counts what was released: a smaller number would make an epsilon too small."""
    log = opened(tmp_path)
    log.open("cd", first_round=4, until=12, noise_is_seeded=False)
    log.charge_until(6420)
    records = log.records
    log.close()
    path = tmp_path / "sessions.json"
    whole = path.read_bytes()
    number = whole.index(b"6420")
    # One bit of every byte, and every bit of the last count: 6420 might become 2420.
    bits = [8 * at + at % 8 for at in range(len(whole))] + list(range(8 * number, 8 * number + 32))
    words = []
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = ReleaseLog(tmp_path)
        except CheckpointError as error:
            words.append(str(error))
        else:
            found.close()
            assert found.records == records  # blanks between values, which say nothing
    assert all("sessions.json" in each for each in words)
    assert len(words) > 0.75 * len(bits)
    path.write_bytes(whole)
    log = ReleaseLog(tmp_path)
    assert log.records == records
    log.close()


def test_a_log_without_its_first_session_is_refused(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.open("cd", first_round=4, until=12, noise_is_seeded=False)
    log.close()
    path = tmp_path / "sessions.json"
    path.write_text(json.dumps(json.loads(path.read_text())[1:]))
    with pytest.raises(CheckpointError, match="may count too few releases"):
        ReleaseLog(tmp_path)
