"""One organisation's folder: everything of it that a federation needs, and that stays with it.

federation.toml    what all agree on                     public
pins.json          everybody's identity                  public, compared by phone
revoked.pem        revoked certificates, if there are    public, signed by the authority
identity.key       this organisation's own               secret, made here, never leaves
request/           NVFlare's key and request             secret, made here
kit/               NVFlare's startup kit: startup/ has certificates, local/ this site's rules
lead/              the kit of who submits                only at the label holder
policy.toml        what this organisation accepts        private
ledger.sqlite      what its rows or labels have spent    private
labels/            labels that were drawn                private, only at the label holder
alignments/NAME/   its rows in the common order          private
runs/RUN/          checkpoints, log of a run             private
models/RUN/        its part of a trained model           private
logs/ status.json  for its own operators
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pbmvfl._files import PRIVATE_FILE, make_private_folder, read_object, write_atomically
from pbmvfl.crypto.key_exchange import IDENTITY_BYTES, Identity
from pbmvfl.deploy.link.revocation import RevocationList, RevocationWatch
from pbmvfl.deploy.link.tls import Credentials
from pbmvfl.deploy.site.federation_file import FILE, FederationFile
from pbmvfl.errors import FederationError

PINS, IDENTITY, WHO = "pins.json", "identity.key", "organisation.json"
#: Names of runs and alignments, which become folder names.
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,59}")


def check_name(name: str, what: str) -> str:
    """Return a name that is safe as a folder's name.

    Raises:
        FederationError: If it is not.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise FederationError(f"{what}={name!r} must be 1 to 60 small letters, digits and hyphens, no hyphen first")
    return name


def _older(found: RevocationList, newest: int) -> FederationError:
    return FederationError(
        f"{found.path} has number={found.number}; permitted: {newest} and more, since number {newest} was here; get "
        "the newest list from the authority"
    )


@dataclass(frozen=True)
class Pins:
    """Public identities (Ed25519) of all organisations, as this organisation accepted them."""

    server: bytes
    parties: tuple[bytes, ...]


