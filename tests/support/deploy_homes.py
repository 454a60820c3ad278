"""Organisations' folders on one machine, without NVFlare: certificates made here, small tables, jobs as threads."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pbmvfl._files import make_private_folder
from pbmvfl.deploy.alignment.runner import LabelRows, Request
from pbmvfl.deploy.job.process import PartyJob, ServerJob
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobResult, JobSpec, Work
from pbmvfl.plan.plan import Plan
from support.certificates import Authority
from support.federation_texts import PARTIES, SERVER, federation_text, free_ports

DATASET = "people"


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What every organisation holds: rows under ids, in an order of its own, and some that others have not."""

    ids: tuple[str, ...]
    features: Mapping[str, npt.NDArray[np.float64]]
    labels: npt.NDArray[np.int64]

    @classmethod
    def drawn(cls, *, rows: int = 40, columns: int = 3, parties: Sequence[str] = PARTIES, seed: int = 0) -> Tables:
        draw = np.random.default_rng(seed)
        labels = draw.integers(0, 2, rows)
        drawn = {name: draw.random((rows, columns)) * 0.5 + labels[:, None] * 0.4 for name in parties}
        features = {name: np.asarray(np.round(each, 6), dtype=np.float64) for name, each in drawn.items()}
        ids = tuple(f"person-{number:06d}" for number in draw.choice(10**6, rows, replace=False))
        return cls(ids=ids, features=features, labels=labels)


def make_homes(
    folder: Path,
    tables: Tables,
    *,
    parties: Sequence[str] = PARTIES,
    patience: float = 90,
    limit: float | None = 50,
    plan: str = "epsilon = 8",
) -> dict[str, SiteFolder]:
    """A folder for each organisation, ready for jobs over the line. Without a `limit` the rows are said to be made up,
    and plans without noise are taken, too."""
    port, line_port = free_ports(2)
    text = federation_text(parties, host="127.0.0.1", port=port, line_port=line_port, patience=patience, plan=plan)
    authority = Authority(folder / "authority")
    homes = {}
    for name in (SERVER, *parties):
        home = SiteFolder(folder / name)
        make_private_folder(home.path)
        (home.path / "federation.toml").write_text(text)
        home.write_name(name)
        home.make_identity()
        issued = authority.issue(name)
        home.certificate.parent.mkdir(parents=True)
        shutil.copy(issued.certificate, home.certificate)
        shutil.copy(issued.private_key, home.private_key)
        shutil.copy(issued.authority, home.authority)
        homes[name] = home
    pins = {name: homes[name].identity().public for name in parties}
    for home in homes.values():
        home.write_pins(homes[SERVER].identity().public, pins)
    write_data(homes, tables, limit=limit)
    return homes


def write_data(homes: Mapping[str, SiteFolder], tables: Tables, *, limit: float | None = 50) -> None:
    """Everybody's table and policy."""
    for place, name in enumerate(name for name in homes if name != SERVER):
        _write_party(homes[name], tables, name, seed=place, limit=limit)
    _write_labels(homes[SERVER], tables)


def _write_policy(home: SiteFolder, text: str) -> None:
    home.policy.write_text(text)
    home.policy.chmod(0o600)


def _write_party(home: SiteFolder, tables: Tables, name: str, *, seed: int, limit: float | None) -> None:
    rows = tables.features[name]
    columns = [f"{name}_{number}" for number in range(rows.shape[1])]
    order = np.random.default_rng(1000 + seed).permutation(len(rows))
    lines = [",".join(["id", *columns])]
    lines += [",".join([tables.ids[row], *(repr(float(value)) for value in rows[row])]) for row in order]
    lines.append(",".join([f"only-at-{name}", *("0.5" for _ in columns)]))
    (home.path / "rows.csv").write_text("\n".join(lines) + "\n")
    schema = {"columns": {column: {"range": [0, 1]} for column in columns}}
    (home.path / "schema.json").write_text(json.dumps(schema))
    spends = f'[[limit]]\nepsilon = {limit}\ndelta = 1e-5\nunit = "cell"\naccounting = "strict"\n'
    _write_policy(
        home,
        f'[data]\nfile = "rows.csv"\nid = "id"\nschema = "schema.json"\ndataset = "{DATASET}"\n'
        + ("made_up = true\n" if limit is None else spends),
    )


def _write_labels(home: SiteFolder, tables: Tables) -> None:
    names = ("healthy", "sick")
    lines = ["id,label", *(f"{id},{names[label]}" for id, label in zip(tables.ids, tables.labels, strict=True))]
    lines.append("only-at-the-clinic,sick")
    (home.path / "labels.csv").write_text("\n".join(lines) + "\n")
    data = '[data]\nfile = "labels.csv"\nid = "id"\nlabel = "label"\n'
    _write_policy(home, data + "[plan]\nlabels_in_clear = true\n")  # most tests are about columns


# --- orders ---


def align_order(homes: Mapping[str, SiteFolder], name: str = "people") -> JobSpec:
    server = homes[SERVER]
    Request.of(server).write(server.request(name))
    return JobSpec(work=Work.ALIGN, federation="people", alignment=name)


def train_order(plan: Plan, *, run: str = "run-001", run_id: str | None = None, alignment: str = "people") -> JobSpec:
    return JobSpec(
        work=Work.TRAIN,
        federation="people",
        alignment=alignment,
        run=run,
        run_id=secrets.token_hex(8) if run_id is None else run_id,
        plan=plan,
    )


def run_job(homes: Mapping[str, SiteFolder], order: JobSpec, *, servers: JobSpec | None = None) -> JobResult:
    """One job, every role in a thread of its own; how it ended. The server may have another order than the parties."""
    job = secrets.token_hex(8)
    parties = [PartyJob(home, order, job=job) for name, home in homes.items() if name != SERVER]
    served = ServerJob(homes[SERVER], servers or order, job=job)
    threads = [threading.Thread(target=each.run, daemon=True) for each in parties]
    for thread in threads:
        thread.start()
    served.run()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a party's job did not end"
    assert served.result is not None
    return served.result


def aligned(homes: Mapping[str, SiteFolder], name: str = "people") -> LabelRows:
    """The label holder's rows after an alignment that must go well."""
    result = run_job(homes, align_order(homes, name))
    assert result.ending == "done", result.words
    return LabelRows.load(homes[SERVER], name)
