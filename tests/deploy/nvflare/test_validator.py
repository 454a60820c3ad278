"""The one form of a job, and the validator of a site, asked as NVFlare asks it: with an unpacked app's folder."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec
from pbmvfl.errors import OrderError
from support.policy_homes import PARTIES, PARTY_POLICY, align_order, make_alignment, make_home, small_plan, train_order

pytest.importorskip("nvflare", reason="the extra `deploy` is not installed")

from pbmvfl.deploy.nvflare.job import read_argument, write_argument, write_job
from pbmvfl.deploy.nvflare.validator import JobValidator, read_app

JOB = "6c1f7c5e-3f8f-4c9a-9d8e-0a1b2c3d4e5f"
CLIENT, SERVER = "config/config_fed_client.json", "config/config_fed_server.json"
ROLES = ["bank", "clinic"]


def app_name(home: SiteFolder) -> str:
    return "server" if home.is_server else "party"


def unpack(home: SiteFolder, order: JobSpec, scratch: Path) -> Path:
    """What NVFlare leaves in a kit before it asks: the app of this site, in the job's folder."""
    written = scratch / f"job-{home.name}"
    shutil.rmtree(written, ignore_errors=True)
    write_job(written, order, home.federation)
    site = "server" if home.is_server else home.name
    app = home.kit / JOB / f"app_{site}"
    shutil.rmtree(app, ignore_errors=True)
    shutil.copytree(written / app_name(home), app)
    return app


@pytest.fixture(params=ROLES)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> SiteFolder:
    home = make_home(tmp_path, request.param)
    make_alignment(home)
    return home


@pytest.fixture
def app(home: SiteFolder, tmp_path: Path) -> Path:
    return unpack(home, train_order(), tmp_path)


def config_of(app: Path) -> Path:
    return next(app.glob("config/config_fed_*.json"))


def answer(app: Path) -> str:
    said, properties = JobValidator().validate(str(app))
    assert properties == {}
    return said


