"""`pbmvfl report`: that the page says what result.json says, says nothing else, and needs nobody."""

from __future__ import annotations

import contextlib
import html
import json
import math
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl.federation.results import Result
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.report.charts import Axis, Series, line_chart
from pbmvfl.report.facts import AUDIT_FILE, GRID
from pbmvfl.report.page import LARGEST_BYTES
from support.browser import Browser, in_a_browser
from support.command_line import run_command

#: Names that would do something if anybody took them for HTML.
CLASSES = ("<script>document.title='broken'</script>", "</script><img src=x onerror=\"document.title='broken'\">")
PARTIES = ("<b>bank</b>", "shop & 'co'")
#: What a reader of the page must not find in it: a value of a row, a row's id, and the folder of the table.
SECRET_VALUE, SECRET_ID, SECRET_FOLDER = "0.777000777", "patient-", "private-place"


def write_table(path: Path, num_rows: int = 80) -> None:
    random = np.random.default_rng(3)
    values = random.normal(size=(num_rows, 4))
    lines = ["who,income,debt,visits,basket,churn"]
    for i, row in enumerate(values):
        numbers = [SECRET_VALUE if i == 7 else f"{row[0]:.6f}", *(f"{value:.6f}" for value in row[1:])]
        quoted = CLASSES[int(row[0] + row[2] > 0)].replace('"', '""')
        lines.append(f"{SECRET_ID}{i}," + ",".join(numbers) + f',"{quoted}"')
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one table in ledgers with a limit: joint rounds as in the paper, and strict with predictions."""
    place = tmp_path_factory.mktemp("reports")
    table = place / SECRET_FOLDER / "people.csv"
    write_table(table)
    columns = f"{PARTIES[0]}=income,debt;{PARTIES[1]}=visits,basket"
    rows = ("--data", table, "--label", "churn", "--columns", columns, "--id", "who")
    rows += ("--ledger", place / SECRET_FOLDER / "books")
    numbers = ("--num-epochs", 3, "--batch-size", 20, "--num-trials", 8, "--embedding-dim", 2)
    assert run_command("train", *rows, *numbers, "--out", "joint", cwd=place) == 0
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=1e6, delta=1e-5)
    for path in sorted((place / SECRET_FOLDER / "books").glob("*.sqlite")):
        with contextlib.closing(Ledger(path)) as book:
            book.set_limit("people", limit)
    strict = ("--epsilon", 4, "--prediction-epsilon", 3)
    assert run_command("train", *rows, *strict, "--out", "strict", cwd=place) == 0
    return place


@pytest.fixture(scope="module")
def pages(place: Path) -> dict[str, str]:
    """The page of each run, and of both."""
    for name in ("joint", "strict"):
        assert run_command("report", name, cwd=place) == 0
    assert run_command("report", "joint", "strict", "--out", "both.html", cwd=place) == 0
    found = {name: (place / name / "report.html").read_text() for name in ("joint", "strict")}
    return {**found, "both": (place / "both.html").read_text()}


class Reader(HTMLParser):
    """Elements with their attributes, and all text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._inside = tag
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        del tag
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append((self.elements[-1][1], data))
        elif self._inside != "style":
            self.text.append(data)


def numbers_of(page: str) -> dict[str, Any]:
    """The JSON in the page."""
    ((attributes, text),) = Reader(page).scripts
    assert attributes == {"type": "application/json", "id": "pbmvfl-report"}
    return json.loads(text)


def result_of(place: Path, name: str) -> dict[str, Any]:
    return json.loads((place / name / "result.json").read_text())


# --- the numbers ---


@pytest.mark.parametrize("name", ["joint", "strict"])
def test_the_numbers_in_the_page_are_those_of_result_json(place, pages, name):
    (run,) = numbers_of(pages[name])["runs"]
    written = result_of(place, name)
    assert run["name"] == name
    assert run["data"] == "people"
    assert {"metrics", "history", "traffic", "privacy", "plan", "plan_hash", "row_uses"} <= set(run["result"])
    for key, value in run["result"].items():
        assert value == written[key], key


