"""History of a run by epoch, and its append-only file."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pbmvfl._files import append_durably, checked_object, make_private_folder, not_written
from pbmvfl.errors import CheckpointError, PbmvflError

_NUMBER = int | float
_BEFORE = "before"


@dataclass(frozen=True, kw_only=True)
class EpochLine:
    """History of one epoch, or of the part that a run came to. A figure that was not measured is None."""

    epoch: float
    train_loss: float | None = None
    train_accuracy: float | None = None
    train_auprc: float | None = None
    test_accuracy: float | None = None
    test_auprc: float | None = None
    #: From the noisy sums of the epoch's own rounds, where the figures above come from exact ones.
    released_train_accuracy: float | None = None
    released_train_auprc: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Measured figures alone."""
        names = ("train_accuracy", "test_accuracy", "train_auprc", "test_auprc", "train_loss")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def released(self) -> dict[str, float]:
        """Figures that the server had from noisy sums as well, under the same names."""
        names = ("train_accuracy", "train_auprc")
        return {name: value for name in names if (value := getattr(self, f"released_{name}")) is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values without figures that were not measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: object, path: Path, error: type[PbmvflError] = CheckpointError) -> EpochLine:
        """Read what `to_dict` wrote into `path`; `error` is raised for anything else."""
        line = checked_object(values, {"epoch": _NUMBER}, path, error)
        checked_object(line, dict.fromkeys(line, _NUMBER), path, error)
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in line.items() if name in known})


class HistoryLog:
    """The epochs behind a run's checkpoints, one JSON object a line, appended once and never written again.

    Each line has the digest of the line before it, so the digest of a line stands for the whole history up to it, and
    is all that a checkpoint keeps. After a resume lines are appended to the one that was resumed from; lines of epochs
    that were given up stay, and no newer checkpoint leads to them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Every epoch of the history that is in the file, with the digest of its line.
        self._written: list[tuple[EpochLine, str]] = []

    def write(self, history: Sequence[EpochLine]) -> str:
        """Append the epochs that are new.

        Args:
            history: All epochs. Those that were written before are known by identity.

        Returns:
            The digest of the last line, or "" if there is none.

        Raises:
            WriteError: If the file cannot be written.
        """
        same = min(len(history), len(self._written))
        while same and history[same - 1] is not self._written[same - 1][0]:  # only the last epochs may differ
            same -= 1
        digest = self._written[same - 1][1] if same else ""
        new, lines = [], []
        for epoch in history[same:]:
            line = json.dumps({_BEFORE: digest, **epoch.to_dict()}).encode()
            digest = hashlib.sha256(line).hexdigest()
            new.append((epoch, digest))
            lines.append(line + b"\n")
        if lines:
            try:
                make_private_folder(self._path.parent)
            except OSError as error:
                raise not_written(self._path, error) from error
            append_durably(self._path, b"".join(lines))
        self._written[same:] = new
        return digest

    def read(self, digest: str) -> list[EpochLine]:
        """Return the history up to the line with this digest; "" stands for none.

        Raises:
            CheckpointError: If a line of it is missing or is not what was written.
        """
        try:
            lines = self._path.read_bytes().split(b"\n") if digest else []
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}; restore it from a copy") from error
        known = {hashlib.sha256(line).hexdigest(): line for line in lines}
        found: list[tuple[EpochLine, str]] = []
        while digest:
            if digest not in known:
                raise CheckpointError(
                    f"{self._path} is damaged: it lacks epochs of a checkpoint; restore it from a copy, or start a new "
                    "run"
                )
            values = json.loads(known[digest])
            before = values.pop(_BEFORE)
            found.append((EpochLine.from_dict(values, self._path), digest))
            digest = before
        self._written = found[::-1]
        return [epoch for epoch, _ in self._written]


def history_csv(history: Sequence[EpochLine]) -> str:
    """Return one line an epoch, with a column for each figure that any epoch recorded."""
    lines: Iterable[Mapping[str, Any]] = [line.to_dict() for line in history]
    recorded = {name for row in lines for name in row}
    names = [each.name for each in fields(EpochLine) if each.name in recorded]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
