"""Files for whoever keeps a site running: a systemd unit, a compose file, a Grafana dashboard.

Restarts, limits and isolation belong to systemd or the container runtime; the texts here only name what a site needs:
its folder, one state folder outside of it (where the ledger's counter is kept), the network, nothing else.
"""

from __future__ import annotations

import sys
from typing import Any

from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.folder import IDENTITY, SiteFolder
from pbmvfl.errors import FederationError

#: The user of a unit and of an image; neither is root.
USER = "pbmvfl"
IMAGE = "pbmvfl:0.2.0"
_UID = 10001
_STATE, _SITE = "/var/lib/pbmvfl", "/site"
#: Seconds that a party waits for a server that is not there yet.
_WAIT = 600

#: What a site never needs. MemoryDenyWriteExecute is left out: loops are compiled while it runs.
_HARDENING = """\
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
PrivateTmp=yes
PrivateDevices=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectClock=yes
ProtectHostname=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
"""


def systemd_unit(site_folder: SiteFolder, *, user: str = USER) -> str:
    """Return a hardened systemd unit that keeps a site running.

    Args:
        site_folder: The organisation's folder; the unit may write there and in its own state folder alone.
        user: The account that runs it and owns the folder.

    Raises:
        FederationError: `user` is root or no account name.
    """
    if user == "root" or not user.replace("-", "").replace("_", "").isalnum():
        raise FederationError(f"user={user!r}; permitted: the name of an account that is not root")
    role = site_folder.role
    command = [sys.executable, "-P", "-m", "pbmvfl", role, "start", "--foreground", "--home", str(site_folder.path)]
    wait = [] if site_folder.is_server else ["--wait", str(_WAIT)]
    return (
        "[Unit]\n"
        f"Description=pbmvfl {role} {site_folder.name} of federation {site_folder.federation.name}\n"
        "Wants=network-online.target\nAfter=network-online.target\n"
        "StartLimitIntervalSec=600\nStartLimitBurst=20\n\n"
        "[Service]\nType=exec\n"
        f"User={user}\n"
        f"WorkingDirectory={_escaped(str(site_folder.path))}\n"
        f"ExecStart={' '.join(_quoted(word) for word in [*command, *wait])}\n"
        "Restart=always\nRestartSec=3\nTimeoutStopSec=30\nKillMode=mixed\n"
        f"StateDirectory=pbmvfl\nEnvironment=PBMVFL_STATE={_STATE}\n"
        f"ReadWritePaths={_quoted(str(site_folder.path))}\n"
        f"{_HARDENING}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def compose_file(federation: FederationFile, *, only: str | None = None, image: str = IMAGE) -> dict[str, Any]:
    """Return a compose file with a service for each organisation, as plain values.

    Every service is a user without rights on a read-only root. Each organisation's folder `./NAME` is mounted whole;
    its secret key is mounted again, read-only, as a secret.

    Args:
        federation: The federation's public file.
        only: One organisation, as between machines; None for all of them on one machine, as for a trial.
        image: What the Dockerfile was built as.

    Raises:
        FederationError: `only` is not in the federation.
    """
    everybody = (federation.server, *federation.parties)
    if only is not None and only not in everybody:
        raise FederationError(f"name={only!r} is not in the federation; permitted: {', '.join(everybody)}")
    names = everybody if only is None else (only,)
    return {
        "name": federation.name,
        "services": {name: _service(federation, name, image) for name in names},
        "networks": {"federation": {}},
        "volumes": {f"{name}-state": {} for name in names},
        "secrets": {f"{name}-identity": {"file": f"./{name}/{IDENTITY}"} for name in names},
    }


def _service(federation: FederationFile, name: str, image: str) -> dict[str, Any]:
    is_server = name == federation.server
    role = "server" if is_server else "party"
    wait = [] if is_server else ["--wait", str(_WAIT)]
    service: dict[str, Any] = {
        "image": image,
        "command": [role, "start", "--foreground", "--home", _SITE, *wait],
        "user": f"{_UID}:{_UID}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
        "init": True,
        "environment": {"PBMVFL_STATE": _STATE},
        "tmpfs": ["/tmp"],
        "volumes": [f"./{name}:{_SITE}", f"{name}-state:{_STATE}"],
        "secrets": [{"source": f"{name}-identity", "target": f"{_SITE}/{IDENTITY}"}],
        "healthcheck": {
            "test": ["CMD", "pbmvfl", role, "status", "--home", _SITE],
            "interval": "30s",
            "timeout": "20s",
            "start_period": "90s",
            "retries": 3,
        },
        "networks": {"federation": {"aliases": [federation.host]} if is_server else {}},
    }
    if is_server:
        service["ports"] = [f"{port}:{port}" for port in (federation.port, federation.line_port)]
    return service


#: Panels of the dashboard: title, Prometheus expressions, unit.
PANELS = (
    ("Epsilon spent of each limit", ("pbmvfl_epsilon_spent", "pbmvfl_epsilon_limit"), "none"),
    ("Share of the limit that is spent", ("pbmvfl_epsilon_spent / pbmvfl_epsilon_limit",), "percentunit"),
    ("Rounds completed", ("pbmvfl_round", "pbmvfl_rounds_planned"), "none"),
    ("Rounds a second", ("pbmvfl_rounds_per_second",), "none"),
    ("Bytes a second", ("rate(pbmvfl_bytes_total[1m])",), "Bps"),
    ("Parties connected", ("pbmvfl_parties_alive", "pbmvfl_parties"), "none"),
    ("Seconds since the job last reported", ("time() - pbmvfl_last_news_timestamp_seconds",), "s"),
    ("Up", ("pbmvfl_up",), "none"),
)


def grafana_dashboard() -> dict[str, Any]:
    """Return a Grafana dashboard of a site's metrics, as plain values."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"expr": expression, "refId": chr(ord("A") + place), "datasource": source}
                for place, expression in enumerate(expressions)
            ],
        }
        for number, (title, expressions, unit) in enumerate(PANELS)
    ]
    return {
        "title": "pbmvfl site",
        "uid": "pbmvfl-site",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def _escaped(text: str) -> str:
    """Escape what systemd expands, in a value that is one path."""
    if "\n" in text:
        raise FederationError(f"home={text!r} must be a path without line breaks")
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Quote one word of a systemd setting."""
    return '"' + _escaped(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'
