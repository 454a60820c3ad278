"""Reader of a site's log: parsed, filtered lines, and new ones as they come."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pbmvfl.deploy.monitoring.log import log_files
from pbmvfl.deploy.monitoring.redaction import printable

LEVELS = ("debug", "info", "warning", "error", "critical")
_LONGEST_LINE = 20_000


@dataclass(frozen=True)
class LogLine:
    """One line of the log."""

    values: dict[str, Any]

    @classmethod
    def parse(cls, text: bytes) -> LogLine | None:
        """Parse a line; return None for one that is cut or foreign."""
        if len(text) > _LONGEST_LINE:
            return None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or not isinstance(values.get("words"), str):
            return None
        return cls(values)

    @property
    def level(self) -> str:
        level = self.values.get("level")
        return level if level in LEVELS else "info"

    def text(self, name: str) -> str:
        """Return a field as printable text."""
        return printable(str(self.values.get(name, "")), 1000)

    def passes(self, *, level: str, run: str | None) -> bool:
        if LEVELS.index(self.level) < LEVELS.index(level):
            return False
        return run is None or self.values.get("run") == run


class LogReader:
    """Reader that starts at the oldest file and follows rotations."""

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._rest = b""
        #: Lines that could not be read: cut by a full disk or a kill.
        self.unreadable = 0

    def old_lines(self, *, level: str = "debug", run: str | None = None, last: int | None = None) -> list[LogLine]:
        """Return the existing lines that pass the filter, at most the last `last`."""
        found: deque[LogLine] = deque(maxlen=last)
        for path in log_files(self._path):
            if path != self._path:
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    found.extend(self._passing(file, level, run))
        found.extend(self.new_lines(level=level, run=run))
        return list(found)

    def new_lines(self, *, level: str = "debug", run: str | None = None) -> Iterator[LogLine]:
        """Return the whole lines since the last call."""
        for _ in range(2):  # the rest of a rotated file, then the new one
            if self._file is None:
                try:
                    self._file = open(self._path, "rb")  # noqa: SIM115, it stays open between two looks
                except OSError:
                    return
            yield from self._passing(self._whole_lines(self._file), level, run)
            if self._is_current():
                return
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._rest = b""

    def _whole_lines(self, file: BinaryIO) -> Iterator[bytes]:
        while part := file.read(1 << 16):
            *whole, self._rest = (self._rest + part).split(b"\n")
            yield from whole
            if len(self._rest) > _LONGEST_LINE:
                self._rest = b""
                self.unreadable += 1

    def _passing(self, lines: Iterator[bytes] | BinaryIO, level: str, run: str | None) -> Iterator[LogLine]:
        for text in lines:
            if not text.strip():
                continue
            line = LogLine.parse(text)
            if line is None:
                self.unreadable += 1
            elif line.passes(level=level, run=run):
                yield line

    def _is_current(self) -> bool:
        if self._file is None:
            return False
        try:
            found = os.stat(self._path)
        except OSError:
            return True  # it is being rotated: look again later
        own = os.fstat(self._file.fileno())
        return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)
