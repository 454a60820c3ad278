"""A site's log: HOME/logs/pbmvfl.jsonl, one JSON object a line, for the site's own operators.

It cannot hold a private value by accident. Sentences are fixed (`log_events`), fields are known by name and kind, and
errors pass through `redacted_error`. A record of the library's own `logging` is kept if its text is a constant of the
code that logs it; of its arguments only whole numbers, names of codes and redacted errors are kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from pbmvfl._descriptors import POLL_INTERVAL
from pbmvfl._files import PRIVATE_FILE, append_durably, make_private_folder
from pbmvfl.deploy.monitoring.log_events import LEVELS, Event, permitted_fields, sentence
from pbmvfl.deploy.monitoring.redaction import printable, redacted_error
from pbmvfl.deploy.monitoring.status import read_status
from pbmvfl.deploy.site.folder import SiteFolder

# --- Log files: private to their owner, of bounded size, written by several processes ---


LARGEST_FILE, FILES = 5_000_000, 5


class LogFile:
    """Size-bounded log file, private to its owner, written by several processes.

    A full file becomes NAME.1, that one NAME.2, and the oldest is removed.
    """

    def __init__(self, path: Path, *, largest: int = LARGEST_FILE, files: int = FILES) -> None:
        self.path, self._largest, self._files = Path(path), largest, files
        make_private_folder(self.path.parent)
        lock = self.path.with_name(self.path.name + ".lock")
        self._lock = FileLock(lock, mode=PRIVATE_FILE, poll_interval=POLL_INTERVAL)

    def write(self, line: str) -> None:
        """Append one line, while no other process and no other thread does.

        Raises:
            OSError: If it cannot be written.
        """
        data = line.encode(errors="replace") + b"\n"
        with self._lock:
            size = self.path.stat().st_size if self.path.exists() else 0
            if size and size + len(data) > self._largest:
                self._rotate()
            append_durably(self.path, data)

    def _rotate(self) -> None:
        for number in range(self._files - 2, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(numbered(self.path, number), numbered(self.path, number + 1))


def numbered(path: Path, number: int) -> Path:
    """Return the path of the file, or of an older one."""
    return path.with_name(f"{path.name}.{number}") if number else path


def log_files(path: Path, files: int = FILES) -> list[Path]:
    """Return the existing files, oldest first."""
    found = [numbered(path, number) for number in range(files - 1, -1, -1)]
    return [each for each in found if each.is_file()]


# --- log ---


FILE = "pbmvfl.jsonl"
_library = logging.getLogger("pbmvfl")
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CODE = re.compile(r"[A-Z][A-Z_]{0,29}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")


class SiteLog(logging.Handler):
    """Writer of a site's log. It never raises: a log that cannot be written ends no run.

    As a handler of the library's `logging`, it makes the library's own records safe.
    """

    def __init__(self, path: Path, *, site: str, job: str = "", run: str = "") -> None:
        """Open the log.

        Args:
            path: The file.
            site: Name of the site.
            job: Id of the job, if any.
            run: Name of the run, if any.
        """
        super().__init__(logging.INFO)
        self._fixed = {name: _short(value) for name, value in {"site": site, "job": job, "run": run}.items()}
        #: Redacted error of the last write; empty if it succeeded.
        self.trouble = ""
        self._file: LogFile | None = None
        try:
            self._file = LogFile(path)
        except OSError as error:
            self.trouble = redacted_error(error)

    def event(self, event: Event, **fields: object) -> None:
        """Log an event. Unknown fields, and values of another kind than their field's, are left out."""
        self._write(event, None, fields)

    def error(self, event: Event, error: BaseException, **fields: object) -> None:
        """Log an event with its redacted error."""
        self._write(event, error, fields)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            words = _record_text(record)
        except Exception:
            words = "a message that cannot be shown"
        self._write_line(record.levelno, Event.NOTE, words, {})

    def close(self) -> None:
        """Stop the redirection of the library's records, and write nothing more."""
        _library.removeHandler(self)
        _library.propagate = not any(isinstance(each, SiteLog) for each in _library.handlers)
        self._file = None
        super().close()

    def _write(self, event: object, error: BaseException | None, fields: Mapping[str, Any]) -> None:
        known = Event(event) if isinstance(event, str) and event in tuple(Event) else Event.UNKNOWN
        level = LEVELS.get(known, logging.INFO if error is None else logging.ERROR)
        kept = permitted_fields(fields)
        words = sentence(known, kept)
        if error is not None:
            words = f"{words}: {redacted_error(error)}" if words else redacted_error(error)
        self._write_line(level, known, words, kept)

    def _write_line(self, level: int, event: Event, words: str, fields: Mapping[str, Any]) -> None:
        """Write one line of text that is safe already."""
        if self._file is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": logging.getLevelName(level).lower(),
            **self._fixed,
            "event": str(event),
            "words": printable(words, 1000),
            **fields,
        }
        try:
            self._file.write(json.dumps(line))
            self.trouble = ""
        except OSError as error:
            self.trouble = redacted_error(error)


