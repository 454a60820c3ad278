"""Revoked certificates: which lists are believed, and what becomes of connections of a revoked site."""

from __future__ import annotations

import datetime
import os
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from pbmvfl.deploy.link import revocation
from pbmvfl.deploy.link.grpc_party import GrpcPartyLink
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.link.revocation import RevocationList, RevocationWatch, Revoked
from pbmvfl.deploy.link.tls import Certificate, Credentials, party_context
from pbmvfl.errors import FederationError, LinkError, PartyLost
from support.certificates import Authority
from support.line_parties import SERVER, Federation, echo, until

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
IDENTITY = bytes(range(32))


def serial_of(credentials: Credentials) -> int:
    return Certificate.read(credentials.certificate).value.serial_number


def sign(authority: Authority, path: Path, *serials: int, number: int = 1, days: int = 30) -> RevocationList:
    entries = [Revoked(serial=each, since=NOW, identity=IDENTITY) for each in serials]
    root = authority.folder / "rootCA.pem"
    return revocation.sign_list(path, root, authority.key_file(), entries, number=number, days=days)


# --- lists ---


def test_a_list_says_what_was_signed_and_openssl_reads_the_same(tmp_path):
    authority = Authority(tmp_path / "ca")
    made = sign(authority, tmp_path / "revoked.pem", 5, 7, number=3)
    assert (made.number, set(made.entries), made.identities) == (3, {5, 7}, {IDENTITY})
    assert RevocationList.read(made.path, authority.folder / "rootCA.pem") == made
    found = x509.load_pem_x509_crl(made.path.read_bytes())
    assert {each.serial_number for each in found} == {5, 7}


def refusal(authority: Authority, bank: Credentials, found: RevocationList | None) -> str:
    """What OpenSSL itself, which shares no code with ours, says of a server's certificate with this list."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(bank.certificate, bank.private_key)
    client = party_context(authority.issue("clinic"))
    if found is not None:
        client.load_verify_locations(cafile=str(found.path))
        client.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    sides = [client.wrap_bio(*ends[0], server_hostname="bank"), server.wrap_bio(*ends[1], server_side=True)]
    for _ in range(4):
        for own, other in ((0, 1), (1, 0)):
            try:
                sides[own].do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            ends[other][0].write(ends[own][1].read())
    return ""


def test_openssl_refuses_a_certificate_by_our_list_and_no_other(tmp_path):
    authority = Authority(tmp_path / "ca")
    bank, shop = authority.issue("bank"), authority.issue("bank")
    found = sign(authority, tmp_path / "revoked.pem", serial_of(bank))
    assert refusal(authority, bank, found) == "certificate revoked"
    assert refusal(authority, shop, found) == ""
    assert refusal(authority, bank, None) == ""


def test_lists_that_are_not_the_authoritys_are_named(tmp_path):
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    path, root = tmp_path / "revoked.pem", authority.folder / "rootCA.pem"
    sign(other, path, 5)  # an authority of the same name, with another key
    with pytest.raises(FederationError, match=r"revoked\.pem is not signed by"):
        RevocationList.read(path, root)
    sign(authority, path, 5)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\nAAAA", 2))
    with pytest.raises(FederationError, match=r"is no revocation list|is not signed"):
        RevocationList.read(path, root)
    with pytest.raises(FederationError, match="has number=0; permitted: 1 and more"):
        sign(authority, path, 5, number=0)
    with pytest.raises(FederationError, match="cannot be read"):
        RevocationList.read(tmp_path / "none.pem", root)


def test_a_stale_list_is_named_with_both_dates(tmp_path):
    found = sign(Authority(tmp_path / "ca"), tmp_path / "revoked.pem", 5, days=30)
    found.check_fresh(found.until)
    with pytest.raises(FederationError, match=r"number=1 is stale: it was valid until .* get a newer one"):
        found.check_fresh(found.until + datetime.timedelta(seconds=1))


def test_a_running_site_takes_newer_lists_and_no_older_or_damaged_one(tmp_path):
    authority, path = Authority(tmp_path / "ca"), tmp_path / "revoked.pem"
    watch = RevocationWatch(path, authority.folder / "rootCA.pem")
    assert not watch.revokes(5)
    sign(authority, path, 5, number=2)
    assert watch.revokes(5)
    sign(authority, path, number=1)  # an older list, without the certificate
    assert watch.revokes(5)
    path.write_text("nothing")
    assert watch.revokes(5)
    os.unlink(path)
    assert watch.revokes(5)
    sign(authority, path, 5, 6, number=3)
    assert watch.revokes(6)


# --- connections ---


class Line:
    """A federation whose server has a revocation list."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "revoked.pem"
        watch = RevocationWatch(self.path, folder / "ca" / "rootCA.pem")
        self.federation = Federation(folder, ["bank", "shop"], choices={"revocations": watch})
        self.watch = watch

    def revoke(self, *serials: int, number: int = 1) -> None:
        sign(self.federation.authority, self.path, *serials, number=number)


