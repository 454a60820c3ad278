"""Component of every process of a kit: it installs the guard, and records when the site is registered.

NVFlare itself reports its registration only in a log.
"""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from pbmvfl.deploy.nvflare import guard, revocation
from pbmvfl.deploy.nvflare.keeper import note_ready
from pbmvfl.deploy.site.folder import SiteFolder


class Readiness(FLComponent):
    """Component that marks a party as ready when the server accepted it, the server when it accepts parties."""

    def __init__(self) -> None:
        super().__init__()
        site_folder = SiteFolder.at(Path.cwd().parent)  # NVFlare works in the kit's folder
        federation = site_folder.federation
        revocation.install(site_folder.revocation_watch())
        guard.install(federation.parties, federation.lead)  # last: it sees a message first

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:  # noqa: ARG002
        if event_type == EventType.SYSTEM_START:
            note_ready(SiteFolder.at(Path.cwd().parent))
