"""Keys born at home: what travels has no secret in it, and nobody can slip in another key unseen."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.nvflare import authority
from pbmvfl.deploy.nvflare.authority import approve, init, package, provision, request
from pbmvfl.deploy.nvflare.hardening import check, harden
from pbmvfl.deploy.site.enrolment import fingerprint_of
from pbmvfl.errors import FederationError
from support.certificates import Authority
from support.deployments import LEAD, SERVER, federation_text
from support.enrolled_federation import EVERYBODY, Enrolled


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Enrolled:
    """Set up once, whole; tests that change something copy it."""
    return Enrolled.set_up(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def setup(done: Enrolled, tmp_path: Path) -> Enrolled:
    return done.copy(tmp_path / "copy")


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    (folder / "federation.toml").write_text(federation_text())
    provision(folder / "federation.toml", folder / "homes")
    return folder / "homes"


def change(parcel: Path, alter: Callable[[dict[str, Any]], object]) -> None:
    """Alter what a parcel says: as whoever carries it could."""
    said = json.loads(parcel.read_text())
    alter(said)
    parcel.write_text(json.dumps(said))


def swap_identity(setup: Enrolled, name: str) -> None:
    """What the authority could tell the bank about another organisation's identity, or its own."""
    change(setup.signed("bank"), lambda said: said["identities"].update({name: Identity.generate().public.hex()}))


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def secrets_in(home: Path) -> list[bytes]:
    """Bytes that only this organisation may have: its identity, and the numbers of its private keys."""
    found = [bytes.fromhex((home / "identity.key").read_text())]
    for path in files(home):
        if path.suffix == ".key" and path.name != "identity.key":
            key: Any = load_pem_private_key(path.read_bytes(), password=None)
            numbers = key.private_numbers()
            found += [number.to_bytes((number.bit_length() + 7) // 8, "big") for number in (numbers.d, numbers.p)]
    return found


def readable(path: Path) -> bytes:
    """A file's bytes, and PEM unfolded, so that a key inside is seen."""
    raw = path.read_bytes()
    return raw + re.sub(rb"\\n|\s", b"", raw)


def holds(text: bytes, secret: bytes) -> bool:
    import base64

    # In base64 a secret can begin at three places of a group; its middle is then the same for each.
    middles = [base64.b64encode(b"\0" * shift + secret)[4:-4] for shift in range(3)]
    return secret in text or secret.hex().encode() in text or any(middle in text for middle in middles)


# --- secrets stay at home ---


def test_no_private_key_is_in_anything_but_its_own_home(done: Enrolled) -> None:
    for name in EVERYBODY:
        secrets = secrets_in(done.root / name)
        assert len(secrets) >= 5
        elsewhere = [path for path in files(done.root) if not path.is_relative_to(done.root / name)]
        assert len(elsewhere) > 20
        for path in (*elsewhere, done.request(name)):
            assert not any(holds(readable(path), secret) for secret in secrets), path


def test_the_search_for_keys_finds_one_that_is_there(done: Enrolled, tmp_path: Path) -> None:
    """The control of the test above: each form in which a key could have travelled."""
    identity, d, *_ = secrets_in(done.root / "bank")
    said = {"site": (done.root / "bank/request/bank.key").read_text(), "identity": identity.hex()}
    (tmp_path / "x.json").write_text(json.dumps(said))
    assert holds(readable(tmp_path / "x.json"), d)
    assert holds(readable(tmp_path / "x.json"), identity)


def test_what_travels_has_the_public_texts_and_no_other(done: Enrolled) -> None:
    common = {"format", "federation", "name", "site", "lead"}
    for path in done.letters():
        own = {"identity", "signature"} if "request" in path.name else {"authority", "identities", "revoked"}
        assert set(json.loads(path.read_text())) == common | own


@pytest.mark.parametrize("way", ["at home", "trial"])
def test_nobody_but_the_owner_can_read_a_key_or_a_kit(way: str, done: Enrolled, trial: Path) -> None:
    root = done.root if way == "at home" else trial
    keys = list(root.rglob("*.key"))
    assert len(keys) >= 7
    for path in keys:
        assert path.stat().st_mode & 0o777 == 0o600, path
    for name in EVERYBODY:
        for path in (root / name, root / name / "kit", *(root / name / "kit").rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_trial_leaves_no_authority_and_no_scratch_behind(trial: Path) -> None:
    assert sorted(each.name for each in trial.iterdir()) == sorted(EVERYBODY)
    assert not list(trial.rglob("cert.json")) + list(trial.rglob("rootCA.key"))


def test_a_trial_is_not_made_over_what_is_there(trial: Path) -> None:
    before = {path: path.read_bytes() for path in files(trial)}
    with pytest.raises(FederationError, match="exists already and was not touched"):
        provision(trial / SERVER / "federation.toml", trial)
    assert {path: path.read_bytes() for path in files(trial)} == before


# --- what a kit grants ---


def test_a_hardened_kit_grants_what_is_needed_and_nothing_else(done: Enrolled) -> None:
    for name in EVERYBODY:
        home = done.home(name)
        said = json.loads((home.kit / "local/resources.json").read_text())
        role = "controller.ServerController" if home.is_server else "executor.PartyExecutor"
        assert said["class_allow_list"] == [f"pbmvfl.deploy.nvflare.{role}"]
        assert said["class_list_enforcement_mode"] == "enforce"
        assert said["app_validator"]["path"] == "pbmvfl.deploy.nvflare.validator.JobValidator"
        text = json.dumps(said)
        assert "log_streamer" not in text
        assert "log_receiver" not in text
        assert "/tmp/nvflare" not in text
        rights = json.loads((home.kit / "local/authorization.json").read_text())["permissions"]
        for role in ("lead", "project_admin", "org_admin", "member"):
            assert isinstance(rights[role], dict), "a role with one word would have every right"
            for right in ("byoc", "shell_commands", "operate", "download_job", "server-predeployed-flwr"):
                assert rights[role][right] == "none", (role, right)
        assert [role for role in rights if rights[role]["submit_job"] != "none"] == ["lead"]
        startup = json.loads(next((home.kit / "startup").glob("fed_*.json")).read_text())
        assert startup["require_signed_jobs"] is True
        said = json.loads((home.kit / "comm_config.json").read_text())
        assert said["allow_adhoc_conns"] is False
        assert said["internal"]["resources"] == {"host": "localhost", "connection_security": "mtls"}
        log = json.loads((home.kit / "local/log_config.json").read_text())
        assert log["loggers"]["root"]["level"] == "WARNING"


def test_a_party_tells_the_server_nothing_of_its_settings(done: Enrolled) -> None:
    """NVFlare sends every setting that it does not know to the server when a site registers."""
    from nvflare.private.fed.utils.site_config import project_site_config

    said = json.loads((done.home("bank").kit / "local/resources.json").read_text())
    assert project_site_config(said), "if NVFlare no longer does this, the setting can go"
    assert said["client"]["site_config"] == {}


@pytest.mark.parametrize("name", ["comm_config.json", "resources.json", "fed_client.json"])
@pytest.mark.parametrize("ending", ["", ".default"])
def test_settings_that_a_job_brought_are_not_found(setup: Enrolled, name: str, ending: str) -> None:
    """By NVFlare's own search, in a kit where every folder of a job is listed before the kit's own."""
    from nvflare.fuel.utils.config_factory import ConfigFactory

    home = setup.home("bank")
    job = home.kit / "00000000-0000-4000-8000-000000000000/app_bank/config"
    job.mkdir(parents=True)
    for other in (ending, ".conf", ".yml"):
        (job / Path(name).with_suffix(other if other.startswith((".c", ".y")) else f".json{other}")).write_text("{}")
    found = ConfigFactory.load_config(name, [str(home.kit)])
    assert found is not None
    assert found.to_dict() == json.loads((home.kit / name).read_text()) != {}
    if name != "comm_config.json":
        folder = "local" if name == "resources.json" else "startup"
        assert (home.kit / name).read_bytes() == (home.kit / folder / name).read_bytes()


@pytest.mark.parametrize("stray", ["local/custom", "local/x__p_resources.json", "startup/fl__resources.json"])
def test_a_kit_with_a_file_more_is_not_started(setup: Enrolled, stray: str) -> None:
    home = setup.home("bank")
    check(home)
    (home.kit / stray).mkdir() if stray.endswith("custom") else (home.kit / stray).write_text("{}")
    with pytest.raises(FederationError, match=re.escape(Path(stray).name)):
        check(home)


def test_rules_that_were_changed_or_lost_are_written_anew(setup: Enrolled) -> None:
    home = setup.home("bank")
    before = {path: path.read_bytes() for path in files(home.kit)}
    (home.kit / "local/authorization.json").unlink()
    (home.kit / "comm_config.json").write_text('{"comm_driver_path": "."}')
    harden(home)
    assert {path: path.read_bytes() for path in files(home.kit)} == before


# --- who is who ---


def test_everybody_pins_the_same_distinct_identities(done: Enrolled) -> None:
    pins = [done.home(name).pins() for name in EVERYBODY]
    assert pins[0] == pins[1] == pins[2]
    assert len({pins[0].server, *pins[0].parties}) == len(EVERYBODY)
    for name, pinned in zip(EVERYBODY, (pins[0].server, *pins[0].parties), strict=True):
        assert pinned == done.home(name).identity().public


def test_all_see_one_fingerprint(done: Enrolled) -> None:
    assert {fingerprint_of(done.home(name)) for name in EVERYBODY} == {done.fingerprint}
    assert re.fullmatch(r"([0-9a-f]{4} ){7}[0-9a-f]{4}", done.fingerprint)


def test_certificates_name_their_organisation_and_role(done: Enrolled) -> None:
    for home, path, name, role in [
        (SERVER, "kit/startup/server.crt", SERVER, "server"),
        (SERVER, "lead/startup/client.crt", LEAD, "lead"),
        ("bank", "kit/startup/client.crt", "bank", "client"),
    ]:
        certificate = x509.load_pem_x509_certificate((done.root / home / path).read_bytes())
        said = {attribute.oid._name: attribute.value for attribute in certificate.subject}
        assert (said["commonName"], said["unstructuredName"]) == (name, role)
        assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 365


@pytest.mark.parametrize("said", ["0" * 32, "{}0", "", "no number"])
def test_a_wrong_fingerprint_writes_nothing(setup: Enrolled, said: str) -> None:
    home = setup.home("bank")
    shutil.rmtree(home.kit)
    os.unlink(home.path / "pins.json")
    before = sorted(files(home.path))
    with pytest.raises(FederationError, match="fingerprint"):
        setup.package("bank", fingerprint_said=said.format(setup.fingerprint))
    assert sorted(files(home.path)) == before


@pytest.mark.parametrize("form", ["{0}", "{1}", "{2}", " {0} "])
def test_the_right_fingerprint_is_known_however_it_is_written(setup: Enrolled, form: str) -> None:
    digits = setup.fingerprint
    said = form.format(digits, digits.replace(" ", ""), digits.replace(" ", "-").upper())
    assert setup.package("bank", fingerprint_said=said) == digits


def test_an_authority_that_swaps_an_identity_shows_another_fingerprint(setup: Enrolled) -> None:
    """It sits between bank and hospital, with keys of its own: only the phone can tell, and it does."""
    home = setup.home("bank")
    os.unlink(home.path / "pins.json")
    swap_identity(setup, "hospital")
    with pytest.raises(FederationError, match="not what the others have"):
        setup.package("bank", fingerprint_said=setup.fingerprint)
    assert setup.package("bank") != setup.fingerprint


def test_an_identity_that_changed_since_is_refused_until_its_owner_says_so(setup: Enrolled) -> None:
    swap_identity(setup, "hospital")
    with pytest.raises(FederationError, match=r"identity of hospital is another one than before; call them"):
        setup.package("bank")
    setup.package("bank", replace=True)


def test_an_organisation_that_lost_its_keys_gets_new_ones_after_calls(setup: Enrolled) -> None:
    """New keys at bank: the authority and all others take them only if told to, and nobody is swapped on the way."""
    bank = setup.home("bank")
    shutil.rmtree(bank.path / "request")
    os.unlink(bank.path / "identity.key")
    parcel = request(setup.toml, "bank", bank.path)
    with pytest.raises(FederationError, match="bank has asked before with another key"):
        setup.asks(parcel)
    fingerprint = setup.asks(parcel, replace=True).fingerprint
    assert fingerprint != setup.fingerprint
    whole = setup.signed("bank").read_bytes()
    swap_identity(setup, "hospital")
    with pytest.raises(FederationError, match="identity of hospital is another one than before"):
        setup.package("bank")
    setup.signed("bank").write_bytes(whole)
    assert setup.package("bank") == fingerprint
    with pytest.raises(FederationError, match="identity of bank is another one than before"):
        setup.package("hospital")
    assert setup.package("hospital", replace=True) == fingerprint
    assert {fingerprint_of(setup.home(name)) for name in ("bank", "hospital")} == {fingerprint}


def test_another_identity_for_oneself_is_refused(setup: Enrolled) -> None:
    swap_identity(setup, "bank")
    with pytest.raises(FederationError, match="another identity for bank than the one here"):
        setup.package("bank", replace=True)


def test_another_organisations_parcel_is_refused(setup: Enrolled) -> None:
    with pytest.raises(FederationError, match="is for 'hospital', and this is the folder of bank"):
        setup.package("bank", "hospital")


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda said, other: said.update(site=other["site"]), r"is of 'hospital', not of 'bank'"),
        (lambda said, _: said["identities"].update(hospital=said["identities"]["clinic"]), "have the same key"),
        (lambda said, _: said["identities"].pop("hospital"), "does not have exactly the identities"),
        (lambda said, _: said["identities"].update(shop="00" * 32), "does not have exactly the identities"),
        (lambda said, _: said["identities"].update(hospital="00"), "32 bytes"),
        (lambda said, _: said.update(federation="0" * 64), r"another federation\.toml"),
        (lambda said, _: said.update(format=2), "format='2'"),
        (lambda said, _: said.update(format=True), "format='True'"),
        (lambda said, _: said.update(authority="x"), "is no certificate"),
        (lambda said, _: said.update(authority=said["authority"] * 2), "has 2 certificates"),
        (lambda said, _: said.update(authority=said["site"]), "was not signed by"),
        (lambda said, _: said.update(more=1), "not of the form"),
        (lambda said, _: said.update(site=3), "not of the form"),
    ],
)
def test_a_tampered_parcel_is_refused(setup: Enrolled, alter: Callable[..., object], words: str) -> None:
    other = json.loads(setup.signed("hospital").read_text())
    change(setup.signed("bank"), lambda said: alter(said, other))
    with pytest.raises(FederationError, match=words) as caught:
        setup.package("bank", replace=True)
    assert str(setup.signed("bank")) in str(caught.value)