def test_a_page_of_several_runs_has_the_numbers_of_each(pages):
    runs = numbers_of(pages["both"])["runs"]
    assert [run["name"] for run in runs] == ["joint", "strict"]
    for run in runs:
        assert run == numbers_of(pages[run["name"]])["runs"][0]


@pytest.mark.parametrize("name", ["joint", "strict"])
def test_epsilon_over_rounds_never_falls_and_ends_where_the_table_does(place, pages, name):
    (run,) = numbers_of(pages[name])["runs"]
    result = Result.read(place / name / "result.json")
    assert run["epsilon_over_rounds"]
    for path in run["epsilon_over_rounds"]:
        rounds, epsilons = zip(*path["points"], strict=True)
        assert (rounds[0], rounds[-1]) == (0, len(result.plan.schedule))
        assert list(rounds) == sorted(set(rounds))
        assert list(epsilons) == sorted(epsilons)
        whole = result.training_run
        chosen = whole.of_split(path["rows"]) if path["rows"] else whole
        bound = epsilon_bound(chosen, Unit(path["unit"]), Accounting(path["accounting"]), delta=run["delta"])
        assert epsilons[-1] == bound.epsilon > 0


def test_epsilon_on_the_way_is_that_of_a_run_that_ended_there(place, pages):
    (run,) = numbers_of(pages["joint"])["runs"]
    plan = Result.read(place / "joint" / "result.json").plan
    after_one_epoch = plan.replace(num_epochs=1).training_run()
    rounds = plan.schedule.end_of_epoch(1)
    for path in run["epsilon_over_rounds"]:
        unit, accounting = Unit(path["unit"]), Accounting(path["accounting"])
        expected = epsilon_bound(after_one_epoch, unit, accounting, delta=run["delta"]).epsilon
        assert dict(map(tuple, path["points"]))[rounds] == pytest.approx(expected, rel=1e-12)


def test_the_books_are_drawn_as_they_count_and_equal_ones_are_drawn_once(place, pages):
    (joint,), (strict,) = (numbers_of(pages[name])["runs"] for name in ("joint", "strict"))
    files = sorted((place / SECRET_FOLDER / "books").glob("*~*.sqlite"))  # of the parties, whose names are no file's
    with contextlib.closing(Ledger(files[0], read_only=True)) as book:
        spent = book.export()["datasets"]["people"]["limits"][0]["spent_epsilon"]
    for run in (joint, strict):
        (path,) = run["limits"]
        assert len(path["books"]) == len(files) == 2
        assert path["limit"]["epsilon"] == 1e6
        assert path["spent_now"] == pytest.approx(spent)
    # The first run began with nothing; the second where the first one ended, and with its end the book is told whole.
    assert joint["limits"][0]["points"][0] == [0, 0.0]
    assert strict["limits"][0]["points"][0][1] == pytest.approx(joint["limits"][0]["points"][-1][1])
    assert strict["limits"][0]["points"][-1][1] == pytest.approx(strict["limits"][0]["spent_now"])
    assert joint["limits"][0]["points"][-1][1] < joint["limits"][0]["spent_now"]


