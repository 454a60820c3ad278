"""How one job ended, as the label holder's site wrote it down. Whether a run is done is said here, and nowhere else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pbmvfl._files import PRIVATE_FILE, make_private_folder, write_atomically
from pbmvfl.errors import RunFolderError
from pbmvfl.json_files import read_object

_LAST, _DONE = "outcome.json", "done.json"


class Ending(StrEnum):
    """How it ended."""

    DONE = "done"  #: everything that was asked for is there, at every site
    STOPPED = "stopped"  #: a limit of a party's owner, or a loss that went astray: nothing more is to be had
    REFUSED = "refused"  #: a site said no, and will say no again
    FAILED = "failed"  #: a site was lost: a new job goes on from the newest common checkpoint


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job came to."""

    job: str
    ending: Ending
    words: str = ""

    def write(self, folder: Path) -> None:
        """Beside the run's other files. An ending that nothing can follow is kept in a file of its own."""
        make_private_folder(folder)
        text = json.dumps(asdict(self)) + "\n"
        if self.ending in (Ending.DONE, Ending.STOPPED):
            write_atomically(folder / _DONE, text, mode=PRIVATE_FILE)
        write_atomically(folder / _LAST, text, mode=PRIVATE_FILE)


def last_outcome(folder: Path) -> Outcome | None:
    """Of the newest job that ended; None before one has."""
    return _read(folder / _LAST)


def final_outcome(folder: Path) -> Outcome | None:
    """What the run came to, once it has; None before."""
    return _read(folder / _DONE)


def forget(folder: Path) -> None:
    """Before work that may be asked for again under the same name."""
    for name in (_LAST, _DONE):
        (folder / name).unlink(missing_ok=True)


def _read(path: Path) -> Outcome | None:
    if not path.is_file():
        return None
    said = read_object(path, {"job": str, "ending": str, "words": str}, RunFolderError)
    if said["ending"] not in tuple(Ending):
        raise RunFolderError(f"{path} has ending={said['ending']!r}; permitted: {', '.join(Ending)}")
    return Outcome(job=said["job"], ending=Ending(said["ending"]), words=said["words"])