def test_a_certificate_for_somebody_elses_key_is_refused(setup: Enrolled, tmp_path: Path) -> None:
    """The authority signs bank's name for a key of its own, to pose as bank; bank at least will not run with it."""
    said = json.loads(setup.request("bank").read_text())
    other = json.loads(request(setup.toml, "bank", tmp_path / "elsewhere").read_text())
    assert said["site"] != other["site"]
    pem = authority._sign(setup.authority, other["site"], "client", 30, "h")
    change(setup.signed("bank"), lambda signed: signed.update(site=pem))
    with pytest.raises(FederationError, match="is not the key of"):
        setup.package("bank")


@pytest.mark.parametrize(
    ("days", "words"),
    [((-10, -3), r"expired on \d{4}-\d\d-\d\d"), ((3, 10), r"is not valid yet: .* is the clock right\?")],
)
def test_dates_that_are_over_or_still_to_come_are_named(
    setup: Enrolled, tmp_path: Path, days: tuple[int, int], words: str
) -> None:
    other = Authority(tmp_path / "other")
    issued = other.issue("bank", first_day=days[0], last_day=days[1])
    home = setup.home("bank")
    shutil.copyfile(issued.private_key, home.path / "request/bank.key")
    pems = {"site": issued.certificate.read_text(), "authority": issued.authority.read_text()}
    change(setup.signed("bank"), lambda said: said.update(pems))
    with pytest.raises(FederationError, match=words):
        setup.package("bank")


