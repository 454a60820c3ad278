"""`pbmvfl federation`, `party`, `server` as an operator sees them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.deployments import PARTIES, SERVER, federation_text

Cli = Callable[..., tuple[int, str, str]]
EVERYBODY = (SERVER, *PARTIES)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, run_main: Cli, tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "federation.toml").write_text(federation_text())
    return run_main


@pytest.fixture
def nvflare() -> None:
    pytest.importorskip("nvflare")


@pytest.mark.usefixtures("nvflare")
def test_the_steps_of_the_help_set_up_a_federation(cli: Cli) -> None:
    """Every command as the help has it, each answer naming the next step, one fingerprint at the end."""
    code, out, err = cli("federation", "init", "federation.toml")
    assert code == 0, err
    assert "authority of people in authority: keep it where few can read it" in out
    requests = []
    for name in EVERYBODY:
        code, out, err = cli("federation", "request", "federation.toml", "--name", name, "--home", name)
        assert code == 0, err
        assert f"keys of {name} in" in out
        assert "it holds public keys only" in out
        requests.append(f"{name}/request/{name}.request.json")
    code, out, _ = cli("federation", "approve", "authority", *requests[:1])
    assert (code, out) == (0, "kept; still to ask: bank, hospital\n")
    code, out, err = cli("federation", "approve", "authority", *requests)
    assert code == 0, err
    said = out[out.index("fingerprint") :].splitlines()[0].removeprefix("fingerprint").strip()
    assert len(said) == 39
    for name in EVERYBODY:
        parcel = f"authority/signed/{name}.signed.json"
        assert parcel in out
        code, shown, err = cli("federation", "package", parcel, "--home", name)
        assert code == 0, err
        assert said in shown
        assert "If theirs differs, somebody is in between: do not start" in shown
        assert cli("federation", "fingerprint", "--home", name)[1] == f"fingerprint  {said}\n"
    code, out, err = cli("federation", "package", parcel, "--home", name, "--fingerprint", "0" * 32)
    assert (code, out) == (2, "")
    assert "do not go on with it, and call them" in err


@pytest.mark.usefixtures("nvflare")
def test_json_is_all_that_is_printed_where_it_is_asked_for(cli: Cli) -> None:
    made = json.loads(cli("federation", "provision", "federation.toml", "trial", "--json")[1])
    assert made["trial"] is True
    assert set(made["homes"]) == set(EVERYBODY)
    code, out, _ = cli("party", "status", "--home", "trial/bank", "--json")
    status = json.loads(out)
    assert (code, status["running"], status["pid"]) == (1, False, None)
    assert set(json.loads(cli("federation", "fingerprint", "--home", "trial/bank", "--json")[1])) == {
        "name",
        "fingerprint",
    }


@pytest.mark.usefixtures("nvflare")
def test_a_trial_says_that_it_is_one(cli: Cli) -> None:
    code, out, err = cli("federation", "provision", "federation.toml", "trial")
    assert code == 0, err
    assert "this is a trial: every key was made here, by you" in out


@pytest.mark.usefixtures("nvflare")
def test_sites_are_started_by_their_own_command(cli: Cli) -> None:
    cli("federation", "provision", "federation.toml", "trial")
    for command, home in (("party", SERVER), ("server", "bank")):
        for verb in ("start", "stop", "status"):
            code, out, err = cli(command, verb, "--home", f"trial/{home}")
            assert (code, out) == (2, "")
            assert f"is the folder of {home}, a {'party' if command == 'server' else 'server'}" in err
    code, out, _ = cli("server", "status", "--home", f"trial/{SERVER}")
    assert code == 1
    assert out.splitlines() == ["clinic does not run", "certificate valid for 364 more days"]
    assert cli("server", "stop", "--home", f"trial/{SERVER}")[1] == "clinic was not running\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("party", "start"), "is no organisation's folder"),
        (("federation", "fingerprint"), "is no organisation's folder"),
        (("federation", "request", "federation.toml", "--name", "shop"), "party='shop' is not in federation.toml"),
        (("federation", "request", "missing.toml", "--name", "bank"), "missing.toml cannot be read"),
        (("federation", "approve", "nowhere"), "cannot be read"),
        (("federation", "init", "nowhere.toml"), "nowhere.toml cannot be read"),
    ],
)
@pytest.mark.usefixtures("nvflare")
def test_mistakes_end_with_words_and_leave_no_file(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert [each.name for each in tmp_path.iterdir()] == ["federation.toml"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("federation", "provision", "federation.toml", "trial"),
        ("federation", "request", "federation.toml", "--name", "bank"),
    ],
)
def test_whoever_lacks_nvflare_is_told_how_to_get_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "nvflare", None)
    monkeypatch.setattr("pbmvfl.cli.federation.find_spec", lambda _: None)
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert 'NVFlare is not installed; pip install "pbmvfl[deploy]"' in err


def test_help_and_everything_else_load_no_nvflare_and_no_torch(run_process: Any, tmp_path: Path) -> None:
    program = "import sys\nfrom pbmvfl.cli import main\ntry:\n    main()\nfinally:\n"
    program += "    print([n for n in ('nvflare', 'torch', 'psutil', 'grpc') if n in sys.modules], file=sys.stderr)\n"
    for arguments in (("federation", "--help"), ("party", "start", "--help"), ("server", "status", "--help")):
        done = run_process(*arguments, program=program, cwd=tmp_path)
        assert (done.returncode, done.stderr.strip()) == (0, "[]")
