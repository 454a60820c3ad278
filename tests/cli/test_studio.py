"""`pbmvfl studio`: whom it answers, that it says what `pbmvfl plan --json` says, and the page in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from benchmarks.planner.page import studio_records

from pbmvfl.cli.studio import app as studio_module
from pbmvfl.cli.studio.app import CONTROLS, Settings, estimate, read_settings, server_of, studio_app
from support.browser import Browser, in_a_browser

TOKEN = "a-token-of-the-test"
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "planner.json"


class Served:
    """A server on loopback, and requests to it."""

    def __init__(self, port: int, place: Path) -> None:
        self.port, self.place = port, place
        self.address = f"http://127.0.0.1:{port}/{TOKEN}/"

    def request(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Send a request; a header's name has _ for -, and Host may be replaced."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="Host" in given)
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders()
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode()

    def get(self, what: str, **query: object) -> tuple[int, Any]:
        status, _, body = self.request(f"/{TOKEN}/{what}?{urlencode(query)}")
        return status, json.loads(body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("studio")
    (place / "runs").mkdir()
    (place / "ledgers").mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        app = studio_app(TOKEN, port=port, runs=place / "runs", ledger=place / "ledgers")
        running = server_of(app)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Served(port, place)
        running.should_exit = True
        thread.join(timeout=60)


# --- who is answered ---


@pytest.mark.parametrize("path", ["/", "/plan", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/plan", "//plan", f"/x/{TOKEN}/plan"])
def test_without_the_token_there_is_nothing(served, path):
    status, _, body = served.request(path)
    assert status == 404
    assert TOKEN not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost:{port}.x", ""]
)
def test_another_host_is_refused_whatever_address_it_resolves_to(served, host):
    status, _, _ = served.request(f"/{TOKEN}/", Host=host.format(port=served.port))
    assert status in (400, 421)


def test_both_names_of_this_machine_are_answered(served):
    for name in ("127.0.0.1", "localhost"):
        assert served.request(f"/{TOKEN}/", Host=f"{name}:{served.port}")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_origin_is_refused(served, headers):
    assert served.request(f"/{TOKEN}/plan", **headers)[0] == 403


def test_its_own_origin_is_answered_and_no_other_may_read(served):
    status, headers, _ = served.request(
        f"/{TOKEN}/history", Origin=f"http://127.0.0.1:{served.port}", Sec_Fetch_Site="same-origin"
    )
    assert status == 200
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(served, method):
    assert served.request(f"/{TOKEN}/plan", method=method)[0] == 405


@pytest.mark.parametrize("path", ["", "studio.js", "studio.css", "plan", "history", "nowhere"])
def test_every_answer_forbids_other_sources_frames_and_caches(served, path):
    _, headers, _ = served.request(f"/{TOKEN}/{path}")
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


def test_the_page_names_no_other_machine(served):
    for path in ("", "studio.js", "studio.css"):
        _, _, text = served.request(f"/{TOKEN}/{path}")
        addresses = re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`]*", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"url\(|@import|<script>|\son\w+=|\sstyle=", text)


# --- bad values ---


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"epsilon": "0"}, "epsilon='0'; permitted: a number from 0.05 to 50"),
        ({"epsilon": "nan"}, "epsilon='nan'; permitted"),
        ({"epsilon": "<b>"}, "epsilon='<b>'; permitted"),
        ({"num_parties": "2.5"}, "num_parties='2.5'; permitted: a whole number from 2 to 50"),
        ({"num_samples": "99999999999"}, "permitted: a whole number from 10 to 10,000,000"),
        ({"label_epsilon": "17"}, "permitted: a number from 0.01 to 16, or none"),
        ({"unit": "label"}, "unit='label'; permitted: cell, record, party"),
        ({"algorithm": "sgd"}, "algorithm='sgd'; permitted: staged, pbm"),
        ({"out": "/etc/passwd"}, "'out' is no setting; permitted: num_samples"),
    ],
)
def test_a_bad_value_is_named_with_what_is_permitted(served, query, words):
    for what in ("plan", "plan.json"):
        status, found = served.get(what, **query)
        assert status == 400
        assert words in found["error"]


def test_a_value_that_is_given_twice_is_refused(served):
    status, _, body = served.request(f"/{TOKEN}/plan?epsilon=1&epsilon=2")
    assert (status, json.loads(body)["error"]) == (400, "epsilon is given twice; give it once")


def test_settings_without_a_plan_say_so_in_the_planners_words(served):
    status, found = served.get("plan", unit="party", algorithm="staged")
    assert status == 422
    assert "unit=party with algorithm=staged" in found["error"]


def test_every_setting_has_a_control():
    assert [each.name for each in fields(Settings)] == [each.name for each in CONTROLS]
    assert read_settings([]) == read_settings([(each.name, each.usual) for each in CONTROLS])


# --- the same as `pbmvfl plan` ---


def random_settings(count: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    found = []
    for i in range(count):
        pbm = i % 17 == 3
        query: dict[str, Any] = {
            "num_samples": round(10 ** chance.uniform(2, 5)),
            "num_parties": chance.randint(2, 6),
            "columns": chance.randint(1, 40),
            "num_classes": chance.randint(2, 6),
            "algorithm": "pbm" if pbm else "staged",
            "unit": chance.choice(("cell", "record")),
            "epsilon": float(f"{10 ** chance.uniform(-0.3, 1.3):.3g}"),
            "label_epsilon": chance.choice(("none", 1, 4.5)),
            "prediction_epsilon": "none" if pbm else chance.choice(("none", 2, 6.5)),
        }
        found.append(query)
    return found


@pytest.mark.slow
def test_shown_epsilons_are_those_of_the_command_that_is_shown(served, run_main):
    planned = 0
    for query in random_settings(50, seed=7):
        status, found = served.get("plan", **query)
        if status == 422:  # the command says the same
            code, _, err = run_main(*shlex.split(read_settings([(n, str(v)) for n, v in query.items()]).command)[1:])
            assert (code, " ".join(err.split())) == (2, f"error: {' '.join(found['error'].split())}")
            continue
        assert status == 200, found
        words = shlex.split(found["shown"]["command"])
        assert (words[0], words[-2:]) == ("pbmvfl", ["--out", "plan.json"])
        code, out, err = run_main(*words[1:-2], "--json")
        assert (code, err) == (0, "")
        shown = found.pop("shown")
        assert found == json.loads(out)
        strict = [row for row in found["bounds"] if row["accounting"] == "strict"]
        assert {(row["unit"], row["value"]) for row in shown["bounds"]} == {
            (row["unit"], row["epsilon"]) for row in strict
        }
        planned += 1
    assert planned >= 40


@pytest.mark.slow
def test_a_plan_that_is_downloaded_trains(served, run_main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"num_samples": 1437, "num_parties": 4, "num_classes": 10, "columns": 16, "epsilon": 6}
    query = urlencode({**sizes, "prediction_epsilon": "none"})
    status, headers, text = served.request(f"/{TOKEN}/plan.json?{query}")
    assert status == 200
    assert headers["content-disposition"] == 'attachment; filename="plan.json"'
    Path("plan.json").write_text(text)
    code, _, err = run_main("train", "digits", "--plan", "plan.json", "--out", "run")
    assert code == 0, err
    epsilon = next(
        row["epsilon"]
        for row in json.loads(Path("run/result.json").read_text())["privacy"]
        if (row["unit"], row["accounting"], row["adversary"]) == ("cell", "strict", "server")
    )
    assert 5.9 < epsilon <= 6


# --- estimates, runs and ledgers ---


def test_the_records_of_the_package_are_those_of_the_planners_benchmark():
    kept = files("pbmvfl.cli.studio").joinpath("assets/benchmark.json").read_text()
    assert kept == studio_records(json.loads(RECORDS.read_text())["compared"])


def test_an_estimate_is_a_band_of_the_nearest_records_and_only_for_their_algorithm():
    def band(**query: object) -> tuple[float, float]:
        found = estimate(read_settings([(name, str(value)) for name, value in query.items()]))
        assert found is not None
        assert found["blind"] <= found["low"] <= found["high"] <= 1
        return found["low"], found["high"]

    # All records of 40,000 rows are nearer than any of 800 rows, and conversely.
    rich, poor = band(num_samples=1_000_000, epsilon=50), band(num_samples=200, epsilon=0.1, num_classes=10)
    assert rich != poor
    records = json.loads(RECORDS.read_text())["compared"]
    far = sorted(
        records, key=lambda each: -each["epsilon"] * each["rows"] / (each["classes"] * math.sqrt(each["columns"]))
    )
    shares = sorted((each["planned"]["accuracy"] - each["majority"]) / (1 - each["majority"]) for each in far[:8])
    assert rich == pytest.approx((0.5 + shares[2] / 2, 0.5 + shares[5] / 2), abs=1e-3)
    assert estimate(read_settings([("algorithm", "pbm")])) is None


def test_runs_are_points_ledgers_are_what_is_left_and_damaged_ones_are_left_out(served, run_main):
    row = {"unit": "cell", "accounting": "strict", "adversary": "server", "colluding_parties": 0, "epsilon": 3.5}
    for name, text in (
        ("good", json.dumps({"metrics": {"test_accuracy": 0.75}, "privacy": [row]})),
        ("unmeasured", json.dumps({"metrics": {}, "privacy": [row]})),
        ("damaged", "{"),
        ("strange", json.dumps({"metrics": {"test_accuracy": 0.75}, "privacy": [3]})),
        ("empty", json.dumps({"metrics": {"test_accuracy": 0.75}, "privacy": []})),
    ):
        (served.place / "runs" / name).mkdir()
        (served.place / "runs" / name / "result.json").write_text(text)
    ledgers = served.place / "ledgers"
    assert run_main("ledger", "limit", ledgers, "--parties", "bank,shop", "--dataset", "people", "--epsilon", 9)[0] == 0
    (ledgers / "broken.sqlite").write_text("no ledger")
    status, found = served.get("history")
    assert status == 200
    assert found["runs"] == [{"name": "good", "epsilon": 3.5, "accuracy": 0.75}]
    told = [(each["owner"], each["dataset"], each["unit"], each["limit"], each["spent"]) for each in found["ledgers"]]
    assert told == [(owner, "people", "cell", 9.0, 0.0) for owner in ("bank", "shop")]


# --- the command ---


def test_a_port_that_is_taken_and_a_ledger_that_is_no_folder_are_refused(run_main, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = run_main("studio", "--no-browser", "--port", taken.getsockname()[1])
        assert code == 2
        assert "give another, or 0 for any" in err
    code, _, err = run_main("studio", "--no-browser", "--ledger", tmp_path / "none")
    assert code == 2
    assert "is not a folder" in err


def test_the_address_has_a_token_of_its_own_and_only_this_machine_listens(run_main, monkeypatch):
    seen = []

    def serve(app: object, listener: socket.socket) -> None:
        del app
        seen.append(listener.getsockname())

    monkeypatch.setattr(studio_module, "serve", serve)
    tokens = set()
    for _ in range(2):
        code, out, _ = run_main("studio", "--no-browser")
        assert code == 0
        host, port = seen[-1]
        match = re.match(rf"http://127\.0\.0\.1:{port}/([\w-]{{32}})/\n", out)
        assert host == "127.0.0.1"
        assert match is not None
        tokens.add(match[1])
    assert len(tokens) == 2


# --- in a browser ---

ANSWERED = """new Promise(done => { const look = () => {
  const wanted = settings().toString();
  if (document.body.dataset.answered === wanted && !sending) done(wanted); else setTimeout(look, 20); }; look(); })"""
SHOWN = """[...document.querySelectorAll('#bounds td[data-epsilon]')].map(cell =>
  [cell.dataset.unit, cell.dataset.from, cell.dataset.epsilon])"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