# --- requests ---


def test_parcels_come_when_everybody_has_asked_and_the_order_does_not_matter(done: Enrolled, tmp_path: Path) -> None:
    init(done.toml, tmp_path / "authority")
    first = approve(tmp_path / "authority", [done.request("hospital")])
    assert (first.bundles, first.missing, first.fingerprint) == ({}, ("clinic", "bank"), "")
    assert approve(tmp_path / "authority", [done.request("bank")]).missing == ("clinic",)
    last = approve(tmp_path / "authority", [done.request("clinic")])
    assert (set(last.bundles), last.missing) == (set(EVERYBODY), ())
    assert last.fingerprint != done.fingerprint, "another authority, another fingerprint"


def test_certificates_are_renewed_for_the_same_keys(setup: Enrolled) -> None:
    before = setup.home("bank").certificate.read_bytes()
    key = setup.home("bank").private_key.read_bytes()
    assert setup.asks(days=700).fingerprint == setup.fingerprint
    assert setup.package("bank") == setup.fingerprint
    after = setup.home("bank").certificate.read_bytes()
    assert before != after
    assert setup.home("bank").private_key.read_bytes() == key


def test_asking_again_keeps_the_keys(setup: Enrolled) -> None:
    before = {path: path.read_bytes() for path in (setup.root / "bank").rglob("*.key")}
    request(setup.toml, "bank", setup.root / "bank")
    assert {path: path.read_bytes() for path in (setup.root / "bank").rglob("*.key")} == before
    assert not setup.asks(setup.request("bank")).missing