def _record_text(record: logging.LogRecord) -> str:
    where = f"{record.module}:{record.lineno}"
    if not isinstance(record.msg, str) or not _is_constant(record):
        words = f"a message of {where} that is not a constant of its code, and is not kept"
    else:
        given = record.args if isinstance(record.args, tuple) else ()
        try:
            words = record.msg % tuple(_argument(each) for each in given)
        except (TypeError, ValueError):
            words = record.msg
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return words if error is None else f"{words}: {redacted_error(error)}"


def _argument(value: object) -> object:
    if isinstance(value, BaseException):
        return redacted_error(value)
    if type(value) is int or (type(value) is str and _CODE.fullmatch(value)):
        return value
    return "?"


def _is_constant(record: logging.LogRecord) -> bool:
    """Return whether the text is a constant of the function that logs it, so that it cannot contain a value."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == record.pathname and code.co_name == record.funcName:
            return any(type(each) is str and each == record.msg for each in code.co_consts)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def open_logs(site_folder: SiteFolder, job: str = "", *, run: str = "") -> SiteLog:
    """Return an organisation's log, which alone has the library's records until it is closed.

    NVFlare's own log is not restricted to the owner, and would get full error texts.

    Args:
        site_folder: The organisation's folder.
        job: Id of the job, if any.
        run: Name of the run, if any.
    """
    log = SiteLog(site_folder.logs / FILE, site=site_folder.name, job=job, run=run)
    _library.addHandler(log)
    _library.propagate = False
    return log


def prune_jobs(site_folder: SiteFolder, keep: int = 10, *, busy: Collection[str] = ()) -> int:
    """Remove NVFlare's folders of old jobs in the kit, all but the newest, and return their number.

    Only folders that are named like a job are removed, never through a link, and never that of a running job.
    Checkpoints and models are elsewhere and are not touched. The log is bounded by its own size.
    """
    status = read_status(site_folder.status)
    running = {*busy, status.job if status is not None and status.process_is_alive else ""}
    return _remove([path for path in _job_folders(site_folder)[max(keep, 0) :] if path.name not in running])


def remove_unfinished_jobs(site_folder: SiteFolder) -> int:
    """Remove job folders that NVFlare had not validated when it was killed, and return their number.

    Validated files have a description beside them. Call it only while none of the kit's processes lives.
    """
    return _remove([path for path in _job_folders(site_folder) if not (path / "meta.json").is_file()])


def _job_folders(site_folder: SiteFolder) -> list[Path]:
    """Return NVFlare's folders of jobs, newest first."""
    with contextlib.suppress(OSError), os.scandir(site_folder.kit) as entries:
        found = [each for each in entries if _JOB.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
        found.sort(key=lambda each: each.stat(follow_symlinks=False).st_mtime, reverse=True)
        return [Path(each) for each in found]
    return []


def _remove(folders: Collection[Path]) -> int:
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    return sum(not path.exists() for path in folders)


def _short(name: str) -> str:
    return name if isinstance(name, str) and (name == "" or _NAME.fullmatch(name)) else "?"