def press(browser: Browser, key: str, times: int = 1) -> None:
    codes = {"Tab": 9, "ArrowRight": 39, "End": 35, "Space": 32}
    for _ in range(times):
        for kind in ("keyDown", "keyUp"):
            browser.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=" " if key == "Space" else key,
                windowsVirtualKeyCode=codes[key],
            )


@in_a_browser
def test_the_epsilons_on_the_screen_are_those_of_plan_json(served, browser, run_main):
    browser.open(served.address)
    browser.run(ANSWERED)
    for query in random_settings(4, seed=3):
        for name, value in query.items():
            if name in ("algorithm", "unit"):
                browser.run(f"form.querySelector('input[name={name}][value={value}]').click()")
                continue
            none = json.dumps(value == "none")
            browser.run(
                f"""(() => {{ const box = form.querySelector('input[data-without={name}]'), none = {none};
                if (box && box.checked !== none) box.click();
                if (!none) {{ const input = byId('{name}'); input.value = '{value}';
                  input.dispatchEvent(new Event('input', {{bubbles: true}})); }} }})()"""
            )
        browser.run(ANSWERED)
        command = browser.run("byId('command').textContent").splitlines()[0]
        code, out, _ = run_main(*shlex.split(command)[1:-2], "--json")
        assert code == 0
        expected = {(row["unit"], row["epsilon"]) for row in json.loads(out)["bounds"] if row["accounting"] == "strict"}
        assert {(unit, float(epsilon)) for unit, _, epsilon in browser.run(SHOWN)} == {
            (unit, float(epsilon)) for unit, epsilon in expected
        }
        assert float(shlex.split(command)[shlex.split(command).index("--epsilon") + 1]) == query["epsilon"]
        # The plan behind the link is the plan that is shown.
        plan = json.loads(browser.run("fetch(byId('download').href).then(reply => reply.text())"))
        assert plan == json.loads(out)["plan"]


