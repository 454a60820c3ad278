"""NVFlare's cell as a link, for sites that may open one port only. TLS (`deploy.link.tls_server`) is faster.

A message of the cell goes from a job's process to the server's parent process and from there to the other job's
process. It arrives once or never, without notice. Content is protected by message authentication
(`deploy.link.message_auth`): the cell cannot forge, change, repeat or reorder a question or an answer. Around them are
hints, which are trusted because a false one costs nothing but time:

    party  HELLO      it is there
    server CHALLENGE  of message_auth     -> party JOIN, or REFUSED and why
    server QUESTION   authenticated       -> party ANSWER, authenticated
    server PROBE      after some seconds without an answer: what of this question?
                                          -> party STATE: the last that it answered, the one that it works on;
                                             and the last answer again, if it is that one's
    either BYE        it leaves

A question is sent again, as it was, when the party states that it has neither answered it nor works on it: a slow party
is not sent megabytes again and again.
"""

from __future__ import annotations

from typing import Any

from pbmvfl.deploy.job.link_factory import party_message_auth, server_message_auth
from pbmvfl.deploy.nvflare.cell_party import PartyCell
from pbmvfl.deploy.nvflare.cell_server import ServerCell
from pbmvfl.deploy.site.folder import SiteFolder

#: NVFlare's fixed name of the server.
_ROOT = "server"


def server_cell(site_folder: SiteFolder, cell: Any, job: str) -> ServerCell:
    """Return the label holder's link. `cell` is the job process's own: `engine.get_cell()`."""
    federation = site_folder.federation
    return ServerCell(
        core_cell=cell.core_cell,
        auth=server_message_auth(site_folder, job),
        cells={name: f"{name}.{job}" for name in federation.parties},
        patience=federation.patience,
    )


def party_cell(site_folder: SiteFolder, cell: Any, job: str) -> PartyCell:
    """Return a party's link. `cell` is the job process's own: `engine.get_cell()`."""
    return PartyCell(
        core_cell=cell.core_cell,
        auth=party_message_auth(site_folder, job),
        server=f"{_ROOT}.{job}",
        patience=site_folder.federation.patience,
    )
