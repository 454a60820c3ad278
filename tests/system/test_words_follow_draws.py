"""What is said follows from what is done: no word about masks, sums, votes or a mechanism without such draws.

Each algorithm is run by the command line. Everything random that it draws is counted where it is drawn, and every text
that the run leaves (terminal, page, curves, notes of the result) is searched for words that claim a draw.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from matplotlib.text import Text

from pbmvfl.cli import app, main
from pbmvfl.crypto.secure_sum import Masks
from pbmvfl.federation.federation import Federation
from pbmvfl.mechanisms import MECHANISMS, label_response
from pbmvfl.mechanisms.votes import Vote
from pbmvfl.plan.groups import Algorithm
from pbmvfl.plan.plan import Plan
from pbmvfl.report import plots
from pbmvfl.training.fixed_point_grid import Grid
from support.cohorts import small_data

ROOT = Path(__file__).parents[2]

# --- draws: values that were drawn, counted where they are drawn ---

#: Draws of each mechanism by its name, and of everything else.
SUMS = ("pbm", "laplace")


def size_of(found: Any) -> int:
    return int(np.size(found))


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the values of every mask, mechanism, vote, noisy table, drawn label and noisy step."""
    drawn: Counter[str] = Counter()
    watched: list[tuple[Any, str, str]] = [
        (Masks, "for_round", "masks"),
        (Grid, "with_noise", "steps"),
        (Vote, "symbol", "votes"),
        (Vote, "__call__", "votes"),
        (label_response, "randomised_symbols", "labels"),
        *((mechanism, "randomize", name) for name, mechanism in zip(MECHANISMS, MECHANISMS.values(), strict=True)),
    ]
    with pytest.MonkeyPatch.context() as patched:
        for owner, name, key in watched:
            patched.setattr(owner, name, counted(getattr(owner, name), drawn, key))
        yield drawn


def counted(function: Callable[..., Any], drawn: Counter[str], key: str) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        drawn[key] += size_of(found)
        return found

    return wrapper


# --- claims: words, and the draws of which there must be some ---

CLAIMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "masks": (r"\bmask|secure (sum|aggregation)|only (the )?sums? (is|are|can be) read", ("masks",)),
    "noisy sums": (r"noisy sums?\b", SUMS),
    "Poisson binomial": (r"\bPBM\b|Poisson[ -]binomial", ("pbm",)),
    "randomised response": (r"randomised response", ("krr", "labels")),
    "symbols": (r"randomised response k=|\bsymbols?\b", ("krr",)),
    "drawn labels": (r"drawn label|labels? (is|are|was|were) drawn|labels of training rows: epsilon", ("labels",)),
    "Laplace": (r"\bLaplace\b", ("laplace",)),
    "local Gaussian": (r"local Gaussian|noisy embeddings", ("ldp",)),
    "votes": (r"\bvotes?\b|\bballots?\b", ("votes",)),
    "noisy steps": (r"noisy steps?|noise [\d.e+-]+ a step|row may add to a step", ("steps",)),
}


#: Words that deny a draw.
DENIALS = {"labels in clear": (r"labels[^.;]*: in clear|labels[^.;]* not protected", "labels")}


def untrue(text: str, drawn: Mapping[str, int]) -> list[str]:
    """Claims of a text without such a draw, and denials of one that happened, each with the words around it."""
    found = []
    for denial, (pattern, draw) in DENIALS.items():
        if drawn.get(draw) and (match := re.search(pattern, text)):
            found.append(f"{denial}: {match[0]!r}")
    for claim, (pattern, draws) in CLAIMS.items():
        flags = re.NOFLAG if "PBM" in pattern else re.IGNORECASE  # `pbm` is a name; what is drawn is called PBM
        for match in re.finditer(pattern, text, flags):
            if not any(drawn.get(each) for each in draws):
                found.append(f"{claim}: ...{text[max(0, match.start() - 40) : match.end() + 40]!r}")
    return found


# --- runs ---

TABLE = ("--data", "people.csv", "--label", "y", "--columns", "one=a,b;two=c,d", "--id", "who")
RUNS: dict[str, tuple[object, ...]] = {
    "staged": ("--num-fusion-samples", 40),
    "pbm": ("--algorithm", "pbm", "--accounting", "paper", "--label-epsilon", "none"),
    "released": ("--prediction-epsilon", 8),
    "summed": ("--prediction-epsilon", 1),
}


@dataclass
class Done:
    """A run: what it drew and said in training, and when it was asked afterwards."""

    drawn: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)
    later_drawn: Counter[str] = field(default_factory=Counter)
    #: What was said in training about later, and what `evaluate` says.
    later_texts: dict[str, str] = field(default_factory=dict)


