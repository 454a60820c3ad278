"""`pbmvfl predict` and `pbmvfl evaluate`: predict rows with a trained model, one charged release per row."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl._text import counted
from pbmvfl.cli.options import (
    TableLabelData,
    budget_option,
    check_target,
    data_option,
    option_groups,
    option_in,
    table_files,
)
from pbmvfl.errors import DataError, RunFolderError
from pbmvfl.federation.predictions import Asked
from pbmvfl.privacy.conversion import check_delta, usual_delta
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from pbmvfl.data.new_rows import NewRows
    from pbmvfl.federation.model import FederatedModel
    from pbmvfl.federation.predictions import Predictions
    from pbmvfl.federation.run_folder import RunFolder
    from pbmvfl.federation.serving import ReleaseOptions

_result_option, _federation_option = option_in("Result"), option_in("Federation")
#: Exit code where a party's ledger withheld rows, the same as that of `train`.
STOPPED_BY_LEDGER = 3

_Run = Annotated[
    Path, typer.Argument(help="A run folder of `pbmvfl train`, or a folder of `model.save`.", show_default=False)
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of a prediction: its rows, what it may cost, and where its result goes."""

    data: Annotated[
        list[str] | None,
        data_option(
            help="Rows to predict, .csv or .parquet, with the model's columns; or party=FILE for each party. Default: "
            "the run's own test rows."
        ),
    ] = None
    id_: Annotated[
        str | None,
        data_option(
            "--id", help="Column with the rows' ids, by which ledgers know them; needed where one has a limit."
        ),
    ] = None
    dataset: Annotated[
        str | None,
        data_option(help="The owners' name for these people, if not those of training; ledgers count by it."),
    ] = None
    data_version: Annotated[
        str,
        data_option(
            help="The owners' public name of the state that columns are in. Rows with ids keep their answers, whatever "
            "changed in their columns, until it is another one: then all are released and charged anew."
        ),
    ] = ""
    epsilon: Annotated[
        float | None, budget_option(help="What one row's prediction may cost. Default: as planned, or 8.")
    ] = None
    unit: Annotated[str, budget_option(help="cell | record: what it protects.")] = "cell"
    delta: Annotated[float | None, budget_option(help="Default: as for training.")] = None
    ledger: Annotated[Path | None, budget_option(help="Folder of the parties' ledgers. Default: the run's own.")] = None
    uncharged: Annotated[
        bool, budget_option("--uncharged", help="The owners permit predictions that no ledger counts; ledgers note it.")
    ] = False
    until_limit: Annotated[
        bool, budget_option("--until-limit", help="Predict as many rows as every party's limit allows.")
    ] = False
    exact: Annotated[
        bool, budget_option("--exact", help="Exact sums, as only a simulator can see them: no noise, no epsilon.")
    ] = False
    exact_metrics: Annotated[
        bool,
        budget_option(
            "--exact-metrics", help="With --exact: the owners' permission where a ledger has a limit; ledgers note it."
        ),
    ] = False
    out: Annotated[
        Path | None, _result_option(help="File for the predictions, .parquet or .csv. Default: a new one in RUN.")
    ] = None
    home: Annotated[
        Path | None, _federation_option("--home", help="With --rows: the label holder's folder. Default: this one.")
    ] = None
    rows: Annotated[
        str | None,
        _federation_option(
            "--rows", help="The aligned rows (`pbmvfl align`) to ask about; RUN is then a run of the federation."
        ),
    ] = None
    json_: Annotated[bool, _result_option("--json", help="Print JSON and nothing else.")] = False

    @property
    def budget(self) -> dict[str, Any]:
        """The arguments that say what a row may cost."""
        return {"epsilon": self.epsilon, "unit": self.unit, "delta": self.delta}


@dataclass(frozen=True, kw_only=True)
class LabelledRequest(Request):
    """Options of a prediction whose labels are known."""

    label: Annotated[str | None, data_option(help="The label column of --data. Default: as in training.")] = None
    label_data: TableLabelData = None
    out: Annotated[Path | None, _result_option(help="File for the predictions, .parquet or .csv.")] = None


