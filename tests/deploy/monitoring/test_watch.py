"""`pbmvfl watch` and `pbmvfl logs`: what a person and a script see of a site's own job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pbmvfl.deploy.monitoring import watch
from pbmvfl.deploy.monitoring.log import LogFile, open_logs
from pbmvfl.deploy.monitoring.log_events import Event
from pbmvfl.deploy.monitoring.log_reader import LogReader
from pbmvfl.deploy.monitoring.status import EpsilonSpent, Role, State, Status, StatusFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import LinkError, PartyLost
from support.federation_texts import federation_text

Main = Callable[..., tuple[int, str, str]]
PARTIES = ("bank", "shop")


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> float:
    """A clock that stands, however busy the machine is."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    return now


@pytest.fixture
def home(tmp_path: Path) -> SiteFolder:
    (tmp_path / "federation.toml").write_text(federation_text())
    (tmp_path / "organisation.json").write_text('{"name": "bank"}')
    return SiteFolder.at(tmp_path)


def server_status(home: SiteFolder) -> StatusFile:
    return StatusFile(
        home.status, site="clinic", role=Role.SERVER, work="train", run="first", rounds_total=8900, parties=PARTIES
    )


def party_status(home: SiteFolder) -> StatusFile:
    return StatusFile(home.status, site="bank", role=Role.PARTY, work="train", run="first", rounds_total=8900)


def words(status: Status) -> dict[str, str]:
    return {line.title: line.words for line in watch.lines_of(status)}


