"""Who submits reads settings from his own kit alone, wherever and with whatever around it the command is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from pbmvfl.deploy.nvflare.authority import provision
from support.deployments import SERVER, federation_text, free_ports

#: Nobody listens: it is the connecting itself that would load what a stranger's file names.
OURS = """
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.nvflare import supervisor
supervisor._CONNECT = 1.0
supervisor._connect(SiteFolder.at(sys.argv[1]))
"""
STOCK = """
from nvflare.fuel.flare_api.flare_api import new_secure_session
from pbmvfl.deploy.site.folder import SiteFolder
home = SiteFolder.at(sys.argv[1])
new_secure_session(home.federation.lead, str(home.lead_kit), timeout=1.0)
"""


@pytest.mark.parametrize("place", ["below the folder", "named by the environment"])
@pytest.mark.parametrize(("code", "runs"), [(OURS, False), (STOCK, True)], ids=["ours", "the control: NVFlare's own"])
def test_code_that_lies_where_somebody_submits_is_not_run(tmp_path: Path, code: str, runs: bool, place: str) -> None:
    port, line_port = free_ports()
    (tmp_path / "federation.toml").write_text(federation_text(port=port, line_port=line_port))
    home = provision(tmp_path / "federation.toml", tmp_path / "homes")[SERVER]
    downloads = tmp_path / "downloads" / "somebodys" / "table"
    downloads.mkdir(parents=True)
    ran = tmp_path / "ran"
    named = {}
    if place == "below the folder":
        (downloads / "comm_config.json").write_text(json.dumps({"comm_driver_path": str(downloads)}))
    else:
        named = {"NVFLARE_COMM_DRIVER_PATH": str(downloads)}
    (downloads / "helpful.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + code, str(home.path)],
        cwd=tmp_path / "downloads",
        env={**os.environ, **named},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0  # nobody was there
    assert b"Error" in done.stderr
    assert ran.exists() is runs