def test_a_second_request_with_another_key_is_refused_unless_it_is_to_replace_the_first(
    setup: Enrolled, tmp_path: Path
) -> None:
    other = request(setup.toml, "bank", tmp_path / "impostor")
    with pytest.raises(FederationError, match="bank has asked before with another key; call them"):
        setup.asks(other)
    assert setup.asks().fingerprint == setup.fingerprint, "the first one stands"
    assert setup.asks(other, replace=True).fingerprint != setup.fingerprint


def test_two_requests_of_one_name_at_once_are_refused(setup: Enrolled, tmp_path: Path) -> None:
    other = request(setup.toml, "bank", tmp_path / "impostor")
    with pytest.raises(FederationError, match="are both of bank, with different keys"):
        setup.asks(other, setup.request("bank"), replace=True)


def test_an_identity_of_another_cannot_be_asked_for(setup: Enrolled) -> None:
    """Hospital asks as itself, but with bank's public identity: it cannot sign that."""
    bank = setup.home("bank").identity().public.hex()
    change(setup.request("hospital"), lambda said: said.update(identity=bank))
    with pytest.raises(FederationError, match="not signed by the identity in it"):
        setup.asks(setup.request("hospital"), replace=True)


def test_one_organisation_cannot_be_two(setup: Enrolled, tmp_path: Path) -> None:
    """The same identity, asked for in two names and signed as it should be."""
    shutil.copytree(setup.root / "bank", tmp_path / "hospital")
    for path in (tmp_path / "hospital/request").iterdir():
        path.unlink()
    (tmp_path / "hospital/organisation.json").write_text('{"name": "hospital"}')
    other = request(setup.toml, "hospital", tmp_path / "hospital")
    with pytest.raises(FederationError, match="bank and hospital have the same key"):
        setup.asks(other, replace=True)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda said: said.update(name="hospital"), "not signed by"),
        (lambda said: said.update(site="x"), "not signed by"),
        (lambda said: said.update(identity="00" * 32), "not signed by"),
        (lambda said: said.update(identity="00"), "32 bytes"),
        (lambda said: said.pop("lead"), "not of the form"),
    ],
)
def test_a_tampered_request_is_refused(setup: Enrolled, alter: Callable[..., object], words: str) -> None:
    change(setup.request("bank"), alter)
    with pytest.raises(FederationError, match=words):
        setup.asks(setup.request("bank"), replace=True)