def edit(app: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a config, and write it exactly as the program writes one."""
    path = config_of(app)
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config, indent=2) + "\n")


def element(config: dict[str, Any]) -> dict[str, Any]:
    """The one component of an app."""
    found: dict[str, Any]
    found = config["workflows"][0] if "workflows" in config else config["executors"][0]["executor"]
    return found


# --- what is written is accepted ---


@pytest.mark.parametrize(
    "order",
    [
        align_order(),
        train_order(),
        train_order(small_plan(num_epochs=2, seed=7)),
        train_order(small_plan(encoder="{$PATH}")),
    ],
    ids=["align", "train", "other", "braces"],
)
def test_a_written_job_is_accepted_and_says_exactly_its_order(home: SiteFolder, tmp_path: Path, order: JobSpec) -> None:
    app = unpack(home, order, tmp_path)
    assert answer(app) == ""
    assert read_app(app, is_server=home.is_server) == order


def test_signatures_that_nvflare_adds_are_accepted_at_both_levels(app: Path) -> None:
    for folder in (app, app / "config"):
        (folder / ".__nvfl_sig.json").write_text("{}")
        (folder / ".__nvfl_submitter.crt").write_text("certificate")
    assert answer(app) == ""


def deploy(home: SiteFolder, job: Path) -> str:
    """What NVFlare's own deployer does with an app's bytes at this site, up to its question to the validator."""
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.workspace import Workspace
    from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
    from nvflare.private.fed.app.fl_app_validator import FLAppValidator
    from nvflare.private.fed.utils.app_authz import AppAuthzService
    from nvflare.private.fed.utils.app_deployer import AppDeployer

    for folder in ("startup", "local"):
        (home.kit / folder).mkdir(parents=True, exist_ok=True)
    site, role = ("server", "server") if home.is_server else (home.name, "client")
    AppAuthzService.initialize(FLAppValidator(site_type=role, custom_validators=[JobValidator()]))
    try:
        data = zip_directory_to_bytes(str(job / app_name(home)), "")
        workspace = Workspace(str(home.kit), site)
        said = AppDeployer().deploy(workspace, JOB, {"name": "job"}, app_name(home), data, FLContext())
    finally:
        AppAuthzService.initialize(None)
    return str(said or "")


def test_nvflare_s_own_deployer_finds_the_validator_s_answer(home: SiteFolder, tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_job(job, train_order(), home.federation)
    assert deploy(home, job) == ""
    assert (home.kit / JOB / f"app_{'server' if home.is_server else home.name}" / "config").is_dir()
    (job / app_name(home) / "config" / "comm_config.json").write_text('{"comm_driver_path": "."}')
    said = deploy(home, job)
    assert "'comm_config.json', which is not permitted" in said
    assert not (home.kit / JOB).exists()


def test_a_job_names_every_site_and_none_may_be_missing(home: SiteFolder, tmp_path: Path) -> None:
    write_job(tmp_path / "job", train_order(), home.federation)
    meta = json.loads((tmp_path / "job" / "meta.json").read_text())
    assert meta["deploy_map"] == {"server": ["server"], "party": list(PARTIES)}
    assert meta["mandatory_clients"] == list(PARTIES)
    assert meta["min_clients"] == len(PARTIES)
    assert meta["resource_spec"] == {}
    assert "@ALL" not in (tmp_path / "job" / "meta.json").read_text()
    files = {str(path.relative_to(tmp_path / "job")) for path in (tmp_path / "job").rglob("*") if path.is_file()}
    assert files == {"meta.json", f"server/{SERVER}", f"party/{CLIENT}"}


def test_nvflare_finds_nothing_to_replace_in_an_order(home: SiteFolder, tmp_path: Path) -> None:
    """It takes words in braces for its own settings and for a site's environment: {$PATH} would become the path."""
    from nvflare.fuel.utils.json_scanner import JsonScanner
    from nvflare.fuel.utils.wfconf import resolve_var_refs

    for order in (align_order(), train_order(small_plan(encoder="{$PATH}")), train_order(small_plan(encoder="{name}"))):
        app = unpack(home, order, tmp_path)
        config = json.loads(config_of(app).read_text())
        before = json.dumps(config)
        resolve_var_refs(JsonScanner(config, ["job"]), {"name": "replaced", **config})
        assert json.dumps(config) == before
        assert read_argument(element(config)["args"]["order"]) == order


# --- whatever was changed is refused, or is another order as a whole ---


def test_no_changed_byte_is_accepted_unless_it_makes_another_whole_order(
    app: Path, home: SiteFolder, tmp_path: Path
) -> None:
    """Every byte once. Digits of an order may become another order's; then it is written exactly so."""
    path = config_of(app)
    whole = path.read_bytes()
    begin = whole.index(write_argument(train_order()).encode())
    inside = range(begin, begin + len(write_argument(train_order())))
    draw = random.Random(12)
    others = 0
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] = draw.choice([each for each in range(256) if each != whole[place]])
        path.write_bytes(changed)
        try:
            order = read_app(app, is_server=home.is_server)
        except OrderError:
            continue
        others += 1
        assert place in inside
        assert order != train_order()
        write_job(tmp_path / "other", order, home.federation)
        assert (tmp_path / "other" / app_name(home) / "config" / path.name).read_bytes() == changed
    assert 0 < others < len(inside) // 5


