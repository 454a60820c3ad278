"""Reader of a site's log: parsed, filtered lines, and new ones as they come."""

from __future__ import annotations

import contextlib
import json
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
    """Reader of a log and of what was rotated out of it, which yields each line once."""

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        #: Bytes that were read of each file, by its first line, which has a time and does not change.
        self._read: dict[bytes, int] = {}
        #: Lines that could not be read: cut by a full disk or a kill.
        self.unreadable = 0

    def old_lines(self, *, level: str = "debug", run: str | None = None, last: int | None = None) -> list[LogLine]:
        """Return the existing lines that pass the filter, at most the last `last`."""
        return list(deque(self.new_lines(level=level, run=run), maxlen=last))

    def new_lines(self, *, level: str = "debug", run: str | None = None) -> Iterator[LogLine]:
        """Yield the whole lines since the last call."""
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = []
            # The newest first: a file that is rotated meanwhile is opened twice, and none is missed.
            for path in reversed(log_files(self._path)):
                with contextlib.suppress(OSError):
                    files.append(stack.enter_context(path.open("rb")))
            for file in reversed(files):
                for text in self._unread(file, is_current=file is files[0]):
                    line = LogLine.parse(text)
                    if line is None:
                        self.unreadable += 1
                    elif line.passes(level=level, run=run):
                        yield line

    def _unread(self, file: BinaryIO, *, is_current: bool) -> Iterator[bytes]:
        first = file.readline()
        file.seek(self._read.get(first, 0))
        for text in file:
            if is_current and not text.endswith(b"\n"):
                return  # it may still be written
            self._read[first] = self._read.get(first, 0) + len(text)
            if text.strip():
                yield text