def signed_request(setup: Enrolled, name: str, path: Path, **said: str) -> Path:
    """A request that somebody with a key of their own signed, whatever it says."""
    from pbmvfl.deploy.site.enrolment import Request

    identity = Identity.generate()
    values = {"federation": setup.home("bank").federation.digest, "name": name, "identity": identity.public, "lead": ""}
    Request(**{**values, "site": "", **said}).write(path, identity)  # type: ignore[arg-type]
    return path


def test_an_outsider_who_signs_well_is_still_refused(setup: Enrolled, tmp_path: Path) -> None:
    csr = (setup.root / "bank/request/bank.csr").read_text()
    for said, words in [
        ({"name": "shop", "site": csr}, r"name='shop' is not in federation\.toml"),
        ({"name": "hospital", "site": csr}, "is not hospital's own"),
        ({"name": "bank", "site": csr, "lead": csr}, "asks for the lead's certificate too, and nobody else"),
        ({"name": "clinic", "site": csr}, "asks for the lead's certificate too, and nobody else"),
        ({"name": "bank", "site": csr, "federation": "0" * 64}, r"another federation\.toml"),
        ({"name": "bank", "site": "-----BEGIN"}, "no request for a certificate"),
        ({"name": "bank", "site": csr}, "asked before with another key"),
    ]:
        path = signed_request(setup, path=tmp_path / "x.json", **said)  # type: ignore[arg-type]
        with pytest.raises(FederationError, match=words):
            setup.asks(path)


