"""Revocation by the authority's commands, at kits and on NVFlare's port: who is refused, and which lists are."""

from __future__ import annotations

import datetime
import shutil
import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.drivers import tcp_driver

from pbmvfl.deploy.job.admission import check_members
from pbmvfl.deploy.job.agreement import disagreement, facts
from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.deploy.nvflare import authority, processes
from pbmvfl.deploy.nvflare import revocation as on_nvflares_port
from pbmvfl.deploy.site.job_spec import JobSpec, Work
from pbmvfl.errors import FederationError, PolicyError
from support.deployments import SERVER
from support.enrolled_federation import EVERYBODY, Enrolled


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Enrolled:
    return Enrolled.set_up(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def fed(made: Enrolled, tmp_path: Path) -> Enrolled:
    return made.copy(tmp_path / "copy")


# --- the authority ---


def test_a_revoked_organisation_is_refused_by_every_site_until_it_has_new_keys(fed: Enrolled) -> None:
    found = authority.revoke(fed.authority, "bank")
    assert (found.number, found.identities) == (1, {fed.home("bank").identity().public})
    for name in EVERYBODY:
        check_members(fed.home(name))  # the control: before the list is there
        fed.home(name).install_revocations(found.path)
        with pytest.raises(PolicyError, match="bank was revoked, by list 1 of the authority; remove it"):
            check_members(fed.home(name))
    with pytest.raises(FederationError, match=r"client\.crt was revoked, by list 1"):
        processes.check_start(fed.home("bank"))
    old = fed.request("bank")
    assert fed.asks().missing == ("bank",)
    with pytest.raises(FederationError, match="the identity of bank was revoked; let them make new keys"):
        fed.asks(old)  # its old keys, once more
    fed.renew(authority.request(fed.toml, "bank", fed.root / "bank", new_keys=True), replace=True)
    for name in EVERYBODY:
        check_members(fed.home(name))
    revoked = fed.home("clinic").revocations()
    assert revoked is not None
    assert fed.certificate("bank").value.serial_number not in revoked.entries


def test_after_a_renewal_old_certificates_can_be_revoked_and_the_newest_stays(fed: Enrolled) -> None:
    before = fed.certificate("bank").value.serial_number
    assert authority.revoke(fed.authority, "bank", old=True).entries == {}  # there is one, and it is the newest
    fed.renew()
    after = fed.certificate("bank").value.serial_number
    # Certificates begin at whole seconds: the renewal must be the newer one also within one second.
    found = authority.revoke(fed.authority, "bank", old=True)
    assert found.number == 2
    assert set(found.entries) == {before}
    assert after not in found.entries
    assert found.identities == frozenset()
    fed.home("clinic").install_revocations(found.path)
    check_members(fed.home("clinic"))


def test_the_label_holders_revocation_includes_the_lead(fed: Enrolled) -> None:
    found = authority.revoke(fed.authority, SERVER)
    lead = Certificate.read(fed.home(SERVER).lead_kit / "startup" / "client.crt")
    assert {lead.value.serial_number, fed.certificate(SERVER).value.serial_number} <= set(found.entries)


def test_a_name_without_a_certificate_is_named_and_nothing_is_written(fed: Enrolled) -> None:
    with pytest.raises(FederationError, match=r"name='shop': .* has issued no certificate of that name"):
        authority.revoke(fed.authority, "shop")
    assert not (fed.authority / authority.REVOKED).exists()


def test_revoked_entries_stay_in_every_later_list(fed: Enrolled) -> None:
    first = authority.revoke(fed.authority, "bank")
    second, third = authority.revoke(fed.authority, "hospital"), authority.revoke(fed.authority)
    assert (second.number, third.number) == (2, 3)
    assert set(first.entries) < set(second.entries) == set(third.entries)
    assert len(third.identities) == 2


# --- lists at a site ---


def test_an_older_list_is_refused_also_after_the_newer_one_was_deleted(fed: Enrolled) -> None:
    home, older = fed.home("hospital"), fed.root / "older.pem"
    shutil.copy(authority.revoke(fed.authority).path, older)
    newer = authority.revoke(fed.authority, "bank").path
    home.install_revocations(older)
    home.install_revocations(newer)
    with pytest.raises(FederationError, match="has number=1; permitted: 2 and more"):
        home.install_revocations(older)
    shutil.copy(older, home.revoked)  # by a copy of the folder that was restored
    with pytest.raises(FederationError, match="has number=1; permitted: 2 and more"):
        home.revocations()
    home.revoked.unlink()
    with pytest.raises(FederationError, match=r"revoked\.pem cannot be read"):
        home.revocations()


def test_a_stale_or_foreign_list_is_refused_and_the_one_before_stays(fed: Enrolled, tmp_path: Path) -> None:
    home = fed.home("hospital")
    good = authority.revoke(fed.authority)
    home.install_revocations(good.path)
    authority.init(fed.toml, tmp_path / "another")
    with pytest.raises(FederationError, match="is not signed by"):
        home.install_revocations(authority.revoke(tmp_path / "another").path)
    kept = home.revocations()
    assert kept is not None
    assert kept.number == 1
    with pytest.raises(FederationError, match="is stale"):
        kept.check_fresh(datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=366))