@option_groups
def predict(*, run: _Run, request: Request) -> None:
    """Predict rows with a trained model. No label is needed; every row is one release, charged to the ledgers.

    [bold]Try[/]  pbmvfl predict runs/people-001 --data new.csv --out predictions.parquet

    What a row costs is printed before anything is released. A file of the same rows asked again is released, and
    charged, again, unless the parties keep their answers.
    """
    _predict(run, request)


@option_groups
def evaluate(*, run: _Run, request: LabelledRequest) -> None:
    """Measure how well a trained model predicts rows whose labels are known. Every row is one release.

    [bold]Try[/]  pbmvfl evaluate runs/people-001 --data test.csv
    """
    _predict(run, request)


def _predict(run: Path, request: Request) -> None:
    if request.home is not None or request.rows is not None:
        _ask_federation(run, request)
        return
    asked = _Asked(run, request)
    found = asked.release()
    if request.json_:
        print(json.dumps(asked.summary(found), indent=2))
    elif isinstance(request, LabelledRequest):
        asked.show_metrics(found)
    if found.stopped:
        raise SystemExit(STOPPED_BY_LEDGER)


def _ask_federation(run: Path, request: Request) -> None:
    """Predict aligned rows in a federation of several organisations."""
    from pbmvfl.cli.jobs import ask

    if request.rows is None:
        raise DataError("--home is the label holder's folder of a federation; say which aligned rows: --rows NAME")
    if request.data_version:
        raise DataError(
            f"--data-version {request.data_version!r}: in a federation each party's owner gives it, [data] version of "
            "its policy.toml; leave it out"
        )
    ask(
        str(run),
        home=request.home or Path(),
        rows=request.rows,
        budget=request.budget,
        out=request.out,
        with_labels=isinstance(request, LabelledRequest),
        json_only=request.json_,
    )