def test_a_cut_or_lengthened_file_is_refused(app: Path) -> None:
    path = config_of(app)
    whole = path.read_bytes()
    for changed in (b"", whole[:-1], whole[: len(whole) // 2], whole + b" ", whole + whole, b"\xef\xbb\xbf" + whole):
        path.write_bytes(changed)
        assert answer(app).startswith("pbmvfl: the job is not of the form that pbmvfl writes")


@pytest.mark.parametrize(
    "name",
    [
        "config/comm_config.json",
        "comm_config.json",
        "config/x.py",
        "x.py",
        "custom/x.py",
        "config/custom/x.py",
        "config/fed_client.json",
        "config/resources.json",
        "config/config_fed_client.conf",
        "config/config_fed_client.yml",
        "config/CONFIG_FED_CLIENT.json",
        "config/meta.json",
        "meta.json",
        "config/ ",
        "config/.hidden",
        "config/.__nvfl_other",
        ".__nvfl_sig.json/x",
        "config\x1b[2J.json",
    ],
)
def test_an_added_file_is_refused_by_its_name(app: Path, name: str) -> None:
    path = app / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"comm_driver_path": "."}')
    said = answer(app)
    assert said.startswith("pbmvfl: the job is not of the form that pbmvfl writes")
    assert said.isprintable()


def test_the_other_role_s_config_is_no_file_of_this_app(app: Path, home: SiteFolder, tmp_path: Path) -> None:
    """An app for both would run the server's part at a party."""
    other = CLIENT if home.is_server else SERVER
    written = tmp_path / "both"
    write_job(written, train_order(), home.federation)
    shutil.copy(next(written.glob(f"*/{other}")), app / other)
    assert "which is not permitted" in answer(app)
    (app / (SERVER if home.is_server else CLIENT)).unlink()
    assert "which is not permitted" in answer(app)


@pytest.mark.parametrize("name", ["custom", "config/custom", "config/empty", "empty", ".__nvfl_sig.json"])
def test_an_empty_folder_is_refused(app: Path, name: str) -> None:
    (app / name).mkdir()
    assert "which is not permitted" in answer(app)


def test_links_and_pipes_are_refused_although_they_lead_to_the_right_bytes(app: Path, tmp_path: Path) -> None:
    path = config_of(app)
    kept = tmp_path / "kept.json"
    shutil.copy(path, kept)
    path.unlink()
    path.symlink_to(kept)
    assert "which is not permitted" in answer(app)
    path.unlink()
    os.mkfifo(path)
    assert "which is not permitted" in answer(app)
    path.unlink()
    shutil.copy(kept, path)
    shutil.move(app / "config", tmp_path / "elsewhere")
    (app / "config").symlink_to(tmp_path / "elsewhere")
    assert "which is not permitted" in answer(app)
    (app / "config").unlink()
    shutil.move(tmp_path / "elsewhere", app / "config")
    assert answer(app) == ""
    (app / ".__nvfl_sig.json").symlink_to(kept)
    assert "which is not permitted" in answer(app)


def test_a_missing_file_folder_and_app_are_refused(app: Path) -> None:
    config_of(app).unlink()
    assert "is missing" in answer(app)
    (app / "config").rmdir()
    assert answer(app).endswith("'config' is missing")
    app.rmdir()
    assert answer(app).startswith("pbmvfl: this site cannot take the order now")


def test_huge_files_are_refused_without_being_read(app: Path) -> None:
    path = config_of(app)
    os.truncate(path, 1 << 40)
    assert "bytes; permitted: at most" in answer(app)


def test_many_files_are_not_gone_through(app: Path) -> None:
    for number in range(200):
        (app / "config" / f"{number}.json").touch()
    assert answer(app) != ""


# --- other classes, other keys ---

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another class": lambda config: element(config).update(path="subprocess.Popen"),
    "class by name": lambda config: element(config).update(name="Popen"),
    "class_path": lambda config: element(config).update(class_path="subprocess.Popen"),
    "no class": lambda config: element(config).pop("path"),
    "the other role's class": lambda config: element(config).update(
        path="pbmvfl.deploy.nvflare.executor.PartyExecutor"
        if "workflows" in config
        else "pbmvfl.deploy.nvflare.controller.ServerController"
    ),
    "a second argument": lambda config: element(config)["args"].update(debug=True),
    "a component as argument": lambda config: element(config)["args"].update(order={"path": "subprocess.Popen"}),
    "a list as order": lambda config: element(config)["args"].update(order=[1]),
    "no order": lambda config: element(config)["args"].pop("order"),
    "another name of the argument": lambda config: element(config).update(
        args={"Order": element(config)["args"]["order"]}
    ),
    "no arguments": lambda config: element(config).pop("args"),
    "a component": lambda config: config["components"].append({"id": "x", "path": "subprocess.Popen", "args": {}}),
    "a filter": lambda config: config["task_data_filters"].append({"tasks": ["*"], "filters": []}),
    "a result filter": lambda config: config["task_result_filters"].append({"tasks": ["*"], "filters": []}),
    "a variable": lambda config: config.update(name="x"),
    "a parameterized item": lambda config: config.update({"@x": {}}),
    "another version": lambda config: config.update(format_version=3),
    "a number that is a text": lambda config: config.update(format_version="2"),
    "a truth that is a number": lambda config: config.update(format_version=True),
    "components gone": lambda config: config.pop("components"),
    "a timeout": lambda config: config.update(client_outcome_wait_timeout=1),
    "a second workflow": lambda config: config.setdefault("workflows", []).append({"id": "x", "path": "a.B"}),
    "a second executor": lambda config: config.setdefault("executors", []).append({"tasks": ["x"], "executor": {}}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_class_key_or_value_is_refused(app: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(app, change)
    assert answer(app).startswith("pbmvfl: the job is not of the form that pbmvfl writes")


def test_a_key_that_is_given_twice_is_refused(app: Path) -> None:
    """Readers differ in which of the two they take."""
    path = config_of(app)
    text = path.read_text()
    path.write_text(text.replace('"format_version": 2,', '"format_version": 2,\n  "format_version": 2,', 1))
    assert answer(app) != ""


@pytest.mark.parametrize("text", ["null", "[]", "3", '"x"', "{}", "[" * 100_000, "\xff", "nan", '{"workflows": [3]}'])
def test_json_of_another_shape_is_refused(app: Path, text: str) -> None:
    config_of(app).write_bytes(text.encode("latin-1"))
    assert answer(app).startswith("pbmvfl: the job is not of the form that pbmvfl writes")


# --- the order itself ---


@pytest.mark.parametrize(
    "argument",
    ["", "{}", "e30", "e30=", "====", "\u00e9", "a" * 1_000_000, "{$PATH}", " ", "e30=\n"],
)
def test_an_argument_that_is_no_order_is_refused(app: Path, argument: str) -> None:
    edit(app, lambda config: element(config)["args"].update(order=argument))
    assert answer(app) != ""


def test_an_argument_has_one_spelling() -> None:
    for order in (align_order(alignment="a" * length) for length in range(1, 9)):
        argument = write_argument(order)
        assert read_argument(argument) == order
        kept = argument.rstrip("=")
        spellings = {kept, argument + "=", argument.replace("=", "==", 1), argument + "\n", "\n" + argument}
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
        spellings |= {kept[:-1] + letter + argument[len(kept) :] for letter in letters} - {argument}
        for other in spellings - {argument}:
            with pytest.raises(OrderError):
                read_argument(other)


def test_an_order_that_the_site_does_not_take_is_refused_in_its_words(home: SiteFolder, tmp_path: Path) -> None:
    for order, words in (
        (train_order(federation="others"), "federation=others: this site is of federation people"),
        (train_order(small_plan(num_parties=9)), "num_parties=9: federation people has 3 parties"),
        (train_order(small_plan(evaluation="simulator")), "evaluation=simulator"),
        (train_order(alignment="second"), "alignment=second: this site has no such rows"),
        *([] if home.is_server else [(train_order(small_plan(noise_multiplier=0.5)), "run=monday: a limit of this")]),
    ):
        said = answer(unpack(home, order, tmp_path))
        assert said.startswith(f"pbmvfl: {words}")
        assert str(home.path) not in said


def test_words_that_an_attacker_chose_are_no_commands_to_a_terminal(tmp_path: Path) -> None:
    home = make_home(tmp_path, policy=PARTY_POLICY + '[plan.fields]\nencoder = ["linear"]\n')
    make_alignment(home)
    app = unpack(home, train_order(small_plan(encoder="\x1b[2J\nforged line \u202e" + "x" * 5000)), tmp_path)
    said = answer(app)
    assert "encoder=" in said
    assert "the policy permits linear" in said
    assert said.isascii()
    assert said.isprintable()


def test_a_kit_that_is_in_no_organisation_s_folder_takes_nothing(tmp_path: Path, home: SiteFolder) -> None:
    app = unpack(home, train_order(), tmp_path)
    alone = tmp_path / "alone" / "kit" / JOB
    alone.mkdir(parents=True)
    shutil.copytree(app, alone / app.name)
    assert answer(alone / app.name).startswith("pbmvfl: this site cannot take the order now")


@pytest.mark.parametrize("folder", ["", "/", ".", "x", "\0"])
def test_a_folder_that_is_none_raises_nothing(folder: str) -> None:
    said, _ = JobValidator().validate(folder)
    assert said.startswith("pbmvfl: ")