class PageText(HTMLParser):
    """Text of a page without its styles and numbers, one cell or paragraph a line."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self._skipped = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        del attrs
        self._skipped = tag in ("style", "script")
        if tag in ("tr", "p", "li", "section", "h1", "h2", "h3"):
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        del tag
        self._skipped = False

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.lines[-1] += f" {data}"


def without_later(text: str) -> tuple[str, str]:
    """A text without its line about later rows, and that line."""
    lines = text.splitlines()
    later = [line for line in lines if line.split()[:2] == ["later", "rows"]]
    return "\n".join(line for line in lines if line not in later), "\n".join(later)


def said(*arguments: object) -> str:
    """What a command prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out):
        patched.setattr(sys, "argv", ["pbmvfl", *map(str, arguments)])
        patched.setenv("COLUMNS", "1000")  # a line of a table is a line
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, out.getvalue()
    return out.getvalue()


def write_table(path: Path) -> None:
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 400)
    columns = random.normal(size=(400, 4)) * 0.3 + (labels[:, None] - 0.5)
    rows = (
        f"{i}," + ",".join(f"{x:.4f}" for x in row) + f",{'ny'[y]}\n"
        for i, (row, y) in enumerate(zip(columns, labels, strict=True))
    )
    path.write_text("who,a,b,c,d,y\n" + "".join(rows))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    place = tmp_path_factory.mktemp("words")
    write_table(place / "people.csv")
    with contextlib.chdir(place):
        return {name: executed(name, options) for name, options in RUNS.items()}


def executed(name: str, options: tuple[object, ...]) -> Done:
    done = Done()
    with pytest.MonkeyPatch.context() as patched:
        save, curves = plots.save_figure, []

        def saved(figure: Any, path: Any) -> None:
            curves.extend(text.get_text() for text in figure.findobj(Text))
            save(figure, path)

        patched.setattr(plots, "save_figure", saved)
        with counting() as drawn:
            texts = {"train": said("train", *TABLE, *options, "--out", name, "-v"), "curves": "\n".join(curves)}
        done.drawn = drawn
        if name in tuple(Algorithm):  # the two others are planned as the first
            texts["plan"] = said("plan", *TABLE, *options, "--picture", f"{name}.svg")
            texts["picture of the plan"] = "\n".join(curves)
    texts["train, in short"] = said("train", "--resume", name)
    texts["privacy"] = said("privacy", name)
    said("report", name)
    texts["report"] = "\n".join(PageText((Path(name) / "report.html").read_text()).lines)
    written = json.loads((Path(name) / "result.json").read_text())
    texts["result.json"] = "\n".join([*written["notes"], written["measured_on"]])
    for title, text in texts.items():
        done.texts[title], done.later_texts[title] = without_later(text)
    with counting() as drawn:
        done.later_texts["evaluate"] = said("evaluate", name)
    done.later_drawn = drawn
    return done


def test_the_algorithms_draw_what_they_are_named_after(runs):
    """The counters themselves: a fault in them would let every word pass, or none."""
    staged, pbm, released, summed = (runs[name].drawn for name in RUNS)
    assert {name for name, count in staged.items() if count} == {"steps", "votes", "krr", "labels"}
    assert {name for name, count in pbm.items() if count} == {"masks", "pbm"}
    assert pbm["masks"] == pbm["pbm"]
    assert {name for name, count in released.items() if count} == {"steps", "votes", "krr", "labels"}
    assert {"masks", "laplace", "steps"} <= {name for name, count in summed.items() if count}
    assert not summed["krr"]
    assert runs["staged"].later_drawn["krr"]
    assert runs["pbm"].later_drawn["pbm"] == runs["pbm"].later_drawn["masks"] > 0


@pytest.mark.parametrize("name", RUNS)
def test_no_word_of_a_run_claims_a_draw_that_did_not_happen(name, runs):
    done = runs[name]
    for title, text in done.texts.items():
        assert text.strip(), title
        assert not untrue(text, done.drawn), (title, untrue(text, done.drawn))
    for title, text in done.later_texts.items():
        assert not untrue(text, done.later_drawn), (title, untrue(text, done.later_drawn))


@pytest.mark.parametrize("name", RUNS)
def test_what_happened_is_said(name, runs):
    """The other direction: silence would pass every test above."""
    text, later = runs[name].texts["train"], runs[name].later_texts["train"]
    algorithm = "pbm" if name == "pbm" else "staged"
    assert re.search(rf"algorithm +{algorithm}: ", text)
    assert f"{algorithm}: " in runs[name].texts["curves"]
    expected = {
        "staged": (("symbols", "noisy steps", "votes", "drawn labels"), ("symbols",)),
        "pbm": (("Poisson binomial", "noisy sums"), ()),
        "released": (("noisy steps", "randomised response"), ()),
        "summed": (("Laplace", "noisy sums", "noisy steps"), ()),
    }[name]
    for words, wanted in zip((text, later), expected, strict=True):
        nothing: dict[str, int] = {}
        assert {claim.partition(":")[0] for claim in untrue(words, nothing)} >= set(wanted)


