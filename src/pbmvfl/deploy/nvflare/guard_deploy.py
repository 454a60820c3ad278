"""A job's files come once, under their own name, and whole; or nothing of them stays.

NVFlare unpacks them into the kit before anybody has looked at them. If that ends halfway they would stay there, and a
job whose description names another one could be started with them.
"""

from __future__ import annotations

import io
import re
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.workspace import Workspace
from nvflare.private.admin_defs import MsgHeader, ReturnCode, error_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client.training_cmds import DeployProcessor

#: Of a job, whose files are an order and its signatures.
_MOST_FILES, _MOST_BYTES = 50, 32_000_000
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_job(name: object) -> bool:
    """Whether it is an id that NVFlare gives. "startup" is none, and would be a folder of the kit."""
    return isinstance(name, str) and bool(_JOB.fullmatch(name))


def too_large(packed: object) -> str:
    """What is wrong with the size of a job's files, before any is unpacked; nothing if they may be looked at."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed if isinstance(packed, bytes | bytearray) else b"")) as files:
            sizes = [each.file_size for each in files.infolist()]
    except (zipfile.BadZipFile, OSError, ValueError):
        return "a job's files are not a zip file"
    if len(sizes) > _MOST_FILES or sum(sizes) > _MOST_BYTES:
        return f"{len(sizes):,} files of {sum(sizes):,} bytes; permitted: {_MOST_FILES} of {_MOST_BYTES:,} in all"
    return ""


def install() -> None:
    deploy, _ = DeployProcessor.process, Workspace._check_job_id  # both must be there to be replaced
    # A job's folder is emptied before its files are looked at, whatever it is called.
    Workspace._check_job_id = staticmethod(_checked_job_id)
    begun: set[str] = set()
    lock = threading.Lock()

    def deploy_whole(processor: Any, request: Any, engine: Any) -> Any:
        job, described = request.get_header(RequestHeader.JOB_ID), request.get_header(RequestHeader.JOB_META)
        if not is_job(job):
            return error_reply("a job's id is not one that NVFlare gives")
        if not isinstance(described, dict) or described.get(JobMetaKey.JOB_ID.value) != job:
            return error_reply("a job's description names another job")
        if words := too_large(request.body):
            return error_reply(words)
        with lock:
            # A second time they would lie there unlooked at while a process that was started for the first ones reads.
            known = job in begun or Path(job).exists()
            begun.add(job)
        if known:
            return error_reply("this job's files came before")
        taken = False
        try:
            reply = deploy(processor, request, engine)
            taken = reply.get_header(MsgHeader.RETURN_CODE) == ReturnCode.OK
        finally:
            if not taken:
                shutil.rmtree(job, ignore_errors=True)
        return reply

    DeployProcessor.process = deploy_whole


def _checked_job_id(job_id: object) -> str:
    if not is_job(job_id):
        raise ValueError("a job's id is not one that NVFlare gives")
    return str(job_id)