class _Place:
    """Place inside an organisation's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, site_folder: SiteFolder, owner: type) -> Path:
        return site_folder.path / self._name


@dataclass(frozen=True)
class SiteFolder:
    """An organisation's folder. Files are read on demand."""

    path: Path

    @classmethod
    def at(cls, path: Path | str) -> SiteFolder:
        site_folder = cls(Path(path).resolve())
        if not (site_folder.path / WHO).is_file():
            raise FederationError(
                f"{site_folder.path} is no organisation's folder: it has no {WHO}; make one with "
                "`pbmvfl federation request`"
            )
        return site_folder

    # --- who it is ---

    @cached_property
    def federation(self) -> FederationFile:
        return FederationFile.read(self.path / FILE)

    @cached_property
    def name(self) -> str:
        """Name of the organisation, as in federation.toml."""
        name: str = read_object(self.path / WHO, {"name": str}, FederationError)["name"]
        if name != self.federation.server and name not in self.federation.parties:
            raise FederationError(f"{self.path / WHO}: name={name!r} is not in {FILE}")
        return name

    @property
    def is_server(self) -> bool:
        return self.name == self.federation.server

    @property
    def role(self) -> str:
        """Role of the organisation, as commands name it."""
        return "server" if self.is_server else "party"

    @property
    def index(self) -> int:
        """Index of the party, in federation.toml's order."""
        return self.federation.index_of(self.name)

    def write_name(self, name: str) -> None:
        write_atomically(self.path / WHO, json.dumps({"name": name}) + "\n")

    # --- keys ---

    def make_identity(self) -> Identity:
        """Return this organisation's identity, and generate it if there is none."""
        path = self.path / IDENTITY
        if not path.exists():
            write_atomically(path, Identity.generate().private_bytes().hex() + "\n", mode=PRIVATE_FILE)
        return self.identity()

    def identity(self) -> Identity:
        """Read this organisation's identity.

        Raises:
            FederationError: If the file cannot be read, or others may read it.
        """
        path = self.path / IDENTITY
        try:
            if os.stat(path).st_mode & 0o077:
                raise FederationError(
                    f"{path} may be read by others (mode {os.stat(path).st_mode & 0o777:o}); chmod 600 it"
                )
            secret = bytes.fromhex(path.read_text().strip())
            return Identity.from_private_bytes(secret)
        except (OSError, ValueError) as error:
            raise FederationError(f"{path} cannot be read: {error}; restore it from a copy") from error

    def pins(self) -> Pins:
        """Read the pinned identities of all organisations.

        Raises:
            FederationError: If one is missing or repeated, or this organisation's own is another one.
        """
        path = self.path / PINS
        said = read_object(path, {"server": str, "parties": dict}, FederationError)
        try:
            server = bytes.fromhex(said["server"])
            parties = tuple(bytes.fromhex(said["parties"][name]) for name in self.federation.parties)
        except (KeyError, TypeError, ValueError) as error:
            raise FederationError(f"{path} has no hexadecimal identity of every party: {error}") from error
        everybody = [server, *parties]
        if any(len(each) != IDENTITY_BYTES for each in everybody) or len(set(everybody)) < len(everybody):
            raise FederationError(f"{path}: identities must be different, and of {IDENTITY_BYTES} bytes each")
        own = server if self.is_server else parties[self.index]
        if own != self.identity().public:
            raise FederationError(f"{path} has another identity for {self.name} than {IDENTITY}; do not go on with it")
        return Pins(server, parties)

    def write_pins(self, server: bytes, parties: dict[str, bytes]) -> None:
        said = {"server": server.hex(), "parties": {name: key.hex() for name, key in parties.items()}}
        write_atomically(self.path / PINS, json.dumps(said, indent=1) + "\n")

    # --- revoked certificates ---

    def revocation_watch(self, members: Iterable[bytes] = ()) -> RevocationWatch:
        return RevocationWatch(self.revoked, self.authority, members)

    def revocations(self) -> RevocationList | None:
        """Read the revocation list; None before the first.

        Raises:
            FederationError: If it is not the authority's, or older than one that was here.
        """
        seen = self._newest_list.read_text().strip() if self._newest_list.exists() else "0"
        if seen == "0" and not self.revoked.exists():
            return None
        found = RevocationList.read(self.revoked, self.authority)
        if found.number < int(seen):
            raise _older(found, int(seen))
        return found

    def install_revocations(self, source: Path, pem: bytes | None = None) -> RevocationList:
        """Verify a received revocation list, and use it from now on; `pem` is the list where `source` has more.

        Raises:
            FederationError: If it is not the authority's, stale, or older than the one here. Nothing is written then.
        """
        found, current = RevocationList.read(source, self.authority, pem), self.revocations()
        found.check_fresh()
        if current is not None and found.number < current.number:
            raise _older(found, current.number)
        make_private_folder(self._newest_list.parent)
        write_atomically(self.revoked, found.pem)
        write_atomically(self._newest_list, f"{found.number}\n", mode=PRIVATE_FILE)
        return found

    # --- places ---

    kit, lead_kit = _Place("kit"), _Place("lead")
    authority = _Place("kit/startup/rootCA.pem")
    policy, ledger, revoked = _Place("policy.toml"), _Place("ledger.sqlite"), _Place("revoked.pem")
    #: The label holder's store of drawn labels.
    labels = _Place("labels")
    status, logs = _Place("status.json"), _Place("logs")
    #: Number of the newest list that was here, in case that an older copy of the folder is restored over it.
    _newest_list = _Place("state/revoked.number")

    @property
    def certificate(self) -> Path:
        return self.authority.with_name("server.crt" if self.is_server else "client.crt")

    @property
    def private_key(self) -> Path:
        return self.certificate.with_suffix(".key")

    @property
    def credentials(self) -> Credentials:
        return Credentials(certificate=self.certificate, private_key=self.private_key, authority=self.authority)

    def alignment(self, name: str) -> Path:
        return self.path / "alignments" / check_name(name, "alignment")

    def request(self, name: str) -> Path:
        """Return the label holder's folder of an alignment's request and result."""
        return self.path / "requests" / check_name(name, "alignment")

    def run(self, name: str) -> Path:
        return self.path / "runs" / check_name(name, "run")

    def model(self, run: str) -> Path:
        return self.path / "models" / check_name(run, "run")
