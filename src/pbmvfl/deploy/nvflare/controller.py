"""Label holder's side of a job, as NVFlare starts it: it only starts and ends `deploy.job.process`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.signal import Signal

from pbmvfl.deploy.job.process import ServerJob
from pbmvfl.deploy.nvflare.job import read_argument
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import Ending

#: Seconds between two looks at whether the job was aborted.
_LOOK = 0.2
#: NVFlare's code for a job whose work failed.
_LOST = 1


class ServerController(Controller):
    """Controller that runs the server over the federation's own link. NVFlare's tasks are not used."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self._order = order
        self._job: ServerJob | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        site_folder = SiteFolder.at(Path(fl_ctx.get_engine().get_workspace().get_root_dir()).parent)
        self._job = ServerJob(site_folder, read_argument(self._order), job=str(fl_ctx.get_job_id()))

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        assert self._job is not None
        work = threading.Thread(target=self._job.run, name="pbmvfl-server", daemon=True)
        work.start()
        while work.is_alive():
            work.join(_LOOK)
            if abort_signal.triggered:
                self._job.stop()
                work.join(10)
                break
        result = self._job.result
        if result is not None and result.ending is Ending.FAILED:
            # Another job waits until this process is gone. All results are on disk, and the parties know the end;
            # NVFlare would take some ten seconds to end it, and ends the parties' processes also like this.
            os._exit(_LOST)
        if result is None or result.ending in (Ending.FAILED, Ending.REFUSED):
            self.system_panic("the work did not end well" if result is None else result.words, fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        del fl_ctx
        if self._job is not None:
            self._job.stop()
