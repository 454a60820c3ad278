"""Folders of a federation's organisations for tests of policies and orders: no kits, no keys, no network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec, Work
from pbmvfl.plan.plan import Plan
from support.federation_texts import federation_text

PARTIES = ("bank", "shop", "insurer")
PARTY_POLICY = """
[data]
file = "rows.csv"
id = "person"
dataset = "people"
[[limit]]
epsilon = 8
delta = 1e-5
"""
SERVER_POLICY = """
[data]
file = "labels.csv"
id = "person"
label = "sick"
"""
RUN_ID = "0123456789abcdef"


def make_home(folder: Path, name: str = "bank", policy: str | None = None) -> SiteFolder:
    """One organisation's folder with a policy that its owner alone may read."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "federation.toml").write_text(federation_text(PARTIES))
    (path / "organisation.json").write_text(json.dumps({"name": name}))
    write_policy(path, (SERVER_POLICY if name == "clinic" else PARTY_POLICY) if policy is None else policy)
    return SiteFolder.at(path)


def write_policy(home: Path, text: str) -> None:
    path = home / "policy.toml"
    path.write_text(text)
    path.chmod(0o600)


def make_alignment(home: SiteFolder, name: str = "first", count: int = 100) -> None:
    """Rows person-0, person-1, ... in this order, as an alignment leaves them at a party; at the label holder none."""
    if home.is_server:
        home.alignment(name).mkdir(parents=True)
        return
    from pbmvfl.deploy.alignment.aligned_rows import materialise
    from pbmvfl.deploy.alignment.row_ids import AgreedOrder, order_digest
    from pbmvfl.deploy.alignment.tables import read_party_table

    file = home.path / f"{name}.csv"
    file.write_text("\n".join(["person,age", *(f"person-{number},{number}" for number in range(count))]) + "\n")
    table = read_party_table(file, id="person", party=home.name)
    key, rows = bytes(32), np.arange(count)
    digest = order_digest(key, table.ids.pieces(rows), count)
    materialise(table, AgreedOrder(name=name, rows=rows, key=key, digest=digest), home.alignment(name))


def small_plan(**choices: Any) -> Plan:
    """Strict training of 100 rows at three parties: every party alone, with noise, by labels that it is sent."""
    usual = {
        "num_parties": 3,
        "num_samples": 100,
        "num_classes": 2,
        "training": "local",
        "labels": "parties",
        "head": "fixed",
        "mechanism": "none",
        "embedding_dim": 2,
        "activation": "none",
        "start": "zero",
        "encoder": "linear",
        "batch_size": 20,
        "num_epochs": 3,
        "noise_multiplier": 20.0,
        "evaluation": "none",
        "label_epsilon": 4.0,
    }
    return Plan.of(**{**usual, **choices})


def joint_plan(**choices: Any) -> Plan:
    """Training by sums that are released in every round."""
    usual = {"num_parties": 3, "num_samples": 100, "num_classes": 2, "evaluation": "none", "num_epochs": 1}
    usual |= {"label_epsilon": 4.0}
    return Plan.of(**{**usual, **choices})


def train_order(plan: Plan | None = None, **changes: Any) -> JobSpec:
    usual: dict[str, Any] = {
        "work": Work.TRAIN,
        "federation": "people",
        "alignment": "first",
        "run": "monday",
        "run_id": RUN_ID,
        "plan": small_plan() if plan is None else plan,
    }
    return JobSpec(**{**usual, **changes})


def align_order(**changes: Any) -> JobSpec:
    usual: dict[str, Any] = {"work": Work.ALIGN, "federation": "people", "alignment": "first"}
    return JobSpec(**{**usual, **changes})


def modules_after_admission(home: SiteFolder, order: JobSpec, names: Iterable[str], cwd: Path) -> str:
    """Which of these modules a new process has loaded once it has admitted an order."""
    program = f"""
import sys
from datetime import datetime
from pbmvfl.deploy.job.admission import admit, own_row_ids
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec
admit(SiteFolder.at({str(home.path)!r}), JobSpec.from_text(sys.stdin.read()), datetime.now(), row_ids=own_row_ids)
print(sorted({set(names)!r} & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        input=order.to_text(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