def test_sites_with_different_lists_start_no_job(fed: Enrolled) -> None:
    spec = JobSpec(work=Work.ALIGN, federation="people", alignment="people")
    clinic, bank = fed.home("clinic"), fed.home("bank")
    assert disagreement(facts(clinic, spec, rows=0), facts(bank, spec, rows=0), me="clinic", them="bank") is None
    bank.install_revocations(authority.revoke(fed.authority).path)  # it was withheld from the clinic, or by it
    words = disagreement(facts(clinic, spec, rows=0), facts(bank, spec, rows=0), me="clinic", them="bank")
    assert words == "number of the revocation list: clinic has '0', bank has '1'"


# --- NVFlare's port ---


@pytest.fixture
def guarded(fed: Enrolled, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of endpoints whose messages were used by a process of the clinic."""
    used: list[str] = []
    monkeypatch.setattr(on_nvflares_port, "_installed", [])
    monkeypatch.setattr(tcp_driver, "get_ssl_context", lambda params, ssl_server: params["context"])  # noqa: ARG005
    monkeypatch.setattr(CoreCell, "_process_received_msg", lambda *said: used.append(said[1].name))
    on_nvflares_port.install(fed.home(SERVER).revocation_watch())
    return used


class Connection:
    def __init__(self, certificate: Certificate) -> None:
        self.is_open = True
        serial = f"{certificate.value.serial_number:X}"
        self.sock = SimpleNamespace(getpeercert=lambda: {"serialNumber": serial})

    def close(self) -> None:
        self.is_open = False


def test_an_open_connection_is_closed_at_its_next_message(fed: Enrolled, guarded: list[str]) -> None:
    bank, hospital = Connection(fed.certificate("bank")), Connection(fed.certificate("hospital"))
    ends = [(SimpleNamespace(name="bank"), bank), (SimpleNamespace(name="hospital"), hospital)]
    for end in ends:
        CoreCell._process_received_msg(None, *end, None)
    assert guarded == ["bank", "hospital"]
    fed.home(SERVER).install_revocations(authority.revoke(fed.authority, "bank").path)
    for end in ends:
        CoreCell._process_received_msg(None, *end, None)
    assert guarded == ["bank", "hospital", "hospital"]
    assert (bank.is_open, hospital.is_open) == (False, True)


def test_a_listener_gets_every_newer_list_and_checks_while_it_is_fresh(
    fed: Enrolled, guarded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guarded == []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tcp_driver.get_ssl_context({"context": context}, True)
    assert not context.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    fed.home(SERVER).install_revocations(authority.revoke(fed.authority, "bank").path)
    end = SimpleNamespace(name="hospital"), Connection(fed.certificate("hospital"))
    CoreCell._process_received_msg(None, *end, None)
    assert context.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    assert context.cert_store_stats()["crl"] == 1
    monkeypatch.setattr("pbmvfl.deploy.link.revocation.RevocationList.is_fresh", lambda self: False)  # noqa: ARG005
    CoreCell._process_received_msg(None, *end, None)
    assert not context.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