def test_the_authority_is_not_made_over_another(setup: Enrolled) -> None:
    with pytest.raises(FederationError, match="is not empty and was not touched"):
        init(setup.toml, setup.authority)


def test_a_folder_of_another_organisation_is_not_taken_over(setup: Enrolled) -> None:
    with pytest.raises(FederationError, match="is the folder of bank, not of hospital"):
        request(setup.toml, "hospital", setup.root / "bank")
    with pytest.raises(FederationError, match=r"party='shop' is not in federation\.toml"):
        request(setup.toml, "shop", setup.root / "shop")


# --- files that are none of a federation ---


def test_bytes_of_another_form_or_too_many_are_refused(setup: Enrolled, tmp_path: Path) -> None:
    whole = setup.signed("bank").read_bytes()
    for raw in (os.urandom(200), whole[:-5], b"[" * 100_000, b" " * 1_000_001 + whole):
        (tmp_path / "x.json").write_bytes(raw)
        with pytest.raises(FederationError, match=re.escape(str(tmp_path / "x.json"))):
            package(setup.home("bank"), tmp_path / "x.json")
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(FederationError, match=re.escape(str(path))):
            package(setup.home("bank"), path)
    (tmp_path / "x.json").write_bytes(b" " * 900_000 + whole)  # the control: long, and still one
    package(setup.home("bank"), tmp_path / "x.json")
