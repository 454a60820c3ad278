"""A job's files come once, under their own name, and whole; or nothing of them stays.

NVFlare unpacks them into the kit before anybody has looked at them. If that ends halfway they would stay there, and a
job whose description names another one could be started with them.
"""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.workspace import Workspace
from nvflare.private.admin_defs import MsgHeader, ReturnCode, error_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client.training_cmds import DeployProcessor

_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_job(name: object) -> bool:
    """Whether it is an id that NVFlare gives. "startup" is none, and would be a folder of the kit."""
    return isinstance(name, str) and bool(_JOB.fullmatch(name))


def install() -> None:
    # A job's folder is emptied before its files are looked at, whatever it is called.
    Workspace._check_job_id = staticmethod(_checked_job_id)
    deploy = DeployProcessor.process
    begun: set[str] = set()
    lock = threading.Lock()

    def deploy_whole(processor: Any, request: Any, engine: Any) -> Any:
        job, described = request.get_header(RequestHeader.JOB_ID), request.get_header(RequestHeader.JOB_META)
        if not is_job(job):
            return error_reply("a job's id is not one that NVFlare gives")
        if not isinstance(described, dict) or described.get(JobMetaKey.JOB_ID.value) != job:
            return error_reply("a job's description names another job")
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
