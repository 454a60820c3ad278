"""What a registered party says in others' names, by its own connection and with a token that the server gave away."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from pbmvfl.deploy.nvflare.guard import is_accepted, is_awaited, is_own_connection, is_true_origin, may_pass_on

HERE = Path(__file__).parents[2]
PARTIES, LEAD, ADMIN = ("bank", "hospital"), "lead@clinic.example", "_admin_0f0e"
SITES = ("server", "bank", "hospital")
CELLS = (*SITES, *(f"{site}.job" for site in SITES))


def tried(folder: Path, mode: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "support" / "forging_party.py"), str(folder), mode],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
def test_a_party_speaks_for_itself_alone_whatever_token_it_has(tmp_path: Path) -> None:
    said = tried(tmp_path, "guarded")
    assert said["heard"] == ["server heard first of bank", "server heard last of bank"]
    assert said["files"] == 0
    assert said["held"] == 0


@pytest.mark.slow
def test_without_the_guard_all_of_it_is_heard(tmp_path: Path) -> None:
    """The control: NVFlare itself lets through what the test above tries.

    A message may be overtaken by the end of a run on a busy machine, so what is not heard is tried again.
    """
    forged = (
        "hospital heard as the server of server",
        "hospital heard as its own job of hospital.job",
        "server heard as the server's job of server.job",
        "server heard as the lead of _admin_x",
        "hospital heard as itself of bank",
        "server heard listed as the server of bank",
        "heard as an admin of _admin_",
    )
    heard: list[str] = []
    files = held = 0
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = tried(folder, "open")
        heard += said["heard"]
        files, held = max(files, said["files"]), max(held, said["held"])
        missing = [words for words in forged if not any(words in each for each in heard)]
        if not missing and files and held:
            break
    assert missing == []
    assert files == 1
    assert held >= 1


# --- the table ---


def accepted(origin: str, endpoint: str, me: str, destination: str | None = None, common_name: str = "") -> bool:
    return is_accepted(origin, destination or me, endpoint, common_name or endpoint, me=me, parties=PARTIES, lead=LEAD)


def test_at_the_server_an_origin_is_of_the_site_that_is_connected() -> None:
    for origin, endpoint in itertools.product(CELLS, CELLS):
        same = origin.split(".")[0] == endpoint.split(".")[0]
        assert accepted(origin, endpoint, "server") is same, (origin, endpoint)


def test_at_a_party_nobody_but_the_server_and_its_own_site_is_heard() -> None:
    for me, origin, endpoint in itertools.product(("hospital", "hospital.job"), CELLS, CELLS):
        by, said = endpoint.split(".")[0], origin.split(".")[0]
        expected = (by == said == "server") or (by == "hospital" and said in ("hospital", "server"))
        assert accepted(origin, endpoint, me) is expected, (me, origin, endpoint)


def test_the_servers_job_hears_what_its_own_process_passed_on() -> None:
    for origin in CELLS:
        assert is_true_origin(origin, "server", me="server.job")
        assert not is_true_origin(origin, "bank", me="server.job")


def test_the_server_passes_nothing_on_from_one_party_to_another_nor_for_a_lead() -> None:
    for origin, destination in itertools.product(CELLS, CELLS):
        ends = {origin.split(".")[0], destination.split(".")[0]}
        assert may_pass_on(origin, destination) is ("server" in ends)
    assert accepted("bank.job", "bank.job", "server", destination="server.job")
    assert not accepted("bank.job", "bank.job", "server", destination="hospital.job")
    for destination in (*PARTIES, "server.job"):
        assert not accepted(ADMIN, ADMIN, "server", destination=destination, common_name=LEAD)


@pytest.mark.parametrize(
    ("endpoint", "common_name", "is_heard"),
    [
        (ADMIN, LEAD, True),
        (ADMIN, "bank", False),
        (ADMIN, "", False),
        (f"{ADMIN}.job", LEAD, False),
        ("stranger", "stranger", False),
        ("bank", "bank", True),
    ],
)
def test_who_is_not_of_the_federation_is_not_heard_at_all(endpoint: str, common_name: str, is_heard: bool) -> None:
    assert accepted(endpoint, endpoint, "server", common_name=common_name) is is_heard


def test_words_about_a_connection_are_for_its_two_ends() -> None:
    def heard(origin: str, destination: str, endpoint: str, me: str, topic: str = "bye") -> bool:
        return is_own_connection("cellnet.channel", topic, origin, destination, endpoint, me=me)

    assert heard("bank", "server", "bank", "server")
    assert not heard("bank", "server.job", "bank", "server")  # it would be passed on
    assert not heard("bank", "server.job", "server", "server.job")  # it was
    assert not heard("bank", "server", "bank", "server", topic="bulk")
    assert is_own_connection("task", "bulk", "bank", "server.job", "server", me="server.job")


class Waits:
    targets = ("server",)


@pytest.mark.parametrize(
    ("requests", "target", "awaited"),
    [
        ("r", "server", True),
        (["other", "r"], "server", True),
        ("r", "bank", False),
        ("other", "server", False),
        (None, "server", False),
        ([["r"]], "server", False),
        ({"r": 1}, "server", False),
    ],
)
def test_a_reply_is_looked_at_only_if_it_was_asked_for(requests: object, target: str, awaited: bool) -> None:
    assert is_awaited(requests, target, {"r": Waits()}) is awaited