@in_a_browser
def test_a_bad_value_is_marked_at_its_control_and_the_last_plan_stays(served, browser):
    browser.open(served.address)
    browser.run(ANSWERED)
    before = browser.run("byId('verdict').textContent")
    browser.run("byId('epsilon').value = '-1'; byId('epsilon').dispatchEvent(new Event('input', {bubbles: true}))")
    browser.run(ANSWERED)
    assert browser.run("byId('epsilon-error').textContent") == "epsilon='-1'; permitted: a number from 0.05 to 50"
    assert browser.run("byId('verdict').textContent") == before
    browser.run("byId('epsilon').value = '4'; byId('epsilon').dispatchEvent(new Event('input', {bubbles: true}))")
    browser.run(ANSWERED)
    assert browser.run("byId('epsilon-error').textContent") == ""


@in_a_browser
def test_the_keyboard_reaches_every_control_and_moves_them(served, browser):
    browser.open(served.address)
    browser.run(ANSWERED)
    reached = []
    for _ in range(30):
        press(browser, "Tab")
        reached.append(
            browser.run("document.activeElement.name || document.activeElement.id || document.activeElement.type")
        )
    assert {each.name for each in CONTROLS} <= set(reached)
    assert {"download", "copy", "range", "checkbox"} <= set(reached)
    browser.run("byId('num_parties').closest('.control').querySelector('input[type=range]').focus()")
    press(browser, "ArrowRight", 10)
    assert int(browser.run("byId('num_parties').value")) > 3
    browser.run(ANSWERED)
    assert f"--num-parties {browser.run('byId(`num_parties`).value')} " in browser.run("byId('command').textContent")


@in_a_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_asks_nobody_else(served, browser, width):
    browser.open(served.address, width=width)
    browser.run(ANSWERED)
    wide = browser.run(
        """[...document.querySelectorAll('main *')].filter(node => !node.ownerSVGElement).filter(node => {
        const box = node.getBoundingClientRect(), outer = node.parentElement.getBoundingClientRect();
        return box.width && (box.right > outer.right + 1 || box.left < outer.left - 1); }).map(node =>
        node.outerHTML.slice(0, 99))"""
    )
    assert wide == []
    assert not browser.run("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert browser.requests
    assert all(address.startswith(served.address) for address in browser.requests)
    assert browser.run("getComputedStyle(document.querySelector('table.cards td')).display") == (
        "flex" if width == 390 else "table-cell"
    )