PLANTED = {
    "masks": "Every party in its own state machine, real noise, real masks, real bytes.",
    "noisy sums": "noisy sums, as the server saw",
    "Poisson binomial": "PBM b=16, beta=0.046051",
    "randomised response": "randomised response",
    "symbols": "randomised response k=10",
    "drawn labels": "labels of training rows: epsilon 4.00 against all parties together",
    "Laplace": "Laplace noise on the secure sum",
    "local Gaussian": "local Gaussian, b=16",
    "votes": "of every party's vote (top)",
    "noisy steps": "parties alone, noise 8.542 a step",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_planted_sentence_is_caught(claim, runs):
    """The control: each sentence is true of some run, and is caught in every run that it is not true of."""
    _, draws = CLAIMS[claim]
    for name, done in runs.items():
        happened = any(done.drawn[each] for each in draws)
        for title, text in done.texts.items():
            caught = [each for each in untrue(f"{text}\n{PLANTED[claim]}", done.drawn) if each.startswith(claim)]
            assert bool(caught) is not happened, (name, title)


def test_a_planted_denial_is_caught(runs):
    said_in_clear = "labels of training rows: in clear, no epsilon"
    assert untrue(said_in_clear, runs["staged"].drawn)
    assert not untrue(said_in_clear, runs["pbm"].drawn)
    assert said_in_clear in runs["pbm"].texts["train"]


# --- help, which is about every run: a claim belongs to the choice that makes it true ---


@pytest.fixture(scope="module")
def drawn_by(runs: dict[str, Done]) -> dict[str, Counter[str]]:
    """Draws of a run with each algorithm, and with each mechanism in joint rounds."""
    data = small_data()
    found = {"staged": runs["staged"].drawn + runs["staged"].later_drawn, "pbm": runs["pbm"].drawn}
    for name in MECHANISMS:
        if name in found:
            continue
        with counting() as drawn:
            Federation(Plan.for_data(data, mechanism=name, num_epochs=1, evaluation="none")).fit(data)
        found[name] = drawn
    return found


def helped(command: str) -> tuple[str, dict[str, str]]:
    """The prose of a command's help, and the help of each of its options."""
    group: Any = typer.main.get_command(app)
    found = group.commands[command]
    options = {param.opts[0]: param.help or "" for param in found.params if hasattr(param, "help")}
    return found.help or "", options


def parts_of(text: str) -> dict[str, str]:
    """name (words) | name (words): the words by name."""
    return dict(re.findall(r"(\w+) \(((?:[^()]|\([^()]*\))*)\)", text))


@pytest.mark.parametrize("command", ["train", "plan", "privacy", "predict", "evaluate"])
def test_help_claims_nothing_that_a_choice_beside_it_does_not_do(command, drawn_by):
    prose, options = helped(command)
    nothing: dict[str, int] = {}
    assert prose
    assert not untrue(prose, nothing), untrue(prose, nothing)
    own: dict[str, tuple[str, ...]] = {
        f"--{name.replace('_', '-')}": (mechanism.name,)
        for mechanism in MECHANISMS.values()
        for name in mechanism.own_settings()
    }
    # Options that cause a draw by themselves.
    causes = {**own, "--secure-aggregation": ("pbm", "laplace"), "--label-epsilon": ("staged",)}
    for option, text in options.items():
        if option in ("--algorithm", "--mechanism"):
            parts = parts_of(text)
            assert set(parts) == set(Algorithm if option == "--algorithm" else MECHANISMS)
            for name, words in parts.items():
                assert not untrue(words, drawn_by[name]), (option, name)
        else:
            drawn = sum((drawn_by[name] for name in causes.get(option, ())), Counter())
            assert not untrue(text, drawn), option


def test_the_program_s_own_help_claims_nothing():
    group: Any = typer.main.get_command(app)
    assert group.help
    assert not untrue(group.help, {})


def test_a_planted_claim_in_help_is_caught():
    assert untrue("Train a federation: real noise, real masks, real bytes.", {})


# --- the picture of README ---


def test_the_picture_shows_each_algorithm_s_own_draws(runs):
    svg = ElementTree.parse(ROOT / "docs" / "images" / "row.svg")
    lanes = {each.get("id"): " ".join(each.itertext()) for each in svg.iter() if each.tag.endswith("}g")}
    assert set(lanes) == set(Algorithm)
    for name, text in lanes.items():
        assert text.strip().startswith(name)
        assert not untrue(text, runs[name].drawn + runs[name].later_drawn), name
    outside = " ".join(each.text or "" for each in svg.getroot() if each.tag.endswith("}text"))
    assert not untrue(outside, {})
