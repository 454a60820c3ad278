"""A site's log: JSON lines for its owner alone, of bounded size, in which no private value can stand."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import pbmvfl
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.monitoring.log import LogFile, SiteLog, log_files, open_logs, prune_jobs, remove_unfinished_jobs
from pbmvfl.deploy.monitoring.log_events import WORDS, Event, permitted_fields, sentence
from pbmvfl.deploy.monitoring.status import StatusFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import BudgetExceeded, DataError, EncoderError, LedgerError, LinkError
from support.federation_texts import federation_text

#: Values of an organisation's table, its ids, weights and keys; the same spelled in every way that a log might.
ID, FEATURE, KEY = "patient-90210", 0.7312654, Identity.generate().private_bytes()
MARKS = ("90210", "0.7312", "7312654", KEY.hex(), KEY.hex()[:16], str(list(KEY))[1:20], repr(KEY)[2:20])


@pytest.fixture
def home(tmp_path: Path) -> SiteFolder:
    (tmp_path / "federation.toml").write_text(federation_text())
    (tmp_path / "organisation.json").write_text('{"name": "bank"}')
    return SiteFolder.at(tmp_path)


@pytest.fixture
def log(home: SiteFolder) -> Iterator[SiteLog]:
    with closing(open_logs(home, "11111111-2222-3333-4444-555555555555", run="first")) as log:
        yield log


def lines(home: SiteFolder) -> list[dict[str, object]]:
    return [
        json.loads(line) for path in log_files(home.logs / "pbmvfl.jsonl") for line in path.read_text().splitlines()
    ]


def private_values() -> list[object]:
    return [
        ID,
        ID.encode(),
        [ID],
        {"id": ID},
        FEATURE,
        str(FEATURE),
        np.float32(FEATURE),
        np.array([FEATURE, 90210]),
        torch.tensor([FEATURE]),
        torch.nn.Parameter(torch.full((2,), FEATURE)),
        KEY,
        KEY.hex(),
        bytearray(KEY),
        type("Row", (), {"__repr__": lambda _: ID, "__str__": lambda _: ID})(),
    ]


def private_errors() -> Iterator[Exception]:
    for value in private_values():
        for kind in (ValueError, KeyError, RuntimeError, DataError, EncoderError, OSError):
            try:
                raise kind(value) from ValueError(value)
            except kind as error:
                error.add_note(str(value))
                yield error
    yield LedgerError(f"row id {ID!r}; permitted: text, or a whole number")


def search(home: SiteFolder) -> None:
    found = [path for path in home.path.rglob("*") if path.is_file()]
    assert any(path.name == "pbmvfl.jsonl" and path.stat().st_size for path in found)
    for path in found:
        text = path.read_bytes().decode(errors="replace")
        for mark in MARKS:
            assert mark not in text, f"{mark} in {path.name}"


def test_a_line_says_when_who_what_in_words(home: SiteFolder, log: SiteLog) -> None:
    log.event(Event.RESUMED, round=3, rounds=9, peer="clinic", port=-1)
    log.error(Event.FAILED, LinkError("cut for 12 s"), round=4)
    first, second = lines(home)
    assert set(first) == {"time", "level", "site", "job", "run", "event", "words", "round", "rounds"}
    assert (first["site"], first["run"], first["level"], first["event"]) == ("bank", "first", "info", "resumed")
    assert first["words"] == "goes on from a checkpoint at round 3 of 9"
    assert (first["round"], first["rounds"]) == (3, 9)
    assert second["level"] == "error"
    assert second["words"] == "failed in round 4: LinkError: cut for 12 s"


@pytest.mark.parametrize("event", list(Event))
def test_every_event_has_words_with_and_without_its_fields(event: Event) -> None:
    full = sentence(event, permitted_fields({"round": 3, "rounds": 9, "count": 4, "port": 9000}))
    for text in (full, sentence(event, {})):
        assert not set(text) & set("[]{}")
    assert WORDS[event] == "" or full


def test_private_values_thrown_at_every_way_into_the_log_are_in_no_file(home: SiteFolder) -> None:
    with closing(open_logs(home, job(1), run="first")) as log:  # here: handlers of pytest's own join a log of a fixture
        throw_at_the_log(home, log)
        throw_at_the_library()
    assert len(lines(home)) > 300
    search(home)


def throw_at_the_log(home: SiteFolder, log: SiteLog) -> None:
    fields = [*everything_known(), "words", "row", "id", "x", "weights"]
    for value in private_values():
        log.event(value)
        log.event(Event.NOTE, **dict.fromkeys(fields, value))
        if not isinstance(value, str):  # names of a site, a job and a run are public: they are names of folders
            with closing(SiteLog(home.logs / "pbmvfl.jsonl", site=value, job=value, run=value)) as other:
                other.event(Event.STARTED)
    for error in private_errors():
        log.error(Event.FAILED, error, words=ID)


def throw_at_the_library() -> None:
    library = logging.getLogger("pbmvfl.protocol.party")
    for value in private_values():
        library.warning(value)
        library.warning(f"it was {value}")
        library.warning("it was " + str(value))
        library.warning("value %s of %r", value, value)
        library.warning("%(x)s", {"x": value})
        library.warning("too few: %s %s", value)
        library.log(40, "value", extra={"row": value})
    for error in private_errors():
        library.warning("refused: %s", error)
        library.error("failed", exc_info=error)


def everything_known() -> list[str]:
    return ["round", "rounds", "rows", "count", "seconds", "epsilon", "limit", "peer", "work", "state", "port"]


@pytest.mark.usefixtures("log")
def test_a_text_that_is_a_constant_of_the_code_is_kept_with_numbers_codes_and_errors(home: SiteFolder) -> None:
    logging.getLogger("pbmvfl.protocol.party").warning(
        "party=%d refused (%s): %s", 3, "BUDGET", BudgetExceeded("limit 8")
    )
    assert lines(home)[-1]["words"] == "party=3 refused (BUDGET): BudgetExceeded: limit 8"


def test_texts_that_the_library_gives_to_logging_are_constants() -> None:
    """Read from the source: a text with a value in it would be dropped from the log, and the operator would miss it."""
    calls = 0
    for path in Path(pbmvfl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, name = ast.unparse(node.func.value), node.func.attr
            if owner in ("_log", "_logger", "logger") and name in ("info", "warning", "error", "exception"):
                calls += 1
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}"
    assert calls >= 3


def test_the_library_speaks_to_this_log_alone_while_it_is_open(home: SiteFolder) -> None:
    """NVFlare's root handlers write the kit's own log: whole texts of errors must not get there."""
    seen: list[logging.LogRecord] = []
    root = logging.Handler()
    root.emit = seen.append
    logging.getLogger().addHandler(root)
    library = logging.getLogger("pbmvfl.protocol.party")
    try:
        with closing(open_logs(home)):
            library.warning("one")
        assert seen == []
        library.warning("two")
        assert [record.msg for record in seen] == ["two"]
    finally:
        logging.getLogger().removeHandler(root)
    assert [line["words"] for line in lines(home)] == ["one"]


def test_files_and_folder_are_for_their_owner_alone(home: SiteFolder) -> None:
    before = os.umask(0)
    try:
        with closing(open_logs(home)) as log:
            log.event(Event.STARTED)
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.logs.stat().st_mode) == 0o700
    for path in home.logs.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_files_are_rotated_by_size_and_the_oldest_goes(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "x.jsonl", largest=100, files=3)
    for i in range(100):
        file.write(f"line {i:04}")  # 10 bytes with its end
    found = log_files(tmp_path / "x.jsonl", 3)
    assert [path.name for path in found] == ["x.jsonl.2", "x.jsonl.1", "x.jsonl"]
    assert all(path.stat().st_size <= 100 for path in found)
    kept = "".join(path.read_text() for path in found).splitlines()
    assert kept == [f"line {i:04}" for i in range(70, 100)]


def test_threads_and_processes_write_whole_lines_over_rotations(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pbmvfl.deploy.monitoring.log import LogFile\n"
        "f = LogFile(Path(sys.argv[1]), largest=5000, files=50)\n"
        "[f.write('%s %04d %s' % (sys.argv[2], i, 'x' * 50)) for i in range(500)]"
    )
    path = tmp_path / "x.jsonl"
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "ab"]
    assert [child.wait(600) for child in children] == [0, 0]
    file = LogFile(path, largest=5000, files=50)
    threads = [threading.Thread(target=lambda: [file.write("t" * 60) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = "".join(each.read_text() for each in log_files(path, 50)).splitlines()
    for name in "ab":
        own = [line for line in written if line.startswith(name)]
        assert own == [f"{name} {i:04d} {'x' * 50}" for i in range(500)]
    assert written.count("t" * 60) == 400


def test_a_line_after_one_that_was_cut_stands_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"whole": 1}\n{"cut')
    file = LogFile(path)
    file.write('{"whole": 2}')
    assert path.read_text().splitlines() == ['{"whole": 1}', '{"cut', '{"whole": 2}']


def test_a_log_that_cannot_be_written_ends_no_run(home: SiteFolder) -> None:
    home.logs.write_text("a file where the folder must be")
    with closing(open_logs(home)) as log:
        log.event(Event.STARTED)
        logging.getLogger("pbmvfl.protocol.party").warning("still here")
    assert log.trouble


def test_a_link_in_the_place_of_the_log_is_not_followed(home: SiteFolder) -> None:
    home.logs.mkdir()
    (home.path / "ledger.sqlite").write_text("book")
    (home.logs / "pbmvfl.jsonl").symlink_to(home.path / "ledger.sqlite")
    with closing(open_logs(home)) as log:
        log.event(Event.STARTED)
    assert home.ledger.read_text() == "book"


def test_words_that_come_from_others_stay_on_one_line_and_do_nothing(home: SiteFolder, log: SiteLog) -> None:
    log.error(Event.FAILED, LinkError('no\n{"level": "info", "words": "forged"}\x1b[31m\u202e'))
    assert len(lines(home)) == 1
    assert str(lines(home)[0]["words"]).isprintable()


def test_no_argument_of_event_can_take_the_place_of_what_the_log_itself_says(home: SiteFolder, log: SiteLog) -> None:
    log.event(Event.STARTED, site="shop", time="1970", level="debug", job="x", run="y", words="z")
    assert (lines(home)[0]["site"], lines(home)[0]["level"]) == ("bank", "info")
    assert list(inspect.signature(SiteLog.event).parameters) == ["self", "event", "fields"]


# --- old jobs ---


def job(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def make_jobs(home: SiteFolder, count: int) -> None:
    for number in range(count):
        folder = home.kit / job(number)
        (folder / "app").mkdir(parents=True)
        (folder / "log.txt").write_text("x")
        os.utime(folder, (1000 + number, 1000 + number))


def test_all_but_the_newest_job_folders_go_and_nothing_else(home: SiteFolder, tmp_path: Path) -> None:
    make_jobs(home, 14)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (home.kit / job(900)).symlink_to(outside)
    for name in ("startup", "local", "not-a-job", job(1) + "x", job(2).upper().replace("0", "A")):
        (home.kit / name).mkdir()
    (home.path / "runs" / "first").mkdir(parents=True)
    assert prune_jobs(home) == 4
    left = {path.name for path in home.kit.iterdir()}
    assert {job(number) for number in range(14)} & left == {job(number) for number in range(4, 14)}
    assert {"startup", "local", "not-a-job", job(900)} <= left
    assert (outside / "precious").exists()
    assert (home.path / "runs" / "first").is_dir()
    assert prune_jobs(home) == 0


def test_the_folder_of_a_job_that_runs_is_kept_however_old_it_is(home: SiteFolder) -> None:
    make_jobs(home, 6)
    with StatusFile(home.status, site="bank", role="party", job=job(1)):
        assert prune_jobs(home, keep=1, busy={job(3)}) == 3
    assert {path.name for path in home.kit.iterdir()} == {job(1), job(3), job(5)}


def test_files_of_a_job_that_nobody_has_looked_at_to_the_end_go_at_a_start(home: SiteFolder, tmp_path: Path) -> None:
    make_jobs(home, 3)
    (home.kit / job(1) / "meta.json").write_text("{}")
    (home.kit / "startup").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (home.kit / job(7)).symlink_to(outside)
    assert remove_unfinished_jobs(home) == 2
    assert {path.name for path in home.kit.iterdir()} == {job(1), job(7), "startup"}
    assert outside.is_dir()


def test_a_home_without_a_kit_has_nothing_to_remove(home: SiteFolder) -> None:
    assert prune_jobs(home) == remove_unfinished_jobs(home) == 0