def test_without_privacy_a_round_moves_four_bytes_a_value_each_way(place, pages):
    (run,) = numbers_of(pages["joint"])["runs"]
    npq, plan = run["traffic_npq"], Result.read(place / "joint" / "result.json").plan
    values = plan.num_epochs * plan.num_samples * plan.num_parties * plan.embedding_dim
    rounds = plan.num_epochs * -(-plan.num_samples // plan.batch_size)
    header = 44
    assert npq["rounds"] == rounds
    assert npq["bytes_up"] == 4 * values + rounds * plan.num_parties * header
    assert npq["bytes_down"] == 4 * values + (rounds + plan.num_epochs) * plan.num_parties * header
    assert run["traffic_predicted"] == run["result"]["traffic"]


# --- nothing else ---


@pytest.mark.parametrize("name", ["joint", "strict", "both"])
def test_a_page_is_small_fetches_nothing_and_runs_nothing(pages, name):
    page = pages[name]
    assert len(page.encode()) < LARGEST_BYTES
    assert not re.search(r"https?:|//[a-z]|@import|url\(|javascript:", page, flags=re.IGNORECASE)
    elements = Reader(page).elements
    assert {"link", "img", "iframe", "object", "embed", "form", "base"}.isdisjoint(tag for tag, _ in elements)
    for tag, attributes in elements:
        assert not {"src", "srcset", "action", "style"} & set(attributes)
        assert not any(attribute.startswith("on") for attribute in attributes)
        assert tag != "a" or attributes["href"].startswith("#")
    policy = [attributes for tag, attributes in elements if "http-equiv" in attributes]
    assert [each["content"].split(";")[0] for each in policy] == ["default-src 'none'"]


@pytest.mark.parametrize("name", ["joint", "strict", "both"])
def test_links_of_a_page_lead_somewhere_and_names_are_given_once(pages, name):
    elements = Reader(pages[name]).elements
    anchors = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(anchors) == len(set(anchors))
    assert {attributes["href"][1:] for tag, attributes in elements if tag == "a"} <= set(anchors)


def test_names_of_classes_and_parties_are_text_whatever_they_are_called(pages):
    text = "".join(Reader(pages["joint"]).text)
    for name in (*CLASSES, *PARTIES):
        assert name in text
        assert name not in pages["joint"]
        assert (
            name.replace("&", "&amp;")
            .replace("<", "&lt;")
            .replace('"', "&#34;")
            .replace("'", "&#39;")
            .replace(">", "&gt;")
            in pages["joint"]
        )


def test_a_run_s_own_name_is_text_and_its_commands_are_quoted(place, tmp_path):
    name = "a <b>'run' & $(more)"
    shutil.copytree(place / "strict", tmp_path / name)
    assert run_command("report", name, "--out", "page.html", cwd=tmp_path) == 0
    page = (tmp_path / "page.html").read_text()
    assert name not in page
    assert f"run {name}" in "".join(Reader(page).text)
    commands = [html.unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", page)]
    assert shlex.split(next(command for command in commands if "privacy" in command)) == ["pbmvfl", "privacy", name]


def test_a_page_has_no_value_no_path_no_row_and_no_session(place, pages):
    for name, page in pages.items():
        for secret in (SECRET_VALUE, SECRET_ID, SECRET_FOLDER, str(place)):
            assert secret not in page, (name, secret)
        for run in ("joint", "strict"):
            for session in result_of(place, run)["sessions"]:
                assert session["session"] not in page


def test_why_a_ledger_ended_a_run_stays_with_its_owner(place, tmp_path):
    shutil.copytree(place / "strict", tmp_path / "ended")
    path = tmp_path / "ended" / "result.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "stopped": "ledger='/home/owner/secret.sqlite' refuses row 17"}))
    assert run_command("report", "ended", cwd=tmp_path) == 0
    page = (tmp_path / "ended" / "report.html").read_text()
    assert "/home/owner" not in page
    assert "A party&#39;s ledger ended this run early" in page


# --- the command ---


@pytest.mark.usefixtures("pages")
def test_a_page_beside_the_run_is_its_owners_alone_and_one_elsewhere_is_for_others(place):
    assert stat.S_IMODE((place / "joint" / "report.html").stat().st_mode) == 0o600
    assert (place / "both.html").exists()
    assert not list(place.rglob("*.tmp"))


def test_the_same_run_makes_the_same_page(place, pages):
    assert run_command("report", "joint", "--out", "again.html", cwd=place) == 0
    assert (place / "again.html").read_text() == pages["joint"]


def commands_of(page: str) -> list[list[str]]:
    return [shlex.split(html.unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", page)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--num-epochs", 1, "--num-trials", 8, "--embedding-dim", 2, "--delta", 1e-4),
        ("--epsilon", 4, "--prediction-epsilon", 3, "--ledger", "ledgers"),
    ],
)
def test_every_command_of_a_page_works_when_it_is_pasted(place, tmp_path, capsys, options):
    """By the run's own rows and ledgers, which the page does not name."""
    columns = f"{PARTIES[0]}=income,debt;{PARTIES[1]}=visits,basket"
    rows = ("--data", place / SECRET_FOLDER / "people.csv", "--label", "churn", "--columns", columns, "--id", "who")
    name = "it's a run"
    assert run_command("train", *rows, *options, "--out", name, cwd=tmp_path) == 0
    assert run_command("report", name, cwd=tmp_path) == 0
    found = commands_of((tmp_path / name / "report.html").read_text())
    assert [words[:2] for words in found] == [["pbmvfl", each] for each in ("train", "evaluate", "privacy", "report")]
    for _, *words in found:
        assert run_command(*words, cwd=tmp_path) == 0, (words, capsys.readouterr().err)
    again = result_of(tmp_path / "runs", "people-001")
    assert again["plan_hash"] == result_of(tmp_path, name)["plan_hash"]
    assert again["privacy"] == result_of(tmp_path, name)["privacy"]  # the same delta too


def test_a_run_folder_and_a_table_are_two_sources_of_rows(place, capsys):
    assert run_command("train", "joint", "--data", "other.csv", cwd=place) == 2
    assert "--data: joint has its own rows" in capsys.readouterr().err


def test_json_prints_the_numbers_and_writes_nothing(place, pages, capsys):
    before = sorted(path.name for path in place.iterdir())
    capsys.readouterr()
    assert run_command("report", "joint", "--json", cwd=place) == 0
    assert json.loads(capsys.readouterr().out) == numbers_of(pages["joint"])["runs"]
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "run='nowhere' is not a run folder"),
        (["joint", "joint/"], "a run is named twice"),
        (["joint", "--out", "page.txt"], "must end in .html"),
        (["joint", "--out", "missing/page.html"], "'missing' is not a folder"),
        (["joint", "--delta", "2"], "delta=2.0; permitted"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_way_out(place, capsys, arguments, words):
    capsys.readouterr()
    assert run_command("report", *arguments, cwd=place) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_has_not_ended_is_refused_with_the_command_that_continues_it(place, tmp_path, capsys):
    shutil.copytree(place / "joint", tmp_path / "half")
    (tmp_path / "half" / "result.json").unlink()
    assert run_command("report", "half", cwd=tmp_path) == 2
    assert "continue it: pbmvfl train --resume half" in capsys.readouterr().err


def changed(place: Path, folder: Path, **changes: Any) -> None:
    """A copy of a run whose result says something else."""
    shutil.copytree(place / "joint", folder, ignore=shutil.ignore_patterns("report.html"))
    values = result_of(place, "joint")
    (folder / "result.json").write_text(json.dumps({**values, **changes}))


def test_a_loss_that_is_no_number_is_a_word_in_the_page_and_no_mark(place, tmp_path):
    history = result_of(place, "joint")["history"]
    history[1]["train_loss"], history[2]["train_loss"] = math.nan, math.inf
    changed(place, tmp_path / "astray", history=history)
    assert run_command("report", "astray", cwd=tmp_path) == 0
    page = (tmp_path / "astray" / "report.html").read_text()
    (run,) = numbers_of(page)["runs"]
    assert [line["train_loss"] for line in run["result"]["history"][1:]] == ["nan", "inf"]
    marks = [
        attributes for tag, attributes in Reader(page).elements if attributes.get("data-series") == "training loss"
    ]
    assert [float(mark["data-x"]) for mark in marks] == [1]


@pytest.mark.parametrize("value", ["<script>", None, True, [1]])
def test_a_result_with_something_else_where_a_number_must_be_is_refused_by_name(place, tmp_path, capsys, value):
    changed(place, tmp_path / "damaged", metrics={"test_accuracy": value})
    assert run_command("report", "damaged", cwd=tmp_path) == 2
    assert "result.json is damaged: test_accuracy=" in capsys.readouterr().err
    assert not (tmp_path / "damaged" / "report.html").exists()


# --- axes ---


@pytest.mark.parametrize("log", [False, True])
def test_an_axis_holds_its_values_between_round_ticks(log):
    random = np.random.default_rng(1)
    for _ in range(300):
        low, high = sorted(10 ** random.uniform(-4, 6, size=2))
        axis = Axis(low, high, 50, 400, log=log)
        assert axis.low <= low * (1 + 1e-9)
        assert axis.high >= high * (1 - 1e-9)
        assert 2 <= len(axis.ticks) <= 10
        assert 50 <= axis(low) <= axis(high) <= 400
        assert axis(axis.ticks[0]) == 50


@pytest.mark.parametrize("other", [1.0, math.nextafter(1.0, 0.0), 1 - 1e-12, 1 - 1e-6])
def test_scores_that_are_one_up_to_rounding_are_drawn(other):
    """A table that is learned perfectly: AUPRC differs from 1 in its last bits, or not at all."""
    line = Series(name="test AUPRC", points=[(1, other), (2, 1.0)], colour=0, last="1")
    chart = line_chart("By epoch", [line], x_title="epoch", y_title="share", at_most=1.0)
    assert chart.marks(line) == line.points
    assert "nan" not in chart.path(line)


# --- in a browser ---

#: Where everything stands on the screen, as a reader's eye has it: marks, grid lines, and the numbers beside those.
MEASURE = """(() => {
const middle = (node, way) => { const box = node.getBoundingClientRect();
  return way === 'x' ? box.left + box.width / 2 : box.top + box.height / 2; };
document.querySelectorAll('details').forEach(folded => { folded.open = true; });
const charts = [...document.querySelectorAll('figure.chart')].map(figure => ({
  title: figure.querySelector('figcaption').textContent,
  x_lines: [...figure.querySelectorAll('.grid.faint')].map(line => middle(line, 'x')),
  y_lines: [...figure.querySelectorAll('.grid:not(.faint)')].map(line => middle(line, 'y')),
  x_numbers: [...figure.querySelectorAll('.tick.x')].map(text => text.textContent),
  y_numbers: [...figure.querySelectorAll('.tick.y')].map(text => text.textContent),
  marks: [...figure.querySelectorAll('circle.mark[data-series]')].map(mark =>
    ({series: mark.dataset.series, x: middle(mark, 'x'), y: middle(mark, 'y')})),
}));
const dots = [...document.querySelectorAll('g.dot')].map(dot => ({run: dot.dataset.run,
  title: dot.closest('figure').querySelector('figcaption').textContent,
  x: middle(dot.querySelector('circle'), 'x'), y: middle(dot.querySelector('circle'), 'y')}));
const gauges = [...document.querySelectorAll('.gauge')].map(gauge => { const circle = gauge.querySelector('circle'),
  track = gauge.querySelector('.track').getBoundingClientRect();
  return {title: gauge.querySelector('.what').firstChild.textContent.trim(), text: gauge.querySelector('b').textContent,
    worst: gauge.classList.contains('worst'),
    share: circle && (middle(circle, 'x') - track.left) / track.width}; });
const clipped = [...document.querySelectorAll('figure.chart > svg text, .gauge text')].filter(text => {
  const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1; });
const wide = [...document.querySelectorAll('main *')].filter(node => !node.ownerSVGElement && (() => {
  const box = node.getBoundingClientRect(), outer = node.parentElement.getBoundingClientRect();
  return box.width && (box.right > outer.right + 1 || box.left < outer.left - 1); })());
const thin = [...document.querySelectorAll('svg rect, svg line.filled')].filter(bar =>
  bar.getBoundingClientRect().width > 0 && bar.getBoundingClientRect().width < 2);
return {charts, dots, gauges, width: innerWidth, title: document.title, thin: thin.length,
  clipped: clipped.map(text => text.textContent), wide: wide.map(node => node.outerHTML.slice(0, 200)),
  verdict: document.querySelector('.verdict').textContent,
  cards: [...document.querySelectorAll('table.cards td')].every(cell => getComputedStyle(cell).display === 'flex'),
  fetched: performance.getEntriesByType('resource').length,
  scrolls: document.documentElement.scrollWidth > document.documentElement.clientWidth};
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


def measured(browser: Browser, page: str, folder: Path, *, width: int = 1280) -> dict[str, Any]:
    """What a browser draws."""
    (folder / "page.html").write_text(page)
    browser.open(f"file://{folder / 'page.html'}", width=width)
    return browser.run(MEASURE)


@pytest.fixture(scope="module")
def seen(browser: Browser, pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(browser, pages["joint"], tmp_path_factory.mktemp("page"))


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def number(text: str) -> float:
    """A number as an axis has it: 1,000 or 20 kB."""
    value, _, unit = text.replace(",", "").partition(" ")
    return float(value) * UNITS.get(unit, 1)


def on_axis(places: list[float], lines: list[float], numbers: list[str]) -> Iterator[float]:
    """Values of places, read off an axis with a ruler."""
    assert len(lines) == len(numbers) >= 2
    slope = (number(numbers[-1]) - number(numbers[0])) / (lines[-1] - lines[0])
    for line, text in zip(lines, numbers, strict=True):
        assert number(numbers[0]) + slope * (line - lines[0]) == pytest.approx(number(text), rel=1e-3, abs=1e-9)
    return (number(numbers[0]) + slope * (place - lines[0]) for place in places)


def on_log_axis(place: float, chart: dict[str, Any]) -> float:
    decades = [math.log10(number(text)) for text in chart["x_numbers"]]
    slope = (decades[-1] - decades[0]) / (chart["x_lines"][-1] - chart["x_lines"][0])
    return 10 ** (decades[0] + slope * (place - chart["x_lines"][0]))


def drawn(chart: dict[str, Any], series: str) -> list[tuple[float, float]]:
    marks = [mark for mark in chart["marks"] if mark["series"] == series]
    across = on_axis([mark["x"] for mark in marks], chart["x_lines"], chart["x_numbers"])
    up = on_axis([mark["y"] for mark in marks], chart["y_lines"], chart["y_numbers"])
    return list(zip(across, up, strict=True))


def chart_called(seen: dict[str, Any], title: str) -> dict[str, Any]:
    return next(chart for chart in seen["charts"] if chart["title"].startswith(title))


@in_a_browser
def test_the_points_on_the_screen_read_off_the_axes_are_those_of_result_json(place, seen):
    history = result_of(place, "joint")["history"]
    names = {"test accuracy": "test_accuracy", "train accuracy": "train_accuracy", "test AUPRC": "test_auprc"}
    chart = chart_called(seen, "By epoch")
    span = number(chart["y_numbers"][-1]) - number(chart["y_numbers"][0])
    for series, name in names.items():
        points = drawn(chart, series)
        expected = [(line["epoch"], line[name]) for line in history]
        assert len(points) == len(expected) == 3
        assert np.abs(np.array(points) - np.array(expected)).max(axis=0) == pytest.approx(
            [0, 0], abs=2e-3 * max(span, 1)
        )
    losses = drawn(chart_called(seen, "Training loss"), "training loss")
    assert [loss for _, loss in losses] == pytest.approx([line["train_loss"] for line in history], rel=5e-3)


@in_a_browser
def test_the_epsilons_on_the_screen_end_at_those_of_result_json(place, seen):
    table = result_of(place, "joint")["privacy"]
    for accounting in ("strict", "paper"):
        chart = chart_called(seen, f"By the account, {accounting}")
        top = number(chart["y_numbers"][-1])
        for unit in ("cell", "record"):
            expected = next(
                row["epsilon"]
                for row in table
                if (row["unit"], row["accounting"], row["adversary"], row["colluding_parties"])
                == (unit, accounting, "server", 0)
            )
            assert drawn(chart, unit)[-1][1] == pytest.approx(expected, abs=2e-3 * top)


@in_a_browser
def test_the_marks_of_bytes_stand_at_the_bytes_of_result_json(place, seen):
    chart = chart_called(seen, "Bytes")
    traffic = result_of(place, "joint")["traffic"]
    moved = sum(traffic[name] for name in ("bytes_setup", "bytes_up", "bytes_down"))
    (mark,) = [mark for mark in chart["marks"] if mark["series"] == "measured"]
    assert on_log_axis(mark["x"], chart) == pytest.approx(moved, rel=0.02)


@in_a_browser
@pytest.mark.parametrize("name", ["joint", "strict"])
def test_gauges_stand_at_the_advantages_and_the_verdict_names_the_worst(pages, browser, tmp_path, name):
    seen = measured(browser, pages[name], tmp_path)
    (run,) = numbers_of(pages[name])["runs"]

    def advantage(rows: str, unit: str) -> float:
        table = run["privacy_by_rows"].get(rows) or run["privacy_by_rows"]["all"]
        kept = (row for row in table if (row["unit"], row["accounting"]) == (unit, "strict"))
        return next(row["advantage_upper_bound"] for row in kept if unit == "label" or row["adversary"] == "server")

    expected = {"Training rows": advantage("train", "cell"), "Labels": advantage("train", "label")}
    if name == "strict":
        expected["Predicted rows"] = advantage("test", "cell")
    gauges = {gauge["title"]: gauge for gauge in seen["gauges"]}
    assert list(gauges) == ["Training rows", "Predicted rows", "Labels"]
    for title, gauge in gauges.items():
        if title not in expected:
            assert (gauge["text"], gauge["share"]) == ("none released", None)
            continue
        assert gauge["share"] == pytest.approx(expected[title], abs=0.05)
        assert gauge["text"] == f"{math.ceil(50 + 50 * expected[title] - 1e-9)} of 100"
    (worst,) = [title for title, gauge in gauges.items() if gauge["worst"]]
    assert expected[worst] == max(expected.values())
    right = gauges[worst]["text"].split()[0]
    assert f"right in {right} of 100" in seen["verdict"] or (right == "100" and "always right" in seen["verdict"])


@in_a_browser
def test_a_browser_runs_no_name_fetches_nothing_and_cuts_nothing_off(seen):
    assert re.fullmatch(r"people, \d+ \w+ \d{4} · pbmvfl", seen["title"])
    assert seen["fetched"] == 0
    assert seen["clipped"] == seen["wide"] == []
    assert not seen["thin"]
    assert not seen["scrolls"]


@in_a_browser
def test_runs_that_are_compared_stand_at_their_epsilon_their_bytes_and_their_accuracy(place, pages, browser, tmp_path):
    seen = measured(browser, pages["both"], tmp_path)
    for dot in seen["dots"]:
        chart = chart_called(seen, dot["title"])
        result = result_of(place, dot["run"])
        (height,) = on_axis([dot["y"]], chart["y_lines"], chart["y_numbers"])
        assert height == pytest.approx(result["metrics"]["test_accuracy"], abs=2e-3)
        across = on_log_axis(dot["x"], chart)
        epsilon = max(
            row["epsilon"]
            for table in numbers_of(pages[dot["run"]])["runs"][0]["privacy_by_rows"].values()
            for row in table
            if (row["unit"], row["accounting"], row["adversary"]) == ("cell", "strict", "server")
            and not row["colluding_parties"]
        )
        moved = sum(result["traffic"][name] for name in ("bytes_setup", "bytes_up", "bytes_down"))
        assert across == pytest.approx(epsilon if "epsilon" in dot["title"] else moved, rel=0.02)
    assert sorted((dot["title"], dot["run"]) for dot in seen["dots"]) == [
        (f"Accuracy against {what}", run) for what in ("bytes", "epsilon") for run in ("joint", "strict")
    ]


@in_a_browser
def test_a_page_fits_a_phone_and_its_tables_are_cards(pages, browser, tmp_path):
    seen = measured(browser, pages["both"], tmp_path, width=390)
    assert seen["width"] == 390
    assert not seen["scrolls"]
    assert seen["clipped"] == seen["wide"] == []
    assert seen["cards"]
    assert not measured(browser, pages["both"], tmp_path)["cards"]  # and tables where there is room


# --- confusion, precision and recall, calibration; attack and audit ---


def test_the_page_has_the_confusion_matrix_of_result_json_and_its_rows_add_up(place, pages):
    result = result_of(place, "joint")
    found = result["scores"]["test"]["confusion"]
    assert [sum(line) for line in found] == [each["test"] for each in result["classes"]]
    assert [sum(line) for line in zip(*found, strict=True)] == [each["test_predicted"] for each in result["classes"]]
    matrix = re.search(r'<table class="matrix">(.*?)</table>', pages["joint"], flags=re.DOTALL)
    assert matrix is not None
    cells = re.findall(r'<td class="number h\d">(\d+)</td>', matrix[1])
    assert [int(text) for text in cells] == [rows for line in found for rows in line]


def test_a_page_shows_the_audit_s_verdict_and_rows_only_where_they_are_asked_for(place, tmp_path, capsys):
    shutil.copytree(place / "strict", tmp_path / "strict")
    verdict = {"sound": False, "tests": 68, "false_alarm_rate": 1e-6, "alarms": ["<b>masks</b>: odd"]}
    (tmp_path / "strict" / AUDIT_FILE).write_text(json.dumps(verdict))
    score = {"attack": "pair", "attacker": "server", "setting": "this", "measure": "share right", "value": 0.61}
    score |= {"baseline": 0.5, "bound": 0.7, "bound_words": "cell", "is_alarm": False}
    (tmp_path / "strict" / "attack.json").write_text(json.dumps({"scores": [score]}))
    (tmp_path / "strict" / GRID).write_bytes(b"picture")
    assert run_command("report", "strict", cwd=tmp_path) == 0
    page = (tmp_path / "strict" / "report.html").read_text()
    assert "Audit: alarm" in page
    assert "&lt;b&gt;masks&lt;/b&gt;: odd" in page
    assert "<img" not in page
    assert "img-src" not in page
    assert run_command("report", "strict", "--show-rows", "--out", "rows.html", cwd=tmp_path) == 0
    assert 'src="data:image/png;base64,cGljdHVyZQ=="' in (tmp_path / "rows.html").read_text()
    (tmp_path / "strict" / AUDIT_FILE).write_text(json.dumps({**verdict, "sound": "yes"}))
    assert run_command("report", "strict", cwd=tmp_path) == 2
    assert "audit.json is damaged: sound=" in capsys.readouterr().err


@pytest.mark.parametrize("value", [[1], {"test": {"confusion": [[1, True]]}}, {"test": {"calibration": "<b>"}}])
def test_figures_that_are_no_numbers_are_refused(place, tmp_path, capsys, value):
    changed(place, tmp_path / "damaged", scores=value)
    assert run_command("report", "damaged", cwd=tmp_path) == 2
    assert "damaged" in capsys.readouterr().err
