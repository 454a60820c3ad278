"""A federation that was set up as operators do, by the steps of its authority and of every organisation."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.deploy.nvflare import authority
from pbmvfl.deploy.site.folder import SiteFolder
from support.deployments import PARTIES, SERVER, federation_text

EVERYBODY = (SERVER, *PARTIES)


@dataclass
class Enrolled:
    """Folders of all organisations and of the authority, and everything that travelled between them."""

    root: Path
    fingerprint: str = field(default="")

    @classmethod
    def set_up(cls, root: Path) -> Enrolled:
        fed = cls(root)
        fed.toml.write_text(federation_text())
        authority.init(fed.toml, fed.authority)
        fed.renew(*(authority.request(fed.toml, name, root / name) for name in EVERYBODY))
        return fed

    def copy(self, root: Path) -> Enrolled:
        """Return a copy that a test may change."""
        shutil.copytree(self.root, root)
        return Enrolled(root, self.fingerprint)

    @property
    def toml(self) -> Path:
        return self.root / "federation.toml"

    @property
    def authority(self) -> Path:
        return self.root / "authority"

    def home(self, name: str) -> SiteFolder:
        return SiteFolder.at(self.root / name)

    def certificate(self, name: str) -> Certificate:
        return Certificate.read(self.home(name).certificate)

    def request(self, name: str) -> Path:
        return self.root / name / "request" / f"{name}.request.json"

    def signed(self, name: str) -> Path:
        return self.authority / "signed" / f"{name}.signed.json"

    def letters(self) -> list[Path]:
        return [path(name) for path in (self.request, self.signed) for name in EVERYBODY]

    def asks(self, *requests: Path, **options: Any) -> authority.Approval:
        return authority.approve(self.authority, requests, **options)

    def package(self, name: str, bundle: str = "", **options: Any) -> str:
        """Package an organisation's kit from what was signed for it, or for another one."""
        return authority.package(self.home(name), self.signed(bundle or name), **options)

    def renew(self, *requests: Path, replace: bool = False) -> None:
        made = self.asks(*requests, replace=replace)
        for name in made.bundles:
            self.package(name, replace=replace)
        self.fingerprint = made.fingerprint
