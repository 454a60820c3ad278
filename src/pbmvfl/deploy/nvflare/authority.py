"""Enrolment: each organisation generates its own keys, requests certificates, and receives only public texts.

init      the authority: a certificate that signs those of all others; its operator keeps its folder
request   every organisation: its own keys, and a request to send
approve   the authority: all requests of a federation become bundles to send back
package   every organisation: a kit from its own keys and what came back
revoke    the authority: a list of certificates that no site accepts any more
provision all of it at once, for trials

NVFlare makes keys, requests and certificates (its distributed provisioning); what is sent is ours, since it also
carries identities, and the kit's other files are written by `hardening` at the organisation.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.tool.cert.cert_commands import generate_csr_files, handle_cert_init, sign_csr_files

from pbmvfl._files import PRIVATE_FILE, make_private_folder, read_object, write_atomically
from pbmvfl.deploy.link import tls
from pbmvfl.deploy.link.revocation import RevocationList, Revoked, sign_list
from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.deploy.nvflare.hardening import harden
from pbmvfl.deploy.site.enrolment import Request, Signed, check_distinct, check_fingerprint, fingerprint
from pbmvfl.deploy.site.federation_file import FILE, FederationFile
from pbmvfl.deploy.site.folder import IDENTITY, PINS, WHO, SiteFolder
from pbmvfl.errors import FederationError

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 365
#: The authority's newest revocation list, and its folder of all certificates that it issued.
REVOKED, _ISSUED = "revoked.pem", "issued"


@dataclass(frozen=True, kw_only=True)
class Approval:
    """Result of a call of `approve`."""

    #: Bundle of each organisation; empty before all requests are there.
    bundles: dict[str, Path]
    #: Organisations whose request is missing.
    missing: tuple[str, ...]
    #: Fingerprint of the federation; empty before all requests are there.
    fingerprint: str


def init(federation_toml: Path, folder: Path, *, update: bool = False) -> FederationFile:
    """Create an authority in a folder of its own. Its holder can admit any organisation: keep it off line.

    With `update` an authority that exists takes a changed federation.toml, as when a party comes or goes: all have to
    request and package again, with the keys that they have.
    """
    federation = FederationFile.read(federation_toml)
    if update:
        before = FederationFile.read(folder / FILE)
        if before.name != federation.name:
            raise FederationError(f"{folder} is the authority of {before.name!r}, not of {federation.name!r}")
        write_atomically(folder / FILE, _text(federation_toml))
        return federation
    if folder.exists() and any(folder.iterdir()):
        raise FederationError(f"{folder} is not empty and was not touched; choose another folder")
    make_private_folder(folder)
    with _nvflare(f"the authority in {folder}"), tempfile.TemporaryDirectory() as scratch:
        profile = Path(scratch) / "profile.yml"
        profile.write_text(f"name: {federation.name}\n")
        handle_cert_init(
            Namespace(
                profile=str(profile),
                output_dir=str(folder),
                org=None,
                valid_days=AUTHORITY_DAYS,
                deploy_version=None,
                force=False,
            )
        )
    (folder / "rootCA.key").chmod(PRIVATE_FILE)
    write_atomically(folder / FILE, _text(federation_toml))
    return federation


def request(federation_toml: Path, name: str, path: Path, *, new_keys: bool = False) -> Path:
    """Create an organisation's folder with its own keys, and return the file to send.

    Existing keys are kept, unless `new_keys` replaces them: after a theft, when the old ones were revoked.
    """
    federation = FederationFile.read(federation_toml)
    if name != federation.server:
        federation.index_of(name)
    if (path / WHO).exists() and SiteFolder.at(path).name != name:
        raise FederationError(f"{path} is the folder of {SiteFolder.at(path).name}, not of {name}; choose another")
    make_private_folder(path)
    write_atomically(path / FILE, _text(federation_toml))
    SiteFolder(path.resolve()).write_name(name)
    site_folder = SiteFolder.at(path)
    folder = site_folder.path / "request"
    if new_keys:
        shutil.rmtree(folder, ignore_errors=True)
        (site_folder.path / IDENTITY).unlink(missing_ok=True)
    identity = site_folder.make_identity()
    make_private_folder(folder)
    wanted = Request(
        federation=federation.digest,
        name=name,
        identity=identity.public,
        site=_csr(folder, name, name, "server" if site_folder.is_server else "client"),
        lead=_csr(folder, federation.lead, name, "lead") if site_folder.is_server else "",
    )
    bundle = folder / f"{name}.request.json"
    wanted.write(bundle, identity)
    return bundle


def approve(
    folder: Path,
    requests: Sequence[Path] = (),
    *,
    replace: bool = False,
    days: int = CERTIFICATE_DAYS,
) -> Approval:
    """Sign the requests of a whole federation; those of earlier calls are remembered.

    Once all organisations have sent theirs, every organisation's bundle is made, with certificates for `days` from now.
    A repeated call renews them. A second request in a name with another key is refused unless it is to `replace` the
    first.
    """
    federation, revoked = FederationFile.read(folder / FILE), _revoked(folder)
    known = folder / "requests"
    make_private_folder(known)
    accepted: dict[str, tuple[Path, Request]] = {}
    for path in requests:
        wanted = Request.read(path, federation)
        if (twice := accepted.get(wanted.name)) is not None and twice[1] != wanted:
            raise FederationError(f"{twice[0]} and {path} are both of {wanted.name}, with different keys; ask them")
        accepted[wanted.name] = (path, wanted)
        before = known / f"{wanted.name}.request.json"
        if before.exists() and _keys_in(before) != _keys_in(path) and not replace:
            raise FederationError(
                f"{path}: {wanted.name} has asked before with another key; call them, and if it is true that they made "
                "a new one: --replace"
            )
    for path in known.glob("*.request.json"):
        with contextlib.suppress(FederationError):  # made for an older federation.toml: must be requested again
            old = Request.read(path, federation)
            accepted.setdefault(old.name, (path, old))
    names = (federation.server, *federation.parties)
    accepted = {name: accepted[name] for name in names if name in accepted}
    for name, (path, wanted) in accepted.items():
        if revoked is not None and wanted.identity in revoked.identities:
            raise FederationError(
                f"{path}: the identity of {name} was revoked; let them make new keys with "
                "`pbmvfl federation request --new-keys`, and compare fingerprints"
            )
    identities = {name: wanted.identity for name, (_, wanted) in accepted.items()}
    check_distinct(identities, "requests")
    keys = {name: wanted.keys(federation, path) for name, (path, wanted) in accepted.items()}
    check_distinct({f"{name} ({place})": key for name in keys for place, key in enumerate(keys[name])}, "requests")
    for name, (path, _) in accepted.items():
        if path.parent.resolve() != known.resolve():
            shutil.copyfile(path, known / f"{name}.request.json")
    missing = tuple(name for name in names if name not in accepted)
    if missing:
        return Approval(bundles={}, missing=missing, fingerprint="")
    root = Certificate.read(folder / "rootCA.pem")
    bundles = {}
    make_private_folder(folder / "signed")
    for name, (_, wanted) in accepted.items():
        server = name == federation.server
        bundles[name] = folder / "signed" / f"{name}.signed.json"
        Signed(
            federation=federation.digest,
            name=name,
            authority=root.path.read_text(),
            site=_sign(folder, wanted.site, "server" if server else "client", days, federation),
            lead=_sign(folder, wanted.lead, "lead", days, federation) if server else "",
            identities=identities,
            revoked="" if revoked is None else revoked.pem.decode(),
        ).write(bundles[name])
    return Approval(bundles=bundles, missing=(), fingerprint=fingerprint(federation, root, identities))


def revoke(folder: Path, name: str | None = None, *, old: bool = False, days: int = CERTIFICATE_DAYS) -> RevocationList:
    """Write the next revocation list, and return it.

    Args:
        folder: The authority's folder.
        name: Organisation whose certificates are revoked, and with them its identity: it lost its keys, or leaves. None
            to issue the same list for longer.
        old: Revoke all certificates of the organisation but the newest, and keep its identity.
        days: Validity of the list.

    Raises:
        FederationError: If no certificate of that name was issued.
    """
    federation, before = FederationFile.read(folder / FILE), _revoked(folder)
    entries = {} if before is None else dict(before.entries)
    if name is not None:
        names = {name, federation.lead} if name == federation.server else {name}
        issued = [each for each in map(Certificate.read, (folder / _ISSUED).glob("*.pem")) if each.name in names]
        if not issued:
            raise FederationError(
                f"name={name!r}: {folder} has issued no certificate of that name; nothing was revoked"
            )
        newest = {each.name: each for each in sorted(issued, key=_moment_of_issue)}
        if old:
            issued = [each for each in issued if each is not newest[each.name]]
        request_of = folder / "requests" / f"{name}.request.json"
        identity = b"" if old or not request_of.exists() else bytes.fromhex(_keys_in(request_of)[0])
        now = datetime.datetime.now(datetime.UTC)
        for serial in (each.value.serial_number for each in issued):
            if serial not in entries or (identity and not entries[serial].identity):
                entries[serial] = Revoked(serial=serial, since=now, identity=identity)
        if not old:
            request_of.unlink(missing_ok=True)  # no certificate is made for these keys again
    return sign_list(
        folder / REVOKED,
        folder / "rootCA.pem",
        folder / "rootCA.key",
        entries.values(),
        number=1 + (0 if before is None else before.number),
        days=days,
    )


def _moment_of_issue(certificate: Certificate) -> tuple[datetime.datetime, int]:
    """Return when a certificate was made; its own date has whole seconds."""
    return certificate.not_before, certificate.path.stat().st_mtime_ns


def _revoked(folder: Path) -> RevocationList | None:
    return RevocationList.read(folder / REVOKED, folder / "rootCA.pem") if (folder / REVOKED).exists() else None


def _keys_in(path: Path) -> tuple[str, str, str]:
    """Return identity and certificate requests of a request that was checked, of an earlier federation.toml or not."""
    said = read_object(path, {"identity": str, "site": str, "lead": str}, FederationError)
    return said["identity"], said["site"], said["lead"]


def package(
    site_folder: SiteFolder, bundle: Path, *, fingerprint_said: str | None = None, replace: bool = False
) -> str:
    """Make a kit from the own keys and the authority's reply, and return the federation's fingerprint.

    With `fingerprint_said` nothing is written unless it is the same. Identities that differ from those pinned before
    are refused, unless they are to `replace` the old ones.
    """
    federation = site_folder.federation
    signed = Signed.read(bundle, federation)
    if signed.name != site_folder.name:
        raise FederationError(f"{bundle} is for {signed.name[:40]!r}, and this is the folder of {site_folder.name}")
    if signed.identities[site_folder.name] != site_folder.identity().public:
        raise FederationError(
            f"{bundle} has another identity for {site_folder.name} than the one here: somebody swapped it, or this "
            "organisation asked again since; do not use it"
        )
    authority = _part(bundle, "authority", signed.authority)
    if (words := tls.fault(authority, name=authority.name, authority=authority)) is not None:
        raise FederationError(words)
    kits = [(site_folder.kit, site_folder.certificate.stem, site_folder.name, "site", signed.site)]
    if site_folder.is_server:
        kits.append((site_folder.lead_kit, "client", federation.lead, "lead", signed.lead))
    keys = {name: site_folder.path / "request" / f"{name}.key" for _, _, name, _, _ in kits}
    for _, _, name, part, pem in kits:
        tls.check(_part(bundle, part, pem), keys[name], authority, name=name)
    found = fingerprint(federation, authority, signed.identities)
    if fingerprint_said is not None:
        check_fingerprint(fingerprint_said, found)
    _check_pins(site_folder, signed, replace)
    for kit, role, name, _, pem in kits:
        startup = kit / "startup"
        make_private_folder(startup)
        write_atomically(startup / f"{role}.key", keys[name].read_bytes(), mode=PRIVATE_FILE)
        write_atomically(startup / f"{role}.crt", pem, mode=PRIVATE_FILE)
        write_atomically(startup / "rootCA.pem", signed.authority, mode=PRIVATE_FILE)
    site_folder.write_pins(
        signed.identities[federation.server], {name: signed.identities[name] for name in federation.parties}
    )
    harden(site_folder)
    site_folder.pins()
    if signed.revoked:
        site_folder.install_revocations(bundle, signed.revoked.encode())
    return found


def _part(bundle: Path, name: str, pem: str) -> Certificate:
    return Certificate.parse(pem.encode(), Path(f"{bundle}: {name}"))


def _check_pins(site_folder: SiteFolder, signed: Signed, replace: bool) -> None:
    """Refuse changed identities of other organisations; the own one may be new, as its owner knows."""
    path = site_folder.path / PINS
    if replace or not path.exists():
        return
    said = read_object(path, {"server": str, "parties": dict}, FederationError)
    old = {**said["parties"], site_folder.federation.server: said["server"]}
    changed = [
        name
        for name, identity in signed.identities.items()
        if name != site_folder.name and old.get(name, identity.hex()) != identity.hex()
    ]
    if changed:
        raise FederationError(
            f"the identity of {', '.join(sorted(changed))} is another one than before; call them, and if it is true "
            "that they made a new one: --replace"
        )


def _csr(folder: Path, name: str, owner: str, kind: str) -> str:
    """Return the certificate request; its key is made once, here, and stays."""
    path, key = folder / f"{name}.csr", folder / f"{name}.key"
    if not (path.exists() and key.exists()):
        key.unlink(missing_ok=True)
        with _nvflare(f"the request of {name}"):
            generate_csr_files(name=name, org=owner.replace("-", "_"), cert_type=kind, output_dir=str(folder))
        key.chmod(PRIVATE_FILE)
    return path.read_text()


def _sign(folder: Path, csr: str, kind: str, days: int, federation: FederationFile) -> str:
    with _nvflare("a certificate"), tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.csr"
        path.write_text(csr)
        made: dict[str, Any] = sign_csr_files(
            csr_path=str(path),
            ca_dir=str(folder),
            output_dir=str(Path(scratch) / "signed"),
            cert_type=kind,
            valid_days=days,
            server_default_host=federation.host if kind == "server" else None,
            server_additional_hosts=[federation.server] if kind == "server" else None,
        )
        signed = Certificate.read(Path(made["signed_cert"]))
        make_private_folder(folder / _ISSUED)
        write_atomically(folder / _ISSUED / f"{signed.value.serial_number:x}.pem", signed.path.read_text())
        return signed.path.read_text()


@contextlib.contextmanager
def _nvflare(what: str) -> Iterator[None]:
    """Run an NVFlare command-line function, which prints its errors and exits, and raise them instead."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        words = " ".join(said.getvalue().split())[:300]
        raise FederationError(f"{what} could not be made: {words}") from None


def _text(federation_toml: Path) -> str:
    return (federation_toml / FILE if federation_toml.is_dir() else federation_toml).read_text()


def provision(federation_toml: Path, out: Path) -> dict[str, SiteFolder]:
    """Create a folder under `out` for every organisation of a federation, ready to start.

    For trials on one machine only: one process takes the steps of all, and its user has seen every key.
    """
    federation = FederationFile.read(federation_toml)
    names = (federation.server, *federation.parties)
    for name in names:
        if (out / name).exists():
            raise FederationError(f"{out / name} exists already and was not touched; choose another folder")
    make_private_folder(out)
    try:
        with tempfile.TemporaryDirectory(prefix=".provision-", dir=out) as scratch:
            # The authority's key is gone when this ends: nobody can be added later.
            folder = Path(scratch) / "authority"
            init(federation_toml, folder)
            requests = [request(federation_toml, name, out / name) for name in names]
            bundles = approve(folder, requests).bundles
            for name in names:
                package(SiteFolder.at(out / name), bundles[name])
                shutil.rmtree(out / name / "request")  # it is for asking again
    except BaseException:
        for name in names:
            shutil.rmtree(out / name, ignore_errors=True)
        raise
    return {name: SiteFolder.at(out / name) for name in names}
