"""`pbmvfl predict` and `pbmvfl evaluate`: predict rows with a trained model, one charged release per row."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl._text import counted
from pbmvfl.cli.options import TableLabelData, check_target, table_files
from pbmvfl.errors import DataError, RunFolderError
from pbmvfl.federation.prediction_log import Asked
from pbmvfl.plan.groups import DATA
from pbmvfl.privacy.conversion import check_delta, usual_delta
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from pbmvfl.data.new_rows import NewRows
    from pbmvfl.federation.model import FederatedModel
    from pbmvfl.federation.predictions import Predictions
    from pbmvfl.federation.run_folder import RunFolder
    from pbmvfl.federation.serving import ReleaseOptions

_BUDGET, _OUT = "Budget", "Result"
#: Placeholder for the label column of training.
_OF_TRAINING = ""
#: Exit code where a party's ledger withheld rows, the same as that of `train`.
STOPPED_BY_LEDGER = 3

_Run = Annotated[
    Path, typer.Argument(help="A run folder of `pbmvfl train`, or a folder of `model.save`.", show_default=False)
]
_Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Rows to predict, .csv or .parquet, with the model's columns; or party=FILE for each party. Default: the "
        "run's own test rows.",
        rich_help_panel=DATA,
    ),
]
_Id = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Column with the rows' ids, by which ledgers know them; needed where one has a limit.",
        rich_help_panel=DATA,
    ),
]
_Dataset = Annotated[
    str | None,
    typer.Option(
        help="The owners' name for these people, if not those of training; ledgers count by it.", rich_help_panel=DATA
    ),
]
_DataVersion = Annotated[
    str,
    typer.Option(
        help="The owners' public name of the state that columns are in. Rows with ids keep their answers, whatever "
        "changed in their columns, until it is another one: then all are released and charged anew.",
        rich_help_panel=DATA,
    ),
]
_Epsilon = Annotated[
    float | None,
    typer.Option(help="What one row's prediction may cost. Default: as planned, or 8.", rich_help_panel=_BUDGET),
]
_Unit = Annotated[str, typer.Option(help="cell | record: what it protects.", rich_help_panel=_BUDGET)]
_Delta = Annotated[float | None, typer.Option(help="Default: as for training.", rich_help_panel=_BUDGET)]
_Ledger = Annotated[
    Path | None, typer.Option(help="Folder of the parties' ledgers. Default: the run's own.", rich_help_panel=_BUDGET)
]
_Uncharged = Annotated[
    bool,
    typer.Option(
        "--uncharged",
        help="The owners permit predictions that no ledger counts; ledgers note it.",
        rich_help_panel=_BUDGET,
    ),
]
_UntilLimit = Annotated[
    bool,
    typer.Option("--until-limit", help="Predict as many rows as every party's limit allows.", rich_help_panel=_BUDGET),
]
_Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="Exact sums, as only a simulator can see them: no noise, no epsilon.", rich_help_panel=_BUDGET
    ),
]
_ExactMetrics = Annotated[
    bool,
    typer.Option(
        "--exact-metrics",
        help="With --exact: the owners' permission where a ledger has a limit; ledgers note it.",
        rich_help_panel=_BUDGET,
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=_OUT)]


_Home = Annotated[
    Path | None,
    typer.Option(
        "--home", help="With --rows: the label holder's folder. Default: this one.", rich_help_panel="Federation"
    ),
]
_AlignedRows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        help="The aligned rows (`pbmvfl align`) to ask about; RUN is then a run of the federation.",
        rich_help_panel="Federation",
    ),
]


def predict(
    *,
    run: _Run,
    data: _Data = None,
    id_: _Id = None,
    dataset: _Dataset = None,
    data_version: _DataVersion = "",
    epsilon: _Epsilon = None,
    unit: _Unit = "cell",
    delta: _Delta = None,
    ledger: _Ledger = None,
    uncharged: _Uncharged = False,
    until_limit: _UntilLimit = False,
    exact: _Exact = False,
    exact_metrics: _ExactMetrics = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the predictions, .parquet or .csv. Default: a new one in RUN.", rich_help_panel=_OUT
        ),
    ] = None,
    home: _Home = None,
    rows: _AlignedRows = None,
    json_: _Json = False,
) -> None:
    """Predict rows with a trained model. No label is needed; every row is one release, charged to the ledgers.

    [bold]Try[/]  pbmvfl predict runs/people-001 --data new.csv --out predictions.parquet

    What a row costs is printed before anything is released. A file of the same rows asked again is released, and
    charged, again, unless the parties keep their answers.
    """
    budget = {"epsilon": epsilon, "unit": unit, "delta": delta}
    if home is not None or rows is not None:
        _ask_federation(run, home, rows, budget, data_version, out=out, with_labels=False, json_only=json_)
        return
    asked = _Asked(run, data, id_, dataset, data_version, budget=budget, ledger=ledger, json_only=json_)
    found = asked.release(
        out=out,
        wants_file=True,
        uncharged=uncharged,
        until_limit=until_limit,
        exact=exact,
        exact_metrics=exact_metrics,
    )
    if json_:
        print(json.dumps(asked.summary(found), indent=2))
    if found.stopped:
        raise SystemExit(STOPPED_BY_LEDGER)


def evaluate(
    *,
    run: _Run,
    data: _Data = None,
    label: Annotated[
        str | None, typer.Option(help="The label column of --data. Default: as in training.", rich_help_panel=DATA)
    ] = None,
    label_data: TableLabelData = None,
    id_: _Id = None,
    dataset: _Dataset = None,
    data_version: _DataVersion = "",
    epsilon: _Epsilon = None,
    unit: _Unit = "cell",
    delta: _Delta = None,
    ledger: _Ledger = None,
    uncharged: _Uncharged = False,
    until_limit: _UntilLimit = False,
    exact: _Exact = False,
    exact_metrics: _ExactMetrics = False,
    out: Annotated[
        Path | None, typer.Option(help="File for the predictions, .parquet or .csv.", rich_help_panel=_OUT)
    ] = None,
    home: _Home = None,
    rows: _AlignedRows = None,
    json_: _Json = False,
) -> None:
    """Measure how well a trained model predicts rows whose labels are known. Every row is one release.

    [bold]Try[/]  pbmvfl evaluate runs/people-001 --data test.csv
    """
    budget = {"epsilon": epsilon, "unit": unit, "delta": delta}
    if home is not None or rows is not None:
        _ask_federation(run, home, rows, budget, data_version, out=out, with_labels=True, json_only=json_)
        return
    labels = (label or _OF_TRAINING, label_data)
    asked = _Asked(run, data, id_, dataset, data_version, labels=labels, budget=budget, ledger=ledger, json_only=json_)
    asked.require_labels()
    found = asked.release(
        out=out,
        wants_file=False,
        uncharged=uncharged,
        until_limit=until_limit,
        exact=exact,
        exact_metrics=exact_metrics,
    )
    if json_:
        print(json.dumps(asked.summary(found), indent=2))
    else:
        asked.show_metrics(found)
    if found.stopped:
        raise SystemExit(STOPPED_BY_LEDGER)


def _ask_federation(
    run: Path,
    home: Path | None,
    rows: str | None,
    budget: dict[str, Any],
    data_version: str,
    *,
    out: Path | None,
    **how: bool,
) -> None:
    """Predict aligned rows in a federation of several organisations."""
    from pbmvfl.cli.jobs import ask

    if rows is None:
        raise DataError("--home is the label holder's folder of a federation; say which aligned rows: --rows NAME")
    if data_version:
        raise DataError(
            f"--data-version {data_version!r}: in a federation each party's owner gives it, [data] version of its "
            "policy.toml; leave it out"
        )
    ask(str(run), home=home or Path(), rows=rows, budget=budget, out=out, **how)


class _Asked:
    """Prediction request: its model, rows, budget and output."""

    def __init__(
        self,
        path: Path,
        data: list[str] | None,
        id_: str | None,
        dataset: str | None,
        data_version: str,
        *,
        budget: dict[str, Any],
        ledger: Path | None,
        json_only: bool,
        labels: tuple[str, Path | None] | None = None,
    ) -> None:
        """Load the model and the rows; `labels` is the label column and its separate file, or None if not needed."""
        from rich.console import Console

        if budget["delta"] is not None:
            check_delta(budget["delta"])
        self._console = Console(stderr=json_only, quiet=json_only, highlight=False)
        self._path, self._json_only = path, json_only
        self._folder, self._model, own_ledger = _read_model(path)
        self._ledger = ledger if ledger is not None else own_ledger
        self._budget, self._dataset, self._data_version = budget, dataset, data_version
        self._rows = self._read_rows(data, id_, labels)
        self._file: Path | None = None

    def _read_rows(self, data: list[str] | None, id_: str | None, labels: tuple[str, Path | None] | None) -> NewRows:
        from pbmvfl.data.new_rows import load_rows
        from pbmvfl.federation.serving import test_rows

        model = self._model
        if not data:
            if self._folder is None:
                raise DataError("a model's folder has no rows of its own; give --data FILE")
            if id_ is not None:
                raise DataError("--id names a column of --data; without it the run's own test rows are meant")
            return test_rows(self._folder.read_source().rows.load())
        if model.columns is None:
            raise DataError(
                f"this model was trained on {model.dataset!r}, whose columns have no names, so no file can be read for "
                "it; leave --data out to predict its test rows"
            )
        label, label_data = labels or (None, None)
        return load_rows(
            table_files("--data", data),
            columns=model.columns,
            class_names=model.class_names,
            label=model.label if label == _OF_TRAINING else label,
            label_data=label_data,
            id=id_,
            name=self._dataset or model.dataset,
        )

    def require_labels(self) -> None:
        if self._rows.labels is None:
            raise DataError("the rows have no labels to compare with; give --label COLUMN")

    # --- Release ---

    def release(
        self,
        *,
        out: Path | None,
        wants_file: bool,
        uncharged: bool,
        until_limit: bool,
        exact: bool,
        exact_metrics: bool,
    ) -> Predictions:
        from pbmvfl.federation.predictions import check_predictions_file
        from pbmvfl.federation.serving import ReleaseOptions

        if out is not None:
            check_target("out", check_predictions_file(out))
        self._file = out if out is not None or not wants_file else _free_file(self._path)
        if self._file is not None:
            _try_to_write(self._file)
        options = ReleaseOptions(
            **self._budget,
            ledger=self._ledger,
            data_version=self._data_version,
            uncharged=uncharged,
            until_limit=until_limit,
            exact=exact,
            exact_metrics=exact_metrics,
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
            disable=not self._console.is_terminal or self._json_only,
            transient=True,
        )
        with bar:
            task = bar.add_task("predicting", total=None)

            def on_round(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            return self._model.release(self._rows, replace(options, on_round=on_round), dataset=self._dataset)

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
        delta: float | None = self._budget["delta"]
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

        model, rows = self._model, self._rows
        table = plain_table("", "", left=2)
        table.show_header = False
        parties = counted(len(model.party_names), "party", "parties")
        table.add_row("model", f"{model.dataset}, {parties}: {', '.join(model.party_names)}")
        version = f", version {self._data_version}" if self._data_version else ""
        table.add_row("rows", f"{counted(len(rows.ids), 'row')} of dataset {self._dataset or rows.name}{version}")
        if options.exact:
            table.add_row("release", "none: exact sums, which only a simulator sees; outside of any epsilon")
            self._console.print(table)
            print_notes(self._console, rows.notes)
            return
        table.add_row("release", model.prediction_words(**self._budget))
        charged = "nobody counts these (--uncharged)" if options.uncharged else None
        table.add_row("charged to", charged or (str(self._ledger) if self._ledger else "no ledger: nobody counts them"))
        self._console.print(table)
        print_notes(self._console, [*rows.notes, *model.prediction_notes(**self._budget)])
        privacy = model.prediction_privacy(**self._budget, num_rows=len(rows.ids))
        print_privacy(self._console, privacy, title="epsilon that a row's prediction costs", strict_only=True)
        if self._ledger is not None and not options.uncharged:
            plan = model.serving_plan_for(len(rows.ids), **self._budget)
            ahead = model.forecast(rows, options, dataset=self._dataset)
            for line in forecast_lines(ahead, dataset=self._dataset or rows.name, plan=plan):
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
