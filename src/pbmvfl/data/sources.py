"""Cache folder and downloads of public data: checked, atomic, with clear instructions where there is no network."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import urllib.request
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import DataError

_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Public file: address, size, and checksum where the publisher gives one."""

    dataset: str
    file_name: str
    url: str
    size: int
    md5: str | None


#: The binary edition, because the Python edition is made of pickles and unpickling runs whatever the file says.
CIFAR10 = Archive(
    dataset="cifar10",
    file_name="cifar-10-binary.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    md5="c32a1d4ab5d03f1284b67883e8d87530",
)

#: No published checksum is known: the size, each member's CRC and the class counts are checked instead.
MODELNET10 = Archive(
    dataset="modelnet10",
    file_name="ModelNet10.zip",
    url="http://3dvision.princeton.edu/projects/2014/3DShapeNets/ModelNet10.zip",
    size=473_402_300,
    md5=None,
)


def cache_root() -> Path:
    """Return the folder of fetched and prepared data: PBMVFL_CACHE, else the user's cache folder of this platform."""
    if chosen := os.environ.get("PBMVFL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pbmvfl"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "pbmvfl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pbmvfl"


def cache_folder(dataset: str) -> Path:
    """Return the data set's folder in the cache, made if needed. Called before long work, so that it fails early."""
    folder = cache_root() / dataset
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made ({error}); set PBMVFL_CACHE to a folder that can be written"
        ) from error
    return folder


@contextmanager
def written_at_once(target: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `target` only if the block succeeds.

    A reader sees the whole file or none: an interrupted download never looks like a finished one.
    """
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")  # another process may be at it, too
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def save_arrays(target: Path, **arrays: npt.NDArray[Any]) -> None:
    """Write an .npz into the cache, whole or not at all."""
    try:
        with written_at_once(target) as part, part.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error}); free some space or set PBMVFL_CACHE to another folder"
        ) from error


def read_arrays(path: Path, *names: str) -> tuple[npt.NDArray[Any], ...]:
    """Read arrays of an .npz by name. Object arrays are refused: they would be pickles."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return tuple(file[name] for name in names)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or not the expected file ({error}); delete it and load again") from error


@contextmanager
def progress_bar(
    description: str, total: int, *, enabled: bool, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a rich progress bar on standard error, advanced by the yielded function; standard output is for results."""
    if not enabled:
        yield lambda _amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda advance: bar.update(task, advance=advance)


def open_url(url: str) -> Any:
    """Open a download: the only place that uses the network."""
    return urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)


def unavailable(dataset: str, *, files: str, url: str, reason: object) -> DataError:
    """Return the error for data that has no copy and cannot be fetched: which files to put where, and their address."""
    return DataError(
        f"dataset={dataset!r} has no copy on this machine and could not be fetched ({reason}). "
        f"Get it from {url} on a machine that can, then put {files} into a folder and name that folder in PBMVFL_DATA "
        f"(or put {files} into the cache folder {cache_root()})"
    )


def fetch(archive: Archive, *, progress: bool) -> Path:
    """Return the path of the archive in the cache, downloading and checking it first if needed."""
    target = cache_folder(archive.dataset) / archive.file_name
    if target.is_file():
        return target
    digest, received = hashlib.md5(usedforsecurity=False), 0
    try:
        with (
            written_at_once(target) as part,
            open_url(archive.url) as response,
            part.open("wb") as file,
            progress_bar(f"Fetching {archive.file_name}", archive.size, enabled=progress, in_bytes=True) as advance,
        ):
            # One byte more than expected is enough to know that the file is another one.
            while received <= archive.size and (chunk := response.read(_CHUNK)):
                file.write(chunk)
                digest.update(chunk)
                received += len(chunk)
                advance(len(chunk))
            _check_archive(archive, received, digest.hexdigest())
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is also the open answer
        where = f"{archive.dataset}/{archive.file_name}"
        raise unavailable(archive.dataset, files=where, url=archive.url, reason=error) from error
    return target


def _check_archive(archive: Archive, received: int, md5: str) -> None:
    if received != archive.size:
        amount = f"more than {archive.size}" if received > archive.size else str(received)
        raise DataError(
            f"{archive.url} gave {amount} bytes where {archive.size} were expected; nothing was kept, try again later"
        )
    if archive.md5 is not None and md5 != archive.md5:
        raise DataError(
            f"{archive.url} has md5={md5} where {archive.md5} was expected; nothing was kept. "
            "The file is damaged or another one: do not use it"
        )


def fetch_openml_table(
    dataset: str, *, data_id: int, files: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Fetch features and target of an OpenML set, with nominal columns as the numbers that their categories spell.

    scikit-learn returns nominal features as positions in the list of categories, and those lists are in no particular
    order ({-1,1} here, {1,0,-1} there), so the positions mean nothing until they are looked up.
    """
    from sklearn.datasets import fetch_openml

    try:
        # In a folder of its own the file is fetched once, so that the bytes checked are the bytes read.
        with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning for every retry; the outcome is reported below, once
            bunch = fetch_openml(data_id=data_id, as_frame=False, parser="liac-arff", data_home=home, n_retries=1)
        features = np.array(bunch.data, dtype=np.float64)
        for column, name in enumerate(bunch.feature_names):
            if categories := (bunch.categories or {}).get(name):
                spelled = np.array([float(category) for category in categories])
                features[:, column] = spelled[features[:, column].astype(np.int64)]
        return features, np.asarray(bunch.target).astype(np.float64).astype(np.int64)
    except (OSError, HTTPException, ValueError, LookupError) as error:
        url = f"https://www.openml.org/d/{data_id}"
        raise unavailable(dataset, files=files, url=url, reason=error) from error
