"""Several writers of one file: a reader finds the whole file of one of them, and no writer's work is removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pbmvfl._files import append_durably, remove_leftovers, write_atomically
from pbmvfl.errors import WriteError

Write = Callable[..., None]
TOKEN = "0123456789abcdef"


def write_by_one_name(path: Path, data: bytes, *, mode: int) -> None:
    """The control: as the program wrote before, with one temporary name for all writers of a file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise WriteError(f"{path} cannot be written") from error


# --- one interleaving, by force ---


class Interleaved:
    """Writer A is ready to publish; writer B has opened its file and written nothing yet; then A publishes."""

    def __init__(self, write: Write, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._write, self._path = write, path
        self._ready, self._opened, self._published, self._was_read = (threading.Event() for _ in range(4))
        self.errors: dict[str, Exception] = {}
        replace, fchmod = os.replace, os.fchmod

        def publish(source: Any, target: Any) -> None:
            if threading.current_thread().name == "A":
                self._ready.set()
                assert self._opened.wait(60)
                replace(source, target)
                self._published.set()
            else:
                replace(source, target)

        def has_opened(descriptor: int, mode: int) -> None:
            fchmod(descriptor, mode)
            if threading.current_thread().name == "B":
                self._opened.set()
                assert self._was_read.wait(60)

        patch.setattr(os, "replace", publish)
        patch.setattr(os, "fchmod", has_opened)

    def run(self) -> tuple[bytes, bytes]:
        """What a reader finds when A has published, and when both have ended."""
        writers = {name: threading.Thread(target=self._one, args=(name,), name=name) for name in "AB"}
        writers["A"].start()
        assert self._ready.wait(60)
        writers["B"].start()
        assert self._published.wait(60)
        then = self._path.read_bytes()
        self._was_read.set()
        for writer in writers.values():
            writer.join(60)
            assert not writer.is_alive()
        return then, self._path.read_bytes()

    def _one(self, name: str) -> None:
        try:
            self._write(self._path, name.encode() * 1000, mode=0o600)
        except WriteError as error:
            self.errors[name] = error


def test_a_writer_that_publishes_while_another_begins_publishes_its_own_bytes(monkeypatch, tmp_path):
    both = Interleaved(write_atomically, tmp_path / "index.json", monkeypatch)
    assert both.run() == (b"A" * 1000, b"B" * 1000)
    assert both.errors == {}
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_with_one_temporary_name_the_same_writer_publishes_an_empty_file(monkeypatch, tmp_path):
    """The control: the file is empty at that moment and whole afterwards, and the second writer fails."""
    both = Interleaved(write_by_one_name, tmp_path / "index.json", monkeypatch)
    assert both.run() == (b"", b"B" * 1000)
    assert set(both.errors) == {"B"}


# --- threads and processes, as they come ---

#: Writes the numbers FIRST, FIRST + STEP, ...: each as a text that says how long it is.
WRITER = """
import sys
from pathlib import Path
from pbmvfl._files import write_atomically
path, first, step, count = Path(sys.argv[1]), *map(int, sys.argv[2:])
for number in range(first, first + step * count, step):
    write_atomically(path, (b"%d " % number) * (1 + number % 997), mode=0o600)
"""


def is_whole(text: bytes) -> bool:
    first = text.partition(b" ")[0]
    return first.isdigit() and text == (first + b" ") * (1 + int(first) % 997)


def test_what_need_not_be_durable_is_not_forced_to_disk(monkeypatch, tmp_path):
    def slow(_: int) -> None:
        raise OSError("a slow disk")

    monkeypatch.setattr(os, "fsync", slow)
    write_atomically(tmp_path / "status.json", "now", durable=False)
    assert (tmp_path / "status.json").read_text() == "now"
    with pytest.raises(WriteError, match="a slow disk"):
        write_atomically(tmp_path / "status.json", "later")
    assert (tmp_path / "status.json").read_text() == "now"


def test_a_reader_never_finds_an_empty_or_partial_file(tmp_path):
    """Two threads and two processes write a file of up to a few pages; readers look as long as there are writers."""
    path, count, writers = tmp_path / "index.json", 150, 4
    write_atomically(path, b"0 ", mode=0o600)

    def write(first: int) -> None:
        for number in range(first, first + writers * count, writers):
            write_atomically(path, (b"%d " % number) * (1 + number % 997), mode=0o600)

    numbers = (str(writers), str(count))
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(first), *numbers]) for first in (1000, 1001)
    ]
    threads = [threading.Thread(target=write, args=(first,)) for first in (1002, 1003)]
    for thread in threads:
        thread.start()
    seen = set()
    try:
        for _ in range(1_000_000):
            text = path.read_bytes()
            assert is_whole(text), (len(text), text[:40])
            seen.add(text.partition(b" ")[0])
            if not any(thread.is_alive() for thread in threads) and all(each.poll() is not None for each in processes):
                break
    finally:
        for thread in threads:
            thread.join(60)
        assert [process.wait(60) for process in processes] == [0, 0]
    # Files of several writers were read. On a busy machine one of the four may be over between two looks.
    assert len({int(number) % writers for number in seen - {b"0"}}) > 1
    assert [each.name for each in tmp_path.iterdir()] == ["index.json"]


def test_a_partial_file_is_known_as_one():
    assert is_whole(b"5 " * 6)
    assert not any(map(is_whole, (b"", b"5 " * 5, b"5 " * 5 + b"5", b"5 5 6 5 5 5 ", b"\0" * 12)))


# --- temporary files that are left ---

