"""federation.toml: what every organisation of a federation agrees on before anything else. All of it is public.

[federation]
name = "people"

[server]                         # the label holder
name = "clinic"
host = "fed.clinic.example"
port = 8002                      # identity, jobs and their life (NVFlare)
line_port = 8003                 # everything that is said in a run
lead = "lead@clinic.example"     # who may submit

[[party]]
name = "bank"

[[party]]
name = "hospital"

[plan]                           # the budget; whatever `pbmvfl plan` takes may stand here
epsilon = 8
algorithm = "staged"             # the default; "pbm" is the paper's

[line]
patience = 120                   # seconds that a cut may last before a run gives up
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

from pbmvfl.errors import FederationError

FILE = "federation.toml"
# They become names in certificates, where NVFlare takes no hyphen at an end, and 64 characters at most.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_LEAD = re.compile(r"[a-z0-9][a-z0-9._-]{0,20}@[a-z0-9][a-z0-9.-]{0,30}\.[a-z]{2,10}")
_RESERVED = frozenset({"server", "lead", "all"})
_SECTIONS = frozenset({"federation", "server", "party", "plan", "line"})
LARGEST_NUM_PARTIES = 200


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
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FederationError(f"{path} cannot be read: {error}; write one, or give its path") from error
        return cls.parse(text, where=str(path))

    @classmethod
    def parse(cls, text: str, *, where: str = FILE) -> FederationFile:
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise FederationError(f"{where} is no TOML: {error}") from error
        return _Reader(where).read(values)

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


class _Reader:
    """Reader of the file's tables that names what is wrong with them."""

    def __init__(self, where: str) -> None:
        self._where = where

    def read(self, values: dict[str, Any]) -> FederationFile:
        for name in values:
            if name not in _SECTIONS:
                raise self._fault(f"[{name}] is not known; permitted: {', '.join(sorted(_SECTIONS))}")
        federation = self._table(values, "federation", {"name"})
        if isinstance(found := values.get("server"), dict) and "carrier" in found:
            raise self._fault("[server] carrier is no longer a choice: remove it, and give a line_port")
        server = self._table(values, "server", {"name", "host", "port", "line_port", "lead"})
        line = self._table(values, "line", {"patience"}, needed=False)
        port, line_port = self._port(server, "port"), self._port(server, "line_port")
        if port == line_port:
            raise self._fault(f"[server] port={port} and line_port={line_port} must be different")
        return FederationFile(
            name=self._text(federation, "federation", "name", _NAME),
            server=self._organisation(server, "server"),
            host=self._host(server),
            port=port,
            line_port=line_port,
            lead=self._text(server, "server", "lead", _LEAD),
            parties=self._parties(values.get("party"), str(server.get("name"))),
            patience=self._patience(line),
            plan=self._table(values, "plan", None, needed=False),
        )

    def _fault(self, words: str) -> FederationError:
        return FederationError(f"{self._where}: {words}")

    def _table(
        self, values: dict[str, Any], name: str, permitted: set[str] | None, *, needed: bool = True
    ) -> dict[str, Any]:
        table = values.get(name, None if needed else {})
        if not isinstance(table, dict):
            raise self._fault(f"it needs a table [{name}]")
        for key in table:
            if permitted is not None and key not in permitted:
                raise self._fault(f"[{name}] {key} is not known; permitted: {', '.join(sorted(permitted))}")
        return table

    def _text(self, table: dict[str, Any], section: str, key: str, form: re.Pattern[str]) -> str:
        value = table.get(key)
        if not isinstance(value, str) or not form.fullmatch(value):
            raise self._fault(f"[{section}] {key}={value!r} must be a text of the form {form.pattern}")
        return value

    def _host(self, server: dict[str, Any]) -> str:
        host = server.get("host")
        if isinstance(host, str) and ":" in host:
            raise self._fault(
                f"[server] host={host!r} must be a name or an IPv4 address, without a port: NVFlare listens at no IPv6 "
                "address; give a name that has an IPv4 address"
            )
        return self._text(server, "server", "host", _HOST)

    def _organisation(self, table: dict[str, Any], section: str) -> str:
        name = self._text(table, section, "name", _NAME)
        if name in _RESERVED:
            raise self._fault(f"[{section}] name={name!r} is taken by the program; choose another")
        return name

    def _parties(self, tables: Any, server: str) -> tuple[str, ...]:
        if not isinstance(tables, list) or not 2 <= len(tables) <= LARGEST_NUM_PARTIES:
            raise self._fault(f"it needs a [[party]] for each party, 2 to {LARGEST_NUM_PARTIES} of them")
        found = []
        for table in tables:
            if not isinstance(table, dict) or set(table) != {"name"}:
                raise self._fault("[[party]] has a name, and nothing else")
            found.append(self._organisation(table, "party"))
        for name in found:
            if found.count(name) > 1 or name == server:
                raise self._fault(f"name={name!r} stands for two organisations; give each its own")
        return tuple(found)

    def _port(self, table: dict[str, Any], key: str) -> int:
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
            raise self._fault(f"[server] {key}={value!r} must be an integer in 1..65535")
        return value

    def _patience(self, table: dict[str, Any]) -> float:
        value = table.get("patience", 120)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 86400:
            raise self._fault(f"[line] patience={value!r} must be a number of seconds in 1..86400")
        return float(value)
