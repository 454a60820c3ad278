"""Files for operators: what they permit a site, checked by the rules of systemd, compose, Docker and Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pbmvfl.cli import app
from pbmvfl.deploy.monitoring.prometheus import metrics_text
from pbmvfl.deploy.monitoring.status import EpsilonSpent, Role, State, Status
from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.supervision import compose_file, grafana_dashboard, systemd_unit
from pbmvfl.errors import FederationError
from support.deployments import PARTIES, federation_text
from support.policy_homes import make_home

ROOT = Path(__file__).parents[3]
FEDERATION = FederationFile.parse(federation_text())

# --- systemd ---


def settings_of(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if "=" in line:
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_a_unit_may_write_its_own_folders_alone_and_has_no_rights(tmp_path: Path) -> None:
    home = make_home(tmp_path, "bank")
    found = settings_of(systemd_unit(home))
    assert found["ProtectSystem"] == ["strict"]
    assert found["ReadWritePaths"] == [f'"{home.path}"']
    assert found["CapabilityBoundingSet"] == [""]
    assert found["NoNewPrivileges"] == ["yes"]
    assert found["User"] == ["pbmvfl"]
    assert found["Restart"] == ["always"]
    assert "--foreground" in found["ExecStart"][0]


def said_by_systemd(unit: Path) -> list[str]:
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if unit.name in line]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
@pytest.mark.parametrize("folder", ["bank", "a folder with spaces", '100% "quoted" $HOME'])
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, folder: str) -> None:
    unit = tmp_path / "pbmvfl-bank.service"
    unit.write_text(systemd_unit(make_home(tmp_path / folder, "bank"), user="daemon"))
    assert not said_by_systemd(unit)
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSystem=rather"))
    assert said_by_systemd(unit)


@pytest.mark.parametrize("user", ["root", "", "a b", "x;y"])
def test_a_user_with_all_rights_or_no_name_is_refused(tmp_path: Path, user: str) -> None:
    with pytest.raises(FederationError, match=re.escape(f"user={user!r}")):
        systemd_unit(make_home(tmp_path, "bank"), user=user)


# --- compose ---

#: Names that the compose specification has for a service, of those that are used here.
SERVICE = {
    "image", "command", "user", "read_only", "cap_drop", "security_opt", "restart", "stop_grace_period", "init",
    "environment", "tmpfs", "volumes", "secrets", "healthcheck", "networks", "ports",
}  # fmt: skip
TOP = {"name", "services", "networks", "volumes", "secrets"}


def check_compose(values: dict[str, Any]) -> None:
    assert set(values) <= TOP
    for service in values["services"].values():
        assert set(service) <= SERVICE
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        uid, _, gid = service["user"].partition(":")
        assert int(uid) > 0
        assert int(gid) > 0
        assert set(service["networks"]) <= set(values["networks"])
        assert {each["source"] for each in service["secrets"]} <= set(values["secrets"])
        named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
        assert named <= set(values["volumes"])


def test_every_organisation_has_a_service_without_rights() -> None:
    values = compose_file(FEDERATION)
    assert set(values["services"]) == {"clinic", *PARTIES}
    check_compose(values)
    ports = {name: service.get("ports") for name, service in values["services"].items()}
    assert [name for name, found in ports.items() if found] == ["clinic"]
    # No folder and no secret of one organisation is another's.
    for name, service in values["services"].items():
        text = json.dumps(service)
        assert not [other for other in values["services"] if other != name and f"./{other}" in text]


def test_one_organisation_gets_its_own_service_alone() -> None:
    values = compose_file(FEDERATION, only="bank")
    check_compose(values)
    assert list(values["services"]) == ["bank"]
    assert "clinic" not in json.dumps(values["secrets"])
    with pytest.raises(FederationError, match="name='shop'"):
        compose_file(FEDERATION, only="shop")


@pytest.mark.parametrize("change", [{"privileged": True}, {"read_only": False}, {"user": "0:0"}])
def test_the_check_of_compose_files_fails_for_a_service_with_rights(change: dict[str, Any]) -> None:
    values = compose_file(FEDERATION)
    values["services"]["bank"] |= change
    with pytest.raises(AssertionError):
        check_compose(values)


def test_the_command_writes_yaml_that_reads_back_the_same(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(federation_text())
    out = tmp_path / "compose.yaml"
    done = CliRunner().invoke(
        app, ["federation", "compose", str(tmp_path / "federation.toml"), "--out", str(out)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(out.read_text()) == compose_file(FEDERATION)


# --- the image ---


def instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line.strip()]


def faults(text: str) -> list[str]:
    """Rules of image linters that apply here."""
    found = []
    steps = instructions(text)
    for name, value in steps:
        if name == "FROM" and (":" not in value or ":latest" in value):
            found.append("base image without a version")
        if name == "ADD":
            found.append("ADD instead of COPY")
        if name == "RUN" and "apt-get install" in value and "--no-install-recommends" not in value:
            found.append("recommended packages")
        if name == "RUN" and re.search(r"\bsudo\b|\bcd ", value):
            found.append("sudo or cd")
        if name == "WORKDIR" and not value.startswith("/"):
            found.append("relative WORKDIR")
        if name in ("CMD", "ENTRYPOINT") and not value.startswith("["):
            found.append("shell form")
        if name == "COPY" and value.split()[0] == ".":
            found.append("the whole context")
    users = [value for name, value in steps if name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("root")
    if not any(name == "HEALTHCHECK" for name, _ in steps):
        found.append("no health check")
    return found


def test_the_image_keeps_the_rules_of_image_linters() -> None:
    assert faults((ROOT / "Dockerfile").read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("USER 10001:10001", "USER root"),
        (":3.11.11-slim-bookworm", ""),
        ("COPY src ./src", "ADD src ./src"),
        ("COPY src ./src", "COPY . ."),
        ("HEALTHCHECK", "LABEL"),
        ('CMD ["--help"]', "CMD --help"),
    ],
)
def test_the_rules_notice_an_image_that_breaks_them(old: str, new: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert old in text
    assert faults(text.replace(old, new))


def test_the_image_and_the_compose_file_agree_on_user_and_folders() -> None:
    steps = instructions((ROOT / "Dockerfile").read_text())
    service = compose_file(FEDERATION)["services"]["bank"]
    assert service["user"] == [value for name, value in steps if name == "USER"][-1]
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    assert mounted == set(json.loads(next(value for name, value in steps if name == "VOLUME")))


# --- the dashboard ---


def test_every_metric_of_the_dashboard_is_exported() -> None:
    spent = (EpsilonSpent(limit="cell", spent=1.0, epsilon=8.0, delta=1e-5),)
    status = Status(
        site="clinic", role=Role.SERVER, state=State.TRAINING, parties=("a",), parties_alive=("a",), loss=1.0,
        rounds_per_second=1.0, epsilon=spent, updated=1.0, started=1.0,
    )  # fmt: skip
    exported = {line.split("{")[0].split(" ")[0] for line in metrics_text(status).splitlines() if line[0] != "#"}
    expressions = [target["expr"] for panel in grafana_dashboard()["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"pbmvfl_\w+", expression)}
    assert used
    assert used <= exported
