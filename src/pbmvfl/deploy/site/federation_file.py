"""federation.toml: what every organisation of a federation agrees on before anything else. All of it is public.

`docs/how-to/operate.md` has an example.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pbmvfl.deploy.site.toml_tables import TomlTables, number, text
from pbmvfl.errors import FederationError

FILE = "federation.toml"
# They become names in certificates, where NVFlare takes no hyphen at an end, and 64 characters at most.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_LEAD = re.compile(r"[a-z0-9][a-z0-9._-]{0,20}@[a-z0-9][a-z0-9.-]{0,30}\.[a-z]{2,10}")
_RESERVED = frozenset({"server", "lead", "all"})
LARGEST_NUM_PARTIES = 200
_PORT = number("an integer in 1..65535", least=1, most=65535, kind=int)
#: Settings of each table, in the order in which they are listed.
_SECTIONS = ("federation", "line", "party", "plan", "server")
_FEDERATION = {"name": text(_NAME)}
_SERVER = {"host": text(_HOST), "lead": text(_LEAD), "line_port": _PORT, "name": text(_NAME), "port": _PORT}
_LINE = {"patience": number("a number of seconds in 1..86400", least=1, most=86400)}


@dataclass(frozen=True, kw_only=True)
class FederationFile:
    """Checked content of federation.toml."""

    name: str
    server: str
    host: str
    port: int
    line_port: int
    lead: str
    parties: tuple[str, ...]
    patience: float = 120.0
    #: What `Plan.for_budget` takes besides sizes.
    plan: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> FederationFile:
        if path.is_dir():
            path = path / FILE
        try:
            content = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FederationError(f"{path} cannot be read: {error}; write one, or give its path") from error
        return cls.parse(content, where=str(path))

    @classmethod
    def parse(cls, content: str, *, where: str = FILE) -> FederationFile:
        try:
            values = tomllib.loads(content)
        except tomllib.TOMLDecodeError as error:
            raise FederationError(f"{where} is no TOML: {error}") from error
        return _Reader(where).federation(values)

    @property
    def digest(self) -> str:
        """Digest of the content, independent of the file's layout."""
        said = {
            "name": self.name,
            "server": [self.server, self.host, self.port, self.line_port, self.lead],
            "parties": self.parties,
            "carrier": "grpc",
            "patience": self.patience,
            "plan": dict(self.plan),
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def index_of(self, party: str) -> int:
        if party not in self.parties:
            raise FederationError(f"party={party!r} is not in {FILE}; it names {', '.join(self.parties)}")
        return self.parties.index(party)


class _Reader(TomlTables):
    """Reader of federation.toml."""

    error, suggests = FederationError, False

    def federation(self, values: dict[str, Any]) -> FederationFile:
        self.check_names("", values, _SECTIONS)
        found = values.get("server")
        if isinstance(found, dict) and "carrier" in found:
            raise self.fault("[server] carrier is no longer a choice: remove it, and give a line_port")
        if isinstance(found, dict) and isinstance(host := found.get("host"), str) and ":" in host:
            raise self.fault(
                f"[server] host={host!r} must be a name or an IPv4 address, without a port: NVFlare listens at no IPv6 "
                "address; give a name that has an IPv4 address"
            )
        server = self.read(values, "server", _SERVER, needed=_SERVER)
        if server["port"] == server["line_port"]:
            raise self.fault(f"[server] port={server['port']} and line_port={server['line_port']} must be different")
        plan = values.get("plan", {})
        if not isinstance(plan, dict):
            raise self.fault("it needs a table [plan]")
        return FederationFile(
            name=self.read(values, "federation", _FEDERATION, needed=_FEDERATION)["name"],
            server=self._organisation("server", server["name"]),
            parties=self._parties(values.get("party"), server["name"]),
            patience=float(self.read(values, "line", _LINE).get("patience", 120)),
            plan=plan,
            **{name: server[name] for name in ("host", "port", "line_port", "lead")},
        )

    def _organisation(self, section: str, name: str) -> str:
        if name in _RESERVED:
            raise self.fault(f"[{section}] name={name!r} is taken by the program; choose another")
        return name

    def _parties(self, tables: Any, server: str) -> tuple[str, ...]:
        if not isinstance(tables, list) or not 2 <= len(tables) <= LARGEST_NUM_PARTIES:
            raise self.fault(f"it needs a [[party]] for each party, 2 to {LARGEST_NUM_PARTIES} of them")
        if not all(isinstance(table, dict) and set(table) == {"name"} for table in tables):
            raise self.fault("[[party]] has a name, and nothing else")
        found = [self.check("party", "name", table["name"], text(_NAME)) for table in tables]
        for name in found:
            if found.count(self._organisation("party", name)) > 1 or name == server:
                raise self.fault(f"name={name!r} stands for two organisations; give each its own")
        return tuple(found)