class _Asked:
    """Prediction in this process: its model, rows and output."""

    def __init__(self, path: Path, request: Request) -> None:
        """Load the model and the rows, with labels if the request has them."""
        from rich.console import Console

        if request.delta is not None:
            check_delta(request.delta)
        self._console = Console(stderr=request.json_, quiet=request.json_, highlight=False)
        self._path, self._request = path, request
        self._folder, self._model, own_ledger = _read_model(path)
        self._ledger = request.ledger if request.ledger is not None else own_ledger
        self._rows = self._read_rows()
        self._file: Path | None = None
        if isinstance(request, LabelledRequest) and self._rows.labels is None:
            raise DataError("the rows have no labels to compare with; give --label COLUMN")

    def _read_rows(self) -> NewRows:
        from pbmvfl.data.new_rows import load_rows
        from pbmvfl.federation.serving import test_rows

        model, request = self._model, self._request
        if not request.data:
            if self._folder is None:
                raise DataError("a model's folder has no rows of its own; give --data FILE")
            if request.id_ is not None:
                raise DataError("--id names a column of --data; without it the run's own test rows are meant")
            return test_rows(self._folder.read_source().rows.load())
        if model.columns is None:
            raise DataError(
                f"this model was trained on {model.dataset!r}, whose columns have no names, so no file can be read for "
                "it; leave --data out to predict its test rows"
            )
        label, label_data = None, None
        if isinstance(request, LabelledRequest):
            label, label_data = request.label or model.label, request.label_data
        return load_rows(
            table_files("--data", request.data),
            columns=model.columns,
            class_names=model.class_names,
            label=label,
            label_data=label_data,
            id=request.id_,
            name=request.dataset or model.dataset,
        )

    # --- Release ---

    def release(self) -> Predictions:
        from pbmvfl.federation.predictions import check_predictions_file
        from pbmvfl.federation.serving import ReleaseOptions

        request = self._request
        if request.out is not None:
            check_target("out", check_predictions_file(request.out))
        wants_file = not isinstance(request, LabelledRequest)
        self._file = request.out if request.out is not None or not wants_file else _free_file(self._path)
        if self._file is not None:
            _try_to_write(self._file)
        options = ReleaseOptions(
            **request.budget,
            ledger=self._ledger,
            data_version=request.data_version,
            uncharged=request.uncharged,
            until_limit=request.until_limit,
            exact=request.exact,
            exact_metrics=request.exact_metrics,
        )
        self._show_before(options)
        found = self._ask(options)
        if self._file is not None:
            self._keep(found)
        if self._folder is not None:
            self._asked(found).note(self._folder.path)
        self._show_after(found)
        return found

    def _keep(self, found: Predictions) -> None:
        """Write the charged predictions to the requested file, or to a temporary one if that fails."""
        assert self._file is not None
        if not found.is_known.any():
            self._file = None  # a limit withheld all rows
            return
        try:
            found.write(self._file)
        except DataError as error:
            self._file = Path(tempfile.mkdtemp(prefix="pbmvfl-predictions-")) / "predictions.parquet"
            found.write(self._file)
            self._say(f"{error}; they were charged, so they were kept elsewhere")

    def _ask(self, options: ReleaseOptions) -> Predictions:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            BarColumn(bar_width=18),
            TextColumn("round {task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or self._request.json_,
            transient=True,
        )
        with bar:
            task = bar.add_task("predicting", total=None)

            def on_round(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            return self._model.release(self._rows, replace(options, on_round=on_round), dataset=self._request.dataset)

    # --- Output ---

    def summary(self, found: Predictions) -> dict[str, Any]:
        """Return the JSON summary of the predictions and their cost, without any row."""
        known = int(found.is_known.sum())
        shown: dict[str, Any] = {
            "rows": len(found),
            "predicted": known,
            "classes": {name: int((found.numbers == k).sum()) for k, name in enumerate(found.class_names)},
            "exact": found.exact,
            "mechanism": "exact sums" if found.exact else (found.plan.prediction or found.plan.release).describe(),
            "bounds": [] if found.exact else found.privacy(delta=self._shown_delta).to_dicts(),
            "bytes_up": found.traffic.bytes_up,
            "bytes_down": found.traffic.bytes_down,
            "seconds": round(found.seconds, 3),
            "stopped": found.stopped,
            "out": None if self._file is None else str(self._file),
        }
        if found.true_labels is not None and known:
            counts = Counter(found.true_labels[found.is_known].tolist())
            shown["metrics"] = found.metrics()
            shown["labels"] = {name: counts.get(k, 0) for k, name in enumerate(found.class_names)}
            shown["majority_rate"] = max(counts.values()) / known
        return shown

    @property
    def _shown_delta(self) -> float:
        delta = self._request.delta
        return usual_delta(self._model.plan.num_samples) if delta is None else delta

    def _asked(self, found: Predictions) -> Asked:
        shown = self.summary(found)
        bound = None if found.exact else found.privacy(delta=self._shown_delta).bound(Unit.CELL, Accounting.STRICT)
        metrics = shown.get("metrics", {})
        return Asked(
            rows=shown["rows"],
            predicted=shown["predicted"],
            exact=found.exact,
            law=shown["mechanism"],
            epsilon=None if bound is None else bound.epsilon,
            advantage=None if bound is None else bound.advantage_upper_bound,
            delta=None if bound is None else bound.delta,
            accuracy=metrics.get("test_accuracy"),
            auprc=metrics.get("test_auprc"),
            majority_rate=shown.get("majority_rate"),
        )

    def _show_before(self, options: ReleaseOptions) -> None:
        from pbmvfl.cli.ledger_forecast import forecast_lines
        from pbmvfl.cli.tables import plain_table, print_notes, print_privacy

        model, rows, request = self._model, self._rows, self._request
        table = plain_table("", "", left=2)
        table.show_header = False
        parties = counted(len(model.party_names), "party", "parties")
        table.add_row("model", f"{model.dataset}, {parties}: {', '.join(model.party_names)}")
        version = f", version {request.data_version}" if request.data_version else ""
        table.add_row("rows", f"{counted(len(rows.ids), 'row')} of dataset {request.dataset or rows.name}{version}")
        if options.exact:
            table.add_row("release", "none: exact sums, which only a simulator sees; outside of any epsilon")
            self._console.print(table)
            print_notes(self._console, rows.notes)
            return
        table.add_row("release", model.prediction_words(**request.budget))
        charged = "nobody counts these (--uncharged)" if options.uncharged else None
        table.add_row("charged to", charged or (str(self._ledger) if self._ledger else "no ledger: nobody counts them"))
        self._console.print(table)
        print_notes(self._console, [*rows.notes, *model.prediction_notes(**request.budget)])
        privacy = model.prediction_privacy(**request.budget, num_rows=len(rows.ids))
        print_privacy(self._console, privacy, title="epsilon that a row's prediction costs", strict_only=True)
        if self._ledger is not None and not options.uncharged:
            plan = model.serving_plan_for(len(rows.ids), **request.budget)
            ahead = model.forecast(rows, options, dataset=request.dataset)
            for line in forecast_lines(ahead, dataset=request.dataset or rows.name, plan=plan):
                self._say(line)

    def _show_after(self, found: Predictions) -> None:
        known = int(found.is_known.sum())
        self._say(
            f"{known:,} of {counted(len(found), 'row')} predicted in {found.seconds:.1f} s"
            + (f"; {found.traffic.bytes_up + found.traffic.bytes_down:,} bytes" if not found.exact else "; exact sums")
        )
        for k, name in enumerate(found.class_names):
            count = int((found.numbers == k).sum())
            self._say(f"  {name}: {count:,}")
        if found.stopped:
            self._say(f"a party's ledger kept the rest back: {found.stopped}")
        if self._file is not None:
            self._say(f"predictions are in {self._file}")

    def show_metrics(self, found: Predictions) -> None:
        shown = self.summary(found)
        if "metrics" not in shown:
            return
        measured = "exact sums, outside of any epsilon" if found.exact else "released predictions"
        names = {"test_accuracy": "accuracy", "test_auprc": f"AUPRC of {found.class_names[-1]}"}
        values = ", ".join(f"{names[name]} {value:.4f}" for name, value in shown["metrics"].items())
        self._say(f"{values} ({measured}; most frequent class: {shown['majority_rate']:.4f})")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _read_model(path: Path) -> tuple[RunFolder | None, FederatedModel, Path | None]:
    """Return a run's folder, model and folder of ledgers; the first and last are None for a model alone."""
    from pbmvfl.federation.model import load
    from pbmvfl.federation.model_files import INDEX, SERVER
    from pbmvfl.federation.run_folder import RunFolder

    if (path / SERVER / INDEX).is_file():
        return None, load(path), None
    if not (path / "plan.json").is_file():
        raise RunFolderError(
            f"run={str(path)!r} is neither a run folder (no plan.json) nor a model (no {SERVER}/{INDEX})"
        )
    folder = RunFolder(path)
    if not folder.model.is_dir():
        raise RunFolderError(
            f"run={str(path)!r} has no model yet: it is written when training ends; "
            f"continue it with `pbmvfl train --resume {path}`"
        )
    ledger = folder.read_source().ledger
    return folder, load(folder.model), None if ledger is None else Path(ledger)


def _try_to_write(path: Path) -> None:
    """Refuse a file that cannot be written before rows are charged for it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(b"0")
        temporary.unlink()
    except OSError as error:
        raise DataError(
            f"out={str(path)!r} cannot be written: {error}; nothing was released. Give another file"
        ) from error


def _free_file(path: Path) -> Path:
    for number in range(1, 100_000):
        candidate = path / f"predictions-{number:03d}.parquet"
        if not candidate.exists():
            return candidate
    raise RunFolderError(f"{path}/predictions-NNN.parquet are all taken; use --out FILE")
