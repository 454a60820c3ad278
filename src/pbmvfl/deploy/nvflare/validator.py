"""Validator of jobs before any of their processes exists: exactly our form, and accepted by this site.

NVFlare unpacks an app into KIT/JOB/app_SITE and calls this. Whatever is not exactly what `job.py` writes is refused:
another file, class or key would be a way to run code here, and so would settings that NVFlare finds in a job's folder.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE

from pbmvfl.deploy.job.admission import FORESEEN_ROWS, PRIVATE_REASON, admit, own_row_ids
from pbmvfl.deploy.nvflare.job import (
    CONFIG_FOLDER,
    LONGEST_ARGUMENT,
    PARTY_CONFIG,
    SERVER_CONFIG,
    config,
    read_argument,
    to_bytes,
)
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec
from pbmvfl.errors import OrderError, PolicyError

log = logging.getLogger(__name__)

#: Files that NVFlare's own `submit_job` adds to every folder of a job: the submitter's signature.
_SIGNATURES = frozenset({NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE})
_LARGEST_SIGNATURE = 100_000
_LARGEST_CONFIG = LONGEST_ARGUMENT + 10_000
_LONGEST_WORDS = 600
#: The one parameter; everything around it is compared afterwards.
_ARGUMENT = re.compile(rb'"order": "([A-Za-z0-9_=-]*)"')
_NOT_OURS = "the job is not of the form that pbmvfl writes"


class JobValidator(AppValidator):
    """Validator that refuses with a public reason, never raises, and refuses what it does not understand."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Validate an unpacked app; an empty text accepts it."""
        try:
            folder = Path(app_folder).absolute()
            site_folder = SiteFolder.at(folder.parents[2])  # HOME/kit/JOB/app_SITE
            spec = read_app(folder, is_server=site_folder.is_server)
            admit(site_folder, spec, datetime.now().astimezone(), row_ids=own_row_ids if _is_quick(spec) else None)
        except (PolicyError, OrderError) as error:
            words = _printable(str(error), _LONGEST_WORDS)
            log.warning("a job was refused: %s", words)
            return f"pbmvfl: {words}", {}
        except Exception:
            log.exception("a job was refused")
            return f"pbmvfl: {PRIVATE_REASON}", {}
        return "", {}


def _is_quick(spec: JobSpec) -> bool:
    """Return whether the job has so few rows that this process can forecast for them."""
    plan = spec.plan
    return plan is not None and plan.num_samples + plan.num_test_samples <= FORESEEN_ROWS


def read_app(folder: Path, *, is_server: bool) -> JobSpec:
    """Return the job spec of an unpacked app that is exactly what `write_job` wrote for this role.

    Raises:
        OrderError: If it is anything else. The message is public.
    """
    name = SERVER_CONFIG if is_server else PARTY_CONFIG
    _check_files(folder, files=frozenset(), folders=frozenset({CONFIG_FOLDER}))
    _check_files(folder / CONFIG_FOLDER, files=frozenset({name}), folders=frozenset())
    raw = _read(folder / CONFIG_FOLDER / name)
    found = _ARGUMENT.search(raw)
    if found is None:
        raise OrderError(f"{_NOT_OURS}: there is no order in it")
    argument = found[1].decode()
    if raw != to_bytes(config(argument, is_server=is_server)):
        raise OrderError(f"{_NOT_OURS}: {CONFIG_FOLDER}/{name} has something else in it than one order")
    return read_argument(argument)


def _check_files(folder: Path, *, files: frozenset[str], folders: frozenset[str]) -> None:
    """Require exactly these files, and signatures: no link, no device, nothing that only looks alike."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise OrderError(f"{_NOT_OURS}: a folder is a link")
    with os.scandir(folder) as entries:  # as many as there may be, and one more
        present = list(itertools.islice(entries, len(files) + len(folders) + len(_SIGNATURES) + 1))
    for entry in present:
        found = entry.stat(follow_symlinks=False)
        is_file = stat.S_ISREG(found.st_mode) and entry.name in files | _SIGNATURES
        if not is_file and not (stat.S_ISDIR(found.st_mode) and entry.name in folders):
            raise OrderError(f"{_NOT_OURS}: it has {_printable(entry.name, 60)!r}, which is not permitted")
        largest = _LARGEST_CONFIG if entry.name in files else _LARGEST_SIGNATURE
        if is_file and found.st_size > largest:
            raise OrderError(f"{_NOT_OURS}: {entry.name!r} has {found.st_size} bytes; permitted: at most {largest}")
    if missing := (files | folders) - {entry.name for entry in present}:
        raise OrderError(f"{_NOT_OURS}: {min(missing)!r} is missing")


def _read(path: Path) -> bytes:
    """Read a bounded part of a file, and not through a link that came in between."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        return file.read(_LARGEST_CONFIG + 1)


def _printable(text: str, longest: int) -> str:
    """Return a text that an attacker may have chosen, fit for a log and a terminal."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text[:longest])
