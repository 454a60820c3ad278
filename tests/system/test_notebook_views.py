"""Objects in a notebook: a line of at most 300 characters in a console, an escaped table in a cell."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

import pbmvfl
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError
from pbmvfl.federation import predictions as predictions_module
from pbmvfl.privacy.table import format_epsilon
from support.cohorts import small_data
from support.ledger_books import paper_limit

HOSTILE = "<script>alert('x')</script>&"


def html(value: object) -> str:
    """What a notebook asks for."""
    return getattr(value, "_repr_html_")()  # noqa: B009


class Cells(HTMLParser):
    """Texts of the cells, and every tag that opens and closes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        assert not attrs
        self.open.append(tag)
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """One of each, of data whose names are as bad as they can be."""
    known = small_data()
    data = VerticalDataset(
        **{
            **{name: getattr(known, name) for name in known.__dataclass_fields__},
            "name": HOSTILE,
            "party_names": tuple(f"party {i} {HOSTILE * 20}" for i in range(3)),
            "class_names": tuple(f"class {i} {HOSTILE * 10}" for i in range(3)),
        }
    )
    plan = pbmvfl.Plan.for_budget(epsilon=8, data=data)
    result = pbmvfl.Federation(plan).fit(data)
    book = pbmvfl.Ledger(tmp_path_factory.mktemp("ledger") / "<b>.sqlite")
    book.set_limit(HOSTILE, paper_limit())
    return {
        "Plan": plan,
        "PrivacyTable": plan.privacy(),
        "Result": result,
        "Predictions": result.model.release(data),
        "FederatedModel": result.model,
        "Ledger": book,
    }


NAMES = ["Plan", "PrivacyTable", "Result", "Predictions", "FederatedModel", "Ledger"]


@pytest.mark.parametrize("name", NAMES)
def test_a_console_shows_one_short_line(name, shown):
    text = repr(shown[name])
    assert text.startswith(f"{name}(")
    assert text.endswith(")")
    assert "\n" not in text
    assert len(text) <= 300


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_a_table_without_markup_of_the_data(name, shown):
    page = html(shown[name])
    read = Cells(page)
    assert read.open == []
    assert read.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert "<script" not in page
    if name in ("Predictions", "FederatedModel", "Ledger"):
        assert any(HOSTILE in cell for cell in read.cells)


def test_the_tables_have_the_objects_numbers(shown):
    plan, table, result = shown["Plan"], shown["PrivacyTable"], shown["Result"]
    cells = Cells(html(table)).cells
    for bound in table.bounds:
        if bound.accounting == "strict":
            assert format_epsilon(bound.epsilon) in cells
    assert f"cell {format_epsilon(table.epsilon('cell', 'strict'))} (strict)" in repr(table)
    assert {str(plan.num_samples), str(plan.algorithm), plan.hash.hex()[:8]} <= set(Cells(html(plan)).cells)
    assert f"{result.metrics['test_accuracy']:.4f}" in Cells(html(result)).cells
    assert f"test_accuracy={result.metrics['test_accuracy']:.4f}" in repr(result)


def test_a_closed_ledger_still_has_a_name(tmp_path):
    book = pbmvfl.Ledger(tmp_path / "own.sqlite")
    assert re.fullmatch(r"Ledger\('.*own\.sqlite', datasets=\)", repr(book))
    book.close()
    assert repr(book).endswith("own.sqlite', closed)")


def test_predictions_become_a_data_frame(shown, monkeypatch):
    found = shown["Predictions"]
    frame = found.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["id"]) == list(found.ids)
    assert list(frame["prediction"]) == list(found.labels)
    shares = frame[[f"p({name})" for name in found.class_names]].to_numpy()
    assert np.allclose(shares, found.probabilities)
    monkeypatch.setattr(predictions_module, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="pandas is not installed; pip install pandas"):
        found.to_pandas()
