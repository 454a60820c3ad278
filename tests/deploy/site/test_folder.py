"""An organisation's folder: its own keys, everybody's pins, and names that cannot leave it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.deploy.site.folder import SiteFolder, check_name
from pbmvfl.errors import FederationError
from support.certificates import Authority
from support.deployments import PARTIES, SERVER, plain_home, write_pins


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def home(tmp_path: Path, authority: Authority) -> SiteFolder:
    return plain_home(tmp_path / "bank", "bank", authority)


def test_a_folder_that_is_nobodys_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"is no organisation's folder.*pbmvfl federation request"):
        SiteFolder.at(tmp_path)


def test_a_home_knows_its_name_role_and_index(tmp_path: Path, authority: Authority) -> None:
    homes = [plain_home(tmp_path / name, name, authority) for name in (SERVER, *PARTIES)]
    assert [home.is_server for home in homes] == [True, False, False]
    assert [home.index for home in homes[1:]] == [0, 1]
    assert homes[0].certificate.name == "server.crt"
    assert homes[1].private_key.name == "client.key"


def test_a_name_that_is_not_in_the_federation_is_refused(home: SiteFolder) -> None:
    home.write_name("shop")
    with pytest.raises(FederationError, match=r"name='shop' is not in federation.toml"):
        _ = SiteFolder.at(home.path).name


def test_an_identity_is_made_once_and_closed_to_others(home: SiteFolder) -> None:
    before = home.identity().public
    assert home.make_identity().public == before
    assert (home.path / "identity.key").stat().st_mode & 0o777 == 0o600


def test_an_identity_that_others_may_read_is_not_used(home: SiteFolder) -> None:
    (home.path / "identity.key").chmod(0o640)
    with pytest.raises(FederationError, match=r"may be read by others \(mode 640\); chmod 600 it"):
        home.identity()


@pytest.mark.parametrize("content", ["", "xyz", "00" * 31, "00" * 33])
def test_a_damaged_identity_is_named_and_its_bytes_are_not_shown(home: SiteFolder, content: str) -> None:
    (home.path / "identity.key").write_text(content)
    with pytest.raises(FederationError, match=r"identity.key cannot be read") as caught:
        home.identity()
    assert not content or content not in str(caught.value)


# --- pins ---


def test_pins_are_read_back_in_the_federations_order(home: SiteFolder) -> None:
    everybody = write_pins(home)
    pins = home.pins()
    assert (pins.server, *pins.parties) == tuple(everybody[name] for name in (SERVER, *PARTIES))


def test_pins_with_another_identity_for_oneself_are_refused(home: SiteFolder) -> None:
    write_pins(home)
    os.unlink(home.path / "identity.key")
    home.make_identity()
    with pytest.raises(FederationError, match="another identity for bank"):
        home.pins()


def test_two_organisations_with_one_identity_are_refused(home: SiteFolder) -> None:
    own = home.identity().public
    home.write_pins(own, {"bank": own, "hospital": b"\x07" * 32})
    with pytest.raises(FederationError, match="identities must be different"):
        home.pins()


@pytest.mark.parametrize(
    "said",
    [
        {"server": "00", "parties": {}},
        {"server": "zz", "parties": {"bank": "00" * 32, "hospital": "01" * 32}},
        {"server": "00" * 32, "parties": {"bank": 3, "hospital": "01" * 32}},
        {"server": "00" * 31, "parties": {"bank": "02" * 32, "hospital": "01" * 32}},
        {"parties": {}},
        [],
    ],
)
def test_pins_that_are_not_whole_are_refused_by_name(home: SiteFolder, said: object) -> None:
    (home.path / "pins.json").write_text(json.dumps(said))
    with pytest.raises(FederationError, match=r"pins.json"):
        home.pins()


# --- names that become folders ---


@given(st.text(max_size=70))
def test_no_name_leaves_its_folder(name: str) -> None:
    """Whatever a server sends as the name of a run or an alignment."""
    home = SiteFolder(Path("/home"))
    try:
        path = home.run(name)
    except FederationError:
        return
    assert path.parent == Path("/home/runs")
    assert os.path.normpath(path) == str(path)
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\n", "A", "-a", "a" * 61, "é", "a\0", "."])
def test_unsafe_names_are_refused(name: str) -> None:
    with pytest.raises(FederationError, match="small letters, digits and hyphens"):
        check_name(name, "run")