def looks(home: SiteFolder, seconds: list[float], **options: object) -> list[watch.Watched]:
    """Watch with a clock that only this test moves: a second a look, and a bound on them."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += 1
        seconds.append(now[0])
        assert now[0] < 500

    return list(watch.watch(home.status, clock=lambda: now[0], sleep=sleep, **options))


# --- one look ---


def test_the_label_holder_sees_rounds_loss_bytes_and_who_is_missing(home: SiteFolder) -> None:
    with server_status(home) as told:
        told.update(state=State.TRAINING)
        told.update(round=2225, loss=0.4312, bytes_up=12_300_000, bytes_down=4500, parties_alive=("shop",))
        said = words(told.now)
    assert said["training"] == "round 2,225 of 8,900 (25 %)"
    assert said["loss"] == "0.4312, from what was released"
    assert said["traffic"] == "12.3 MB up, 4.5 kB down"
    assert said["parties"] == "1 of 2 parties connected; missing: bank"
    assert "epsilon" not in said


def test_a_party_sees_its_own_epsilon_of_its_limits_and_no_loss(home: SiteFolder) -> None:
    with party_status(home) as told:
        told.update(round=10)
        told.spent((EpsilonSpent(limit="cell, strict, server", spent=1.2341, epsilon=8.0, delta=1e-5),))
        said = words(told.now)
        told.failed(LinkError("cut for 3 s"))
    assert said["epsilon"] == "1.24 of 8 (cell, strict, server, delta 1e-05)"  # rounded up
    assert words(told.now)["error"] == "LinkError: cut for 3 s"
    assert not {"loss", "parties"} & set(said)


def test_silence_of_a_live_process_is_told_from_the_end_of_one(home: SiteFolder, still: float) -> None:
    with party_status(home) as told:
        old = replace(told.now, updated=still - 12)
        assert words(told.now)["news"] == "now; the process is alive"
        assert words(old)["news"] == "none for 12 s; the process is alive"
        assert words(replace(old, process_started="1"))["news"] == "none for 12 s; the process has ended"


def test_speed_is_shown_while_rounds_move_and_not_after(home: SiteFolder, still: float) -> None:
    with party_status(home) as told:
        moving = replace(told.now, round=8000, rounds_per_second=30.0)
    assert words(moving)["speed"] == "30 rounds/s, about 30 s left"
    assert "speed" not in words(replace(moving, updated=still - 60))
    assert "speed" not in words(replace(moving, process_started="1"))
    assert "speed" not in words(replace(moving, state=State.DONE))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.44, "0.4 s"), (12.4, "12 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (18120, "5 h 2 min"), (3e5, "3 days")],
)
def test_times_are_in_words(seconds: float, said: str) -> None:
    assert watch.in_words(seconds) == said


# --- until the end ---


def test_watching_ends_with_the_job_by_its_own_verdict(home: SiteFolder) -> None:
    with server_status(home) as told:
        told.update(state=State.DONE)
    assert [look.verdict for look in looks(home, [])] == [0]
    with server_status(home) as told:
        told.failed(PartyLost({1: "its process ended"}))
    assert [look.verdict for look in looks(home, [])] == [1]


def test_a_process_that_ended_without_a_word_is_waited_for_and_then_given_up(home: SiteFolder) -> None:
    server_status(home).close()
    gone = json.loads(home.status.read_text()) | {"process_started": "1", "state": "training"}
    home.status.write_text(json.dumps(gone))
    slept: list[float] = []
    found = looks(home, slept, patience=60)
    assert [look.verdict for look in found[:-1]] == [None] * 60
    assert found[0].words == "waiting for another job that goes on with it, for 1 min 0 s"
    assert (found[-1].verdict, len(slept)) == (1, 60)


def test_a_new_job_of_the_run_within_the_patience_is_watched_on(home: SiteFolder) -> None:
    server_status(home).close()
    gone = json.loads(home.status.read_text()) | {"process_started": "1", "state": "training"}
    home.status.write_text(json.dumps(gone))
    now = [0.0]
    seen = []
    for look in watch.watch(
        home.status, clock=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 1), patience=60
    ):
        seen.append(look.verdict)
        assert len(seen) < 200
        if len(seen) == 50:
            told = server_status(home)
        if len(seen) == 150:
            told.update(state=State.DONE)
    told.close()
    assert (len(seen), seen[-1]) == (151, 0)


def test_another_run_is_not_taken_for_the_one_that_is_watched(home: SiteFolder) -> None:
    with server_status(home) as told:
        told.update(state=State.DONE)
    first = next(watch.watch(home.status, run="second"))
    assert (first.status, first.verdict) == (None, None)
    assert next(watch.watch(home.status, run="first")).verdict == 0


# --- commands ---


def test_once_shows_the_status_and_its_exit_code_says_how_it_is(home: SiteFolder, run_main: Main) -> None:
    code, out, _ = run_main("watch", "--home", home.path, "--once")
    assert (code, out) == (1, "no job has said anything here yet\n")
    with party_status(home) as told:
        told.update(state=State.TRAINING)
        told.update(round=89)
        told.close()
        code, out, _ = run_main("watch", "--home", home.path, "--once")
        assert code == 0
        assert "bank · party · train · run first" in out
        assert "round 89 of 8,900 (1 %)" in out
    with party_status(home) as told:
        told.failed(LinkError("gone"))
    code, out, _ = run_main("watch", "--home", home.path, "--once")
    assert code == 1
    assert "LinkError: gone" in out


def test_json_is_an_object_a_line_and_nothing_else(home: SiteFolder, run_main: Main) -> None:
    with server_status(home) as told:
        told.update(round=7)
        told.update(state=State.DONE)
    code, out, err = run_main("watch", "--home", home.path, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(found)) == (0, "", 1)
    assert (found[0]["round"], found[0]["state"], found[0]["process_is_alive"]) == (7, "done", True)
    assert run_main("watch", "--home", home.path, "--json", "--once", "--run", "other")[:2] == (1, "null\n")


def test_a_pipe_gets_lines_until_the_end(home: SiteFolder, run_main: Main) -> None:
    with server_status(home) as told:
        told.failed(PartyLost({1: "its process ended"}))
    code, out, _ = run_main("watch", "--home", home.path)
    assert code == 1
    assert out.count("\n") == 1
    assert "PartyLost: party=1: its process ended" in out


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_view_fits_the_terminal_and_loses_no_word(
    home: SiteFolder, run_main: Main, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with party_status(home) as told:
        told.update(round=4450)
        told.spent((EpsilonSpent(limit="record, strict, server + 2 parties", spent=3.0, epsilon=16.0, delta=1e-5),))
        told.failed(LinkError("patience=120: the line is cut"))
        told.close()
        _, out, _ = run_main("watch", "--home", home.path, "--once")
    assert max(map(len, out.splitlines())) <= width
    for word in ("4,450", "3.00", "16", "record,", "parties,", "patience=120:"):
        assert word in out.split() or f"({word}" in out.split()


def test_markup_and_escapes_in_a_status_are_shown_and_not_obeyed(home: SiteFolder, run_main: Main) -> None:
    with party_status(home) as told:
        told.failed(LinkError("[bold red]x[/] \x1b[2J [link=http://evil]y"))
    _, out, _ = run_main("watch", "--home", home.path, "--once")
    assert "[bold red]x[/]" in out
    assert "\x1b" not in out


def test_a_folder_that_is_no_home_is_named(tmp_path: Path, run_main: Main) -> None:
    for command in ("watch", "logs"):
        code, _, err = run_main(command, "--home", tmp_path / "none")
        assert code == 2
        assert "is no organisation's folder" in err


def test_logs_are_lines_in_words_filtered_by_level_and_run(home: SiteFolder, run_main: Main) -> None:
    with closing(open_logs(home, run="first")) as log:
        log.event(Event.STARTED)
        log.error(Event.FAILED, LinkError("[red]cut"))
    with closing(open_logs(home, run="second")) as log:
        log.event(Event.DONE, rounds=12)
    code, out, _ = run_main("logs", "--home", home.path)
    assert code == 0
    assert [line.split("  ", 1)[1].split(None, 1)[0] for line in out.splitlines()] == ["info", "error", "info"]
    assert "failed: LinkError: [red]cut  (first)" in out
    assert run_main("logs", "--home", home.path, "--level", "warning")[1].count("\n") == 1
    assert "done after 12 rounds" in run_main("logs", "--home", home.path, "--run", "second")[1]
    assert run_main("logs", "--home", home.path, "--lines", "1")[1].count("\n") == 1
    found = run_main("logs", "--home", home.path, "--json")[1].splitlines()
    assert [json.loads(line)["event"] for line in found] == ["started", "failed", "done"]
    code, _, err = run_main("logs", "--home", home.path, "--level", "loud")
    assert code == 2
    assert "level='loud'; permitted: debug, info, warning, error" in err


def test_an_empty_log_says_so_beside_the_output(home: SiteFolder, run_main: Main) -> None:
    code, out, err = run_main("logs", "--home", home.path)
    assert (code, out) == (0, "")
    assert "nothing to show" in err


def test_a_reader_goes_on_over_rotations_and_cut_lines_without_losing_or_repeating_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    writer, reader = LogFile(path, largest=400, files=5), LogReader(path)
    found: list[int] = []
    for number in range(60):
        writer.write(json.dumps({"words": "x", "number": number, "level": "info"}))
        if number % 3 == 0:
            found += [line.values["number"] for line in reader.new_lines()]
    with open(path, "ab") as file:
        file.write(b'{"words": "half')
    found += [line.values["number"] for line in reader.new_lines()]
    with open(path, "ab") as file:
        file.write(b'", "number": 60}\n\xff\xfe nothing\n[]\n')
    found += [line.values["number"] for line in reader.new_lines()]
    assert found == list(range(61))
    assert reader.unreadable == 2


def test_following_shows_a_line_that_comes_later_and_ctrl_c_ends_it(home: SiteFolder) -> None:
    with closing(open_logs(home)) as log:
        log.event(Event.STARTED)
        command = [sys.executable, "-m", "pbmvfl", "logs", "--home", str(home.path), "--follow"]
        # A shell that runs tests in the background has Ctrl-C ignored, and children would inherit that.
        hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}, **hears) as child:
            assert child.stdout is not None
            assert "has started" in child.stdout.readline()
            log.event(Event.DONE)
            assert "done" in child.stdout.readline()
            child.send_signal(signal.SIGINT)
            assert child.wait(600) == 130


def test_both_commands_load_neither_torch_nor_nvflare() -> None:
    code = (
        "import sys, pbmvfl.deploy.monitoring.watch, pbmvfl.deploy.monitoring.log_reader, pbmvfl.cli.watch\n"
        "print(sorted({'torch', 'nvflare', 'numba', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout
    assert "nvflare" not in done.stdout
