"""`curves.png`: what is drawn is what happened, and nothing of it is cut off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.results import Result
from pbmvfl.report import plots


@pytest.fixture(scope="module")
def result(make_data, make_plan) -> Result:
    data = make_data()
    return Federation(make_plan(data)).fit(data)


@pytest.fixture
def drawn(rendered_curves: None, monkeypatch, tmp_path):  # noqa: ARG001
    """The figure as it is saved."""
    kept: list[Any] = []
    save = plots.save_figure

    def look(figure: Any, path: Any) -> None:
        kept.append(figure)
        save(figure, path)

    monkeypatch.setattr(plots, "save_figure", look)

    def draw(result: Result, **options: Any) -> Any:
        plots.draw_curves(result, tmp_path / "curves.png", **options)
        assert (tmp_path / "curves.png").stat().st_size > 5_000
        return kept.pop()

    return draw


def lines_of(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}


def test_loss_accuracy_and_epsilon_have_a_panel_each_with_what_the_result_says(drawn, result):
    loss, scores, epsilon = drawn(result).axes
    ((epochs, losses),) = lines_of(loss).values()
    assert (epochs, losses) == ([1, 2], [line.train_loss for line in result.history])
    shown = {name.rsplit(" ", 1)[0]: values for name, (_, values) in lines_of(scores).items()}
    assert shown["test accuracy"] == [line.test_accuracy for line in result.history]
    table = result.privacy(delta=1e-5)
    last = {name.split(" ")[0]: values[-1] for name, (_, values) in lines_of(epsilon).items()}
    assert last == {kind: table.epsilon("cell", kind) for kind in ("paper", "strict")}
    assert all(rounds[-1] == len(result.plan.schedule) for rounds, _ in lines_of(epsilon).values())


def test_the_epsilon_is_that_of_the_delta_that_was_asked_for(drawn, result):
    epsilon = drawn(result, delta=1e-3).axes[-1]
    assert "0.001" in epsilon.get_ylabel()
    strict = next(values[-1] for name, (_, values) in lines_of(epsilon).items() if name.startswith("strict"))
    assert strict == result.privacy(delta=1e-3).epsilon("cell", "strict") < result.privacy().epsilon("cell", "strict")


def test_no_line_leaves_its_panel_and_no_word_the_picture(drawn, result):
    figure = drawn(result)
    box = figure.bbox
    for axis in figure.axes:
        (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
        for line in axis.lines:
            x, y = (np.asarray(values, dtype=float) for values in line.get_data())
            assert left < x.min() <= x.max() < right
            assert max(y) < high
            assert min(y) >= low or axis.get_yscale() == "log"  # where 0, the beginning, has no place
        for text in (axis.title, axis.xaxis.label, axis.yaxis.label, axis.get_legend()):
            if text is not None:
                found = text.get_window_extent()
                assert found.x0 >= box.x0 - 1
                assert found.x1 <= box.x1 + 1
                assert found.y1 <= box.y1 + 1


def test_a_run_whose_first_round_was_refused_has_a_picture_too(drawn, result):
    nothing = replace(result, history=(EpochLine(epoch=0),), sessions=(), metrics={}, stopped="a limit")
    assert len(drawn(nothing).axes) == 1


def test_noise_that_somebody_knows_has_no_epsilon_to_draw(drawn, result):
    assert len(drawn(replace(result, noise_is_seeded=True)).axes) == 2
