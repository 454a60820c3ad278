"""Party's side of a job, as NVFlare starts it: it only starts and ends `deploy.job.process`."""

from __future__ import annotations

import threading
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from pbmvfl.deploy.job.process import PartyJob
from pbmvfl.deploy.nvflare.job import read_argument
from pbmvfl.deploy.site.folder import SiteFolder

#: Seconds that an aborted job has to close its ledger.
_TO_END = 10.0


class PartyExecutor(Executor):
    """Executor that answers the server over the federation's own link. NVFlare's tasks are not used."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self._order = order
        self._job: PartyJob | None = None
        self._thread: threading.Thread | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            self._start(fl_ctx)
        elif event_type in (EventType.ABOUT_TO_END_RUN, EventType.END_RUN, EventType.JOB_ABORTED):
            self._end()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        del task_name, shareable, fl_ctx, abort_signal
        return make_reply(ReturnCode.TASK_UNKNOWN)

    def _start(self, fl_ctx: FLContext) -> None:
        """Start the job in a daemon thread: NVFlare's events must return, and the thread must not keep the process."""
        if self._job is not None:
            return
        site_folder = SiteFolder.at(Path(fl_ctx.get_engine().get_workspace().get_root_dir()).parent)
        self._job = PartyJob(site_folder, read_argument(self._order), job=str(fl_ctx.get_job_id()))
        self._thread = threading.Thread(target=self._job.run, name="pbmvfl-party", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        if self._job is not None and self._thread is not None:
            self._job.stop()
            self._thread.join(_TO_END)