def serving(end: GrpcPartyLink) -> tuple[threading.Thread, list[str]]:
    """A party as a thread, and the words that it ended with."""
    ended: list[str] = []

    def serve() -> None:
        try:
            end.serve(echo)
        except LinkError as error:
            ended.append(str(error))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, ended


@pytest.fixture
def line(tmp_path):
    made = Line(tmp_path)
    with made.federation:
        yield made


def test_a_revoked_party_is_refused_at_connect_and_both_sides_are_told(line):
    site = line.federation.site("bank")
    line.revoke(serial_of(site.credentials))
    line.federation.dial("shop", echo)
    with pytest.raises(LinkError, match="it refused this site: party=bank: its certificate was revoked"):
        site.line().serve(echo)
    with pytest.raises(PartyLost) as lost:
        line.federation.line.join(timeout=0.1)
    assert "it was last refused: party=bank: its certificate was revoked" in str(lost.value.reasons[0])
    assert list(line.federation.line.alive) in ([], ["shop"])


def test_a_renewed_certificate_is_accepted_while_the_old_one_is_revoked(line):
    line.revoke(serial_of(line.federation.authority.issue("bank")))
    line.federation.dial("bank", echo)
    assert line.federation.line.ask({0: b"x"}, channel=Channel.SETUP).received == {0: b"\1x"}


def test_a_connected_party_is_ended_at_the_next_look_and_cannot_come_back(line):
    site = line.federation.site("bank")
    end = site.line()
    thread, ended = serving(end)
    line.federation.dial("shop", echo)
    line.federation.line.join(timeout=60)
    line.federation.line.check_revocations()
    assert len(line.federation.line.alive) == 2  # there is nothing to end yet
    line.revoke(serial_of(site.credentials))
    line.federation.line.check_revocations()
    answers = line.federation.line.ask({0: b"x", 1: b"x"}, channel=Channel.PROTOCOL)
    assert dict(answers.received) == {1: b"\2x"}
    assert answers.lost[0].startswith("its certificate was revoked by the federation's authority")
    thread.join(timeout=60)
    assert "it refused this site: party=bank: its certificate was revoked" in ended[0]


def test_the_look_comes_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("pbmvfl.deploy.link.grpc_server.LOOK_SECONDS", 0.01)
    line = Line(tmp_path)
    with line.federation:
        end = line.federation.site("bank")
        serving(end.line())
        assert until(lambda: "bank" in line.federation.line.alive)
        line.revoke(serial_of(end.credentials))
        assert until(lambda: "bank" not in line.federation.line.alive)


def server_serial(federation: Federation) -> int:
    (path,) = federation.authority.folder.glob(f"{SERVER}-*.crt")
    return Certificate.read(path).value.serial_number


def test_a_party_does_not_speak_to_a_revoked_server(line):
    line.revoke(server_serial(line.federation))
    asked = []
    end = line.federation.site("bank").line(revocations=line.watch)
    with pytest.raises(LinkError, match="server: its certificate was revoked"):
        end.serve(lambda channel, body: asked.append(body) or echo(channel, body))
    assert not asked


def test_a_party_leaves_a_server_that_is_revoked_while_they_are_connected(line):
    line.revoke(1)
    end = line.federation.site("bank").line(revocations=line.watch)
    thread, ended = serving(end)
    assert line.federation.line.ask({0: b"x"}, channel=Channel.SETUP).received == {0: b"\1x"}
    end.check_revocations()
    assert line.federation.line.ask({0: b"y"}, channel=Channel.SETUP).received == {0: b"\1y"}
    line.revoke(1, server_serial(line.federation), number=2)
    end.check_revocations()
    thread.join(timeout=60)
    assert ended[0].startswith("server: its certificate was revoked")


def test_a_party_leaves_a_job_with_a_revoked_organisation_that_the_server_lets_in(tmp_path):
    with Federation(tmp_path, ["bank", "shop"]) as lax:  # its server has no list
        path = tmp_path / "revoked.pem"
        watch = RevocationWatch(path, lax.authority.folder / "rootCA.pem", [bytes(32), IDENTITY])
        end = lax.site("bank").line(revocations=watch)
        thread, ended = serving(end)
        end.check_revocations()
        assert lax.line.ask({0: b"x"}, channel=Channel.SETUP).received == {0: b"\1x"}
        sign(lax.authority, path, 99)  # a certificate of the shop's, with its identity
        end.check_revocations()
        thread.join(timeout=60)
    assert "an organisation that takes part was revoked" in ended[0]
