"""The operators' walk-throughs: commands of the page are executed, from a certificate's renewal to another party.

Enrolment, revocation and ledgers run by the program's own commands, as the page has them. `align` and `submit` run as
jobs of threads over the real link, since kits take a minute to start; what a kit checks before it starts is called.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from pbmvfl.deploy.alignment.runner import LabelRows
from pbmvfl.deploy.job.link_factory import party_link, server_link
from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.deploy.nvflare import processes
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import Ending
from pbmvfl.errors import FederationError, LinkError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.plan import Plan
from support.command_line import run_command
from support.deploy_homes import Tables, align_order, run_job, train_order, write_data
from support.federation_texts import SERVER, federation_text, free_ports

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "operate.md"
BEFORE, AFTER = ("bank", "hospital", "insurer"), ("bank", "hospital", "shop")
ROWS, PORTS = 60, free_ports(2)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside these tests")]


class Town:
    """Organisations beside each other, each with its folder; the authority's is `authority`."""

    tables = Tables.drawn(rows=ROWS, parties=(*BEFORE, "shop"))

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_up(self) -> None:
        self.agree(BEFORE)
        self.run("authority", "federation init federation.toml --authority authority")
        everybody = (SERVER, *BEFORE)
        for name in everybody:
            self.run(name, f"federation request ../federation.toml --name {name}")
        self.run(
            "authority", f"federation approve authority {' '.join(f'{n}/request/{n}.request.json' for n in everybody)}"
        )
        for name in everybody:
            self.run(name, f"federation package ../authority/signed/{name}.signed.json")
        write_data(self.homes(BEFORE), self.tables)

    def agree(self, parties: tuple[str, ...]) -> None:
        port, line_port = PORTS
        text = federation_text(
            parties, host="127.0.0.1", port=port, line_port=line_port, patience=5, plan="epsilon = 8"
        )
        (self.root / "federation.toml").write_text(text)

    def home(self, name: str) -> SiteFolder:
        return SiteFolder.at(self.root / name)

    def homes(self, parties: tuple[str, ...]) -> dict[str, SiteFolder]:
        return {name: self.home(name) for name in (SERVER, *parties)}

    def run(self, name: str, command: str) -> None:
        place = self.root if name == "authority" else self.root / name
        place.mkdir(mode=0o700, exist_ok=True)
        assert run_command(*shlex.split(command), cwd=place) == 0, f"{name}$ pbmvfl {command}"

    def follow(self, title: str, block: int = 0) -> None:
        """Execute the commands of one block of a section of the page, each at its organisation."""
        section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
        lines = re.findall(r"```console\n(.*?)```", section, flags=re.S)[block].replace("\\\n", " ").splitlines()
        assert lines
        for line in lines:
            name, command = re.fullmatch(r"(\w+)\$ +pbmvfl (.*)", line).groups()
            job = shlex.split(command)
            if job[0] == "align":
                assert self.align(AFTER, job[1]).ending is Ending.DONE
            elif job[0] == "submit":
                assert self.train(AFTER, run=job[1], alignment=job[3]).ending is Ending.DONE
            else:
                self.run(name, command)

    def align(self, parties: tuple[str, ...], name: str):
        homes = self.homes(parties)
        return run_job(homes, align_order(homes, name))

    def train(self, parties: tuple[str, ...], *, run: str, alignment: str):
        server = self.home(SERVER)
        rows = LabelRows.load(server, alignment)
        plan = Plan.of(
            num_parties=len(server.federation.parties),
            num_samples=rows.num_rows,
            num_classes=len(rows.class_names),
            training="local",
            labels="parties",
            head="fixed",
            mechanism="none",
            embedding_dim=2,
            activation="none",
            start="zero",
            encoder="linear",
            batch_size=ROWS,
            num_epochs=2,
            noise_multiplier=20.0,
            evaluation="none",
            label_epsilon=1.0,
        )
        return run_job(self.homes(parties), train_order(plan, run=run, alignment=alignment))

    def sessions(self, name: str) -> list[str]:
        with contextlib.closing(Ledger(self.home(name).ledger, read_only=True)) as ledger:
            return [entry.session for entry in ledger.sessions("people")]

    def serial(self, name: str) -> int:
        return Certificate.read(self.home(name).certificate).value.serial_number


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    town = Town(tmp_path_factory.mktemp("town"))
    town.set_up()
    return town


@pytest.fixture
def town(made, tmp_path):
    shutil.copytree(made.root, tmp_path / "town")
    return Town(tmp_path / "town")


def test_a_party_leaves_and_another_comes_and_ledgers_keep_what_was_charged(town):
    assert town.align(BEFORE, "people").ending is Ending.DONE
    assert town.train(BEFORE, run="run-001", alignment="people").ending is Ending.DONE
    charged = {name: town.sessions(name) for name in BEFORE}
    assert all(charged.values())

    town.follow("Revoke a certificate")
    refused = town.train(BEFORE, run="run-of-the-insurer", alignment="people")
    assert refused.ending is Ending.REFUSED
    assert "insurer was revoked, by list 1 of the authority" in refused.words

    town.agree(AFTER)
    town.follow("Remove a party, add another")
    write_data({name: town.home(name) for name in (SERVER, "shop")}, town.tables)
    town.follow("Remove a party, add another", block=1)

    assert town.home(SERVER).revocations().number == town.home("shop").revocations().number == 1
    assert LabelRows.load(town.home(SERVER), "people-2").num_rows == ROWS
    for name in ("bank", "hospital"):
        kept, added = town.sessions(name)[: len(charged[name])], town.sessions(name)[len(charged[name]) :]
        assert kept == charged[name]
        assert added
    assert town.sessions("insurer") == charged["insurer"]
    assert len(town.sessions("shop")) == 1


def test_the_removed_partys_kit_is_refused(town):
    town.follow("Revoke a certificate")
    insurer = town.home("insurer")  # it has no list, as one that it was not sent, or does not want
    assert insurer.revocations() is None
    words = []
    with contextlib.closing(server_link(town.home(SERVER), "a-job")):
        try:
            party_link(insurer, "a-job").serve(lambda channel, body: b"")  # noqa: ARG005
        except LinkError as error:
            words.append(str(error))
    assert "party=insurer: its certificate was revoked" in words[0]
    insurer.install_revocations(town.root / "authority" / "revoked.pem")
    with pytest.raises(FederationError, match="was revoked, by list 1"):
        processes.check_start(insurer)


def test_after_a_renewal_the_old_certificate_is_refused_and_the_new_one_taken(town):
    before = town.serial("bank")
    town.follow("Renew certificates")
    assert town.serial("bank") != before
    revoked = town.root / "authority" / "revoked.pem"
    for name in (SERVER, *BEFORE):
        town.run(name, f"federation install-list {revoked}")
    assert set(town.home(SERVER).revocations().entries) == {before}
    assert town.align(BEFORE, "people").ending is Ending.DONE