#: Stops before it publishes: `dies`, or waits until its standard input is closed.
STOPS = """
import os, signal, sys
from pathlib import Path
from pbmvfl._files import write_atomically
path, way = Path(sys.argv[1]), sys.argv[2]
replace = os.replace
def stop(source, target):
    print("stops", flush=True)
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
    replace(source, target)
os.replace = stop
write_atomically(path, b"by the process", mode=0o600)
"""


@contextlib.contextmanager
def stopped(path: Path, way: str):
    """A process that has written its temporary file and has not published it."""
    command = [sys.executable, "-c", STOPS, str(path), way]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    hangs = threading.Timer(300, process.kill)  # ends a process that hangs; no statement about speed
    hangs.start()
    try:
        assert process.stdout.readline() == b"stops\n"
        yield process
    finally:
        hangs.cancel()
        process.stdin.close()
        process.wait()
        process.stdout.close()


def temporaries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tmp"))


def test_what_a_killed_writer_left_is_removed_by_the_next_write_of_the_same_file(tmp_path):
    path = tmp_path / "index.json"
    for _ in range(2):
        with stopped(path, "dies") as process:
            assert process.wait(60) == -signal.SIGKILL
    (left,) = temporaries(tmp_path)  # the second write removed what the first had left
    assert left.read_bytes() == b"by the process"
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    write_atomically(tmp_path / "other.json", b"other")
    assert temporaries(tmp_path) == [left]
    write_atomically(path, b"next", mode=0o600)
    assert temporaries(tmp_path) == []
    assert path.read_bytes() == b"next"


def test_a_living_writer_keeps_its_temporary_file_and_publishes_it(tmp_path):
    path = tmp_path / "index.json"
    with stopped(path, "waits"):
        (its_own,) = temporaries(tmp_path)
        write_atomically(path, b"by another", mode=0o600)
        remove_leftovers(tmp_path, "*")
        assert temporaries(tmp_path) == [its_own]
        assert path.read_bytes() == b"by another"
    assert path.read_bytes() == b"by the process"
    assert temporaries(tmp_path) == []


def test_only_names_that_a_writer_gives_are_removed(tmp_path):
    others = {f"a[1].json.{TOKEN}", f"a[1].json.{TOKEN[1:]}.tmp", "a[1].json.tmp", f"a1.json.{TOKEN}.tmp"}
    mine = f"a[1].json.{TOKEN}.tmp"
    for name in {*others, mine}:
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / f"a[1].json.{TOKEN[::-1]}.tmp").symlink_to(tmp_path / "a[1].json.tmp")
    os.mkfifo(tmp_path / f"a[1].json.{'0' * 16}.tmp")  # opening it must not wait for a writer
    write_atomically(tmp_path / "a[1].json", b"x")
    left = {path.name for path in tmp_path.iterdir()}
    assert others <= left
    assert mine not in left
    assert (tmp_path / "a[1].json.tmp").read_bytes() == b"left"


@pytest.mark.parametrize("moment", ["before it is locked", "while it is locked"])
def test_a_temporary_file_that_was_taken_for_a_leftover_is_made_again(moment, monkeypatch, tmp_path):
    """Between its making and its lock another writer may find it."""
    flock, taken = fcntl.flock, []

    def interfere(descriptor: int, operation: int) -> None:
        if not taken:
            (found,) = temporaries(tmp_path)
            taken.append(found)
            if moment == "before it is locked":
                remove_leftovers(tmp_path, "index.json")
                assert not found.exists()
            else:
                holder = os.open(found, os.O_RDWR)
                flock(holder, operation)
                with pytest.raises(BlockingIOError):
                    flock(descriptor, operation)
                found.unlink()
                try:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                finally:
                    os.close(holder)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", interfere)
    write_atomically(tmp_path / "index.json", b"whole", mode=0o600)
    assert taken
    assert (tmp_path / "index.json").read_bytes() == b"whole"
    assert temporaries(tmp_path) == []


def test_where_there_are_no_locks_files_are_written_and_nothing_is_removed(monkeypatch, tmp_path):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    left = tmp_path / f"index.json.{TOKEN}.tmp"
    left.write_bytes(b"a writer on another machine may have it")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    write_atomically(tmp_path / "index.json", b"whole")
    assert (tmp_path / "index.json").read_bytes() == b"whole"
    assert temporaries(tmp_path) == [left]


@pytest.mark.parametrize(("mode", "expected"), [(None, 0o640), (0o600, 0o600), (0o644, 0o644)])
def test_a_temporary_file_has_the_rights_of_the_file_from_its_first_byte_on(mode, expected, monkeypatch, tmp_path):
    """But those of the owner's umask where none are asked for."""
    fsync, seen = os.fsync, []

    def look(descriptor: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "index.json", b"whole", mode=mode)
    finally:
        os.umask(before)
    assert seen[0] == expected == stat.S_IMODE((tmp_path / "index.json").stat().st_mode)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full disk", "Ctrl-C"])
def test_a_write_that_ends_early_leaves_the_file_as_it_was_and_nothing_beside_it(failure, monkeypatch, tmp_path):
    def fail(*_: object) -> None:
        raise failure

    path = tmp_path / "index.json"
    write_atomically(path, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises((WriteError, KeyboardInterrupt)):
            write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["index.json"]


# --- files that only grow ---


def test_lines_after_a_torn_one_are_whole(tmp_path):
    path = tmp_path / "history.jsonl"
    append_durably(path, b"one\ntwo\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("ab") as file:
        file.write(b"thr")
    append_durably(path, b"four\n")
    assert path.read_bytes().split(b"\n") == [b"one", b"two", b"thr", b"four", b""]
    with pytest.raises(WriteError, match="missing/history"):
        append_durably(tmp_path / "missing/history", b"one\n")
