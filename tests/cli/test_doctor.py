"""`pbmvfl doctor`: a machine in order passes, each trouble is named with a way out, and nothing is left behind."""

from __future__ import annotations

import fcntl
import importlib
import json
from dataclasses import replace

import mpmath
import numpy as np
import pytest

from pbmvfl.cli.doctor import Finding, Status, run_check
from pbmvfl.crypto.secure_sum import Masks

#: By its full name: `pbmvfl.cli.doctor` is also the command itself.
doctor_module = importlib.import_module("pbmvfl.cli.doctor")


@pytest.fixture
def doctor(run_main, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PBMVFL_DATA", raising=False)
    return lambda *options: run_main("doctor", *options)


def test_a_machine_in_order_passes_and_nothing_is_left_behind(doctor, tmp_path, monkeypatch):
    monkeypatch.setenv("PBMVFL_STATE", str(tmp_path / "later"))
    code, out, err = doctor()
    assert (code, err) == (0, "")
    assert "ready" in out
    assert "trouble" not in out
    assert all(name in out for name, _ in doctor_module.CHECKS)
    assert list(tmp_path.iterdir()) == []


def test_json_has_every_check_and_nothing_else(doctor):
    code, out, _ = doctor("--json")
    found = json.loads(out)
    assert code == 0
    assert found["ok"] is True
    assert [each["name"] for each in found["checks"]] == [name for name, _ in doctor_module.CHECKS]
    assert {each["status"] for each in found["checks"]} <= {"ok", "note"}


def test_trouble_ends_with_code_1_and_a_way_out(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("PBMVFL_DATA", str(tmp_path / "nowhere"))
    code, out, _ = doctor()
    assert code == 1
    assert "trouble with data" in out
    assert "do: set PBMVFL_DATA to a folder" in out
    code, out, _ = doctor("--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_a_check_that_fails_is_a_finding_and_the_others_are_made(doctor, monkeypatch):
    def fails() -> Finding:
        raise RuntimeError("a library is broken")

    monkeypatch.setattr(doctor_module, "CHECKS", (("torch", fails), *doctor_module.CHECKS[3:]))
    code, out, _ = doctor("--json")
    found = json.loads(out)["checks"]
    assert code == 1
    assert found[0]["status"] == "trouble"
    assert "a library is broken" in found[0]["found"]
    assert len(found) == len(doctor_module.CHECKS)


def is_trouble(finding: Finding, *words: str) -> None:
    assert finding.status is Status.TROUBLE, finding
    assert finding.way_out
    for each in words:
        assert each in finding.found


# --- what is installed ---


def test_an_old_python_is_trouble():
    is_trouble(doctor_module.python_version((3, 10, 4)), "3.10.4")
    assert doctor_module.python_version((3, 12, 0)).status is Status.OK


def test_packages_that_are_missing_or_too_old_are_all_named():
    wanted = ["numpy>=999.5", "numpy>=1.0", "surely-not-installed>=1", 'mypy>=999; extra == "dev"']
    found = doctor_module.packages(wanted)
    is_trouble(found, "numpy", "is older than 999.5", "surely-not-installed is missing")
    assert "mypy" not in found.found
    assert doctor_module.packages(["numpy>=1.0", "torch>=2.0"]).status is Status.OK


def test_versions_are_compared_as_numbers():
    assert doctor_module.packages(["numpy>=1.9.99"]).status is Status.OK  # as text 1.10 would be older than 1.9


# --- folders ---


def test_a_folder_that_cannot_be_written_to_is_trouble(tmp_path):
    (tmp_path / "file").write_text("")
    is_trouble(doctor_module.working_folder(tmp_path / "file"), "cannot be written to")


def test_a_file_system_whose_locks_let_two_in_is_trouble(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    is_trouble(doctor_module.working_folder(tmp_path), "lets two processes have one lock")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_trouble(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    is_trouble(doctor_module.working_folder(tmp_path), "has no locks")


def test_a_full_disk_is_trouble(tmp_path, monkeypatch):
    usage = doctor_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor_module.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    is_trouble(doctor_module.free_disk(tmp_path), "1 MB")


def test_a_state_folder_that_cannot_be_made_is_a_note_because_ledgers_work_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PBMVFL_STATE", str(tmp_path / "file" / "state"))
    found = doctor_module.state()
    assert found.status is Status.NOTE
    assert "PBMVFL_STATE" in found.way_out


def test_the_data_folder_is_shown_with_what_it_holds(tmp_path, monkeypatch):
    (tmp_path / "phishing").mkdir()
    (tmp_path / "holiday").mkdir()
    monkeypatch.setenv("PBMVFL_DATA", str(tmp_path))
    found = doctor_module.data_folders()
    assert found.status is Status.OK
    assert found.found == f"{tmp_path}: phishing"


# --- known answers: each notices what it is there for ---


class Stuck:
    seeded = False

    def fill(self, buffer: np.ndarray) -> None:
        buffer.view(np.uint8)[...] = 0x5A


def test_randomness_that_repeats_itself_is_noticed(monkeypatch):
    monkeypatch.setattr(doctor_module, "SystemEntropy", Stuck)
    is_trouble(doctor_module.entropy_source(), "repeats itself")


def test_another_cipher_is_noticed(monkeypatch):
    original = doctor_module.keystream
    monkeypatch.setattr(
        doctor_module, "keystream", lambda key, first_block=0: original(key[::-1], first_block=first_block)
    )
    is_trouble(doctor_module.entropy_source(), "NIST")


def test_masks_that_do_not_cancel_are_noticed(monkeypatch):
    original = doctor_module.Masks.for_round

    def skewed(self: Masks, number: int, count: int) -> np.ndarray:
        mask = original(self, number, count).copy()
        mask[0] += 1
        return mask

    monkeypatch.setattr(doctor_module.Masks, "for_round", skewed)
    is_trouble(doctor_module.masks_cancel(), "do not cancel")


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_noise_of_another_size_is_noticed(monkeypatch, factor):
    """At 20,000 draws a deviation of 10% is 20 standard deviations of the sum of squares away."""
    original = doctor_module.rounded_normal
    monkeypatch.setattr(doctor_module, "rounded_normal", lambda entropy, count: factor * original(entropy, count))
    is_trouble(doctor_module.noise_has_its_law(), "size")


def test_a_coin_that_turns_elsewhere_is_noticed(monkeypatch):
    original = doctor_module.PoissonBinomial.randomize
    monkeypatch.setattr(
        doctor_module.PoissonBinomial, "randomize", lambda self, values, entropy: original(self, values * 0.9, entropy)
    )
    is_trouble(doctor_module.noise_has_its_law(), "coins")


@pytest.mark.parametrize("factor", [0.999, 1.01])
def test_an_account_that_says_less_or_more_is_noticed(monkeypatch, factor):
    original = doctor_module.epsilon_bound

    def skewed(*arguments, **options):
        bound = original(*arguments, **options)
        return replace(bound, epsilon=bound.epsilon * factor)

    monkeypatch.setattr(doctor_module, "epsilon_bound", skewed)
    is_trouble(doctor_module.account_gives_known_answers(), "Gaussian step")


def test_the_known_epsilon_is_the_solution_of_its_equation():
    with mpmath.workdps(50):
        half, delta = mpmath.mpf(1) / 2, mpmath.mpf(10) ** -5
        solved = mpmath.findroot(
            lambda e: mpmath.ncdf(half - e) - mpmath.exp(e) * mpmath.ncdf(-half - e) - delta, mpmath.mpf(4.4)
        )
    assert abs(doctor_module.GAUSSIAN_EPSILON / float(solved) - 1) < 1e-7


def test_what_a_check_raises_never_ends_the_examination():
    def fails() -> Finding:
        raise ValueError

    found = run_check("noise", fails)
    is_trouble(found, "ValueError")
