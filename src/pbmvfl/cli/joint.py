"""`pbmvfl joint`: strict training with interactions between columns of different parties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pbmvfl.cli.options import (
    TableColumns,
    TableFile,
    TableId,
    TableLabel,
    TableLabelData,
    TableSchema,
    TableTestData,
)
from pbmvfl.cli.train import rows_of_options
from pbmvfl.errors import DataError, RunFolderError
from pbmvfl.plan.groups import DATA
from pbmvfl.privacy.conversion import check_delta

_BUDGET, _RUN = "Budget", "Run"


def joint(
    *,
    dataset: Annotated[
        str | None, typer.Argument(help="A named dataset, as for train; or give --data.", show_default=False)
    ] = None,
    data: TableFile = None,
    label: TableLabel = None,
    columns: TableColumns = None,
    id_: TableId = None,
    label_data: TableLabelData = None,
    schema: TableSchema = None,
    test_data: TableTestData = None,
    num_parties: Annotated[int | None, typer.Option(help="Parties of a named dataset.", rich_help_panel=DATA)] = None,
    column_range: Annotated[
        str | None,
        typer.Option(
            help='Public range of all numeric columns as networks see them, "low,high". Columns with a range in the '
            "schema have -1,1.",
            rich_help_panel=DATA,
        ),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The total: screen and training.", rich_help_panel=_BUDGET)] = 8.0,
    delta: Annotated[float, typer.Option(help="Its delta; stay below 1/N.", rich_help_panel=_BUDGET)] = 1e-5,
    unit: Annotated[str, typer.Option(help="cell | record.", rich_help_panel=_BUDGET)] = "cell",
    screen: Annotated[
        str,
        typer.Option(help="auto (if it can pay) | on | off: look for columns that interact.", rich_help_panel=_BUDGET),
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of both runs; one that was interrupted goes on.", rich_help_panel=_RUN)
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Folder where every party keeps its ledger.", rich_help_panel=_RUN)
    ] = None,
    exact_metrics: Annotated[
        bool, typer.Option("--exact-metrics", help="The owners' word, as for train.", rich_help_panel=_RUN)
    ] = False,
    seed: Annotated[int, typer.Option(help="Public. Never the noise.", rich_help_panel=_RUN)] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=_RUN)] = False,
) -> None:
    """Look for columns of different parties that move the label together, and learn from them, in one strict total.

    [bold]Try[/]  pbmvfl joint phishing --epsilon 8

    A screen costs half of the total, and is run only where it can pay; the reason is said either way.
    """
    check_delta(delta)
    table = {
        "data": data,
        "label": label,
        "columns": columns,
        "id": id_,
        "label_data": label_data,
        "schema": schema,
        "test_data": test_data,
    }
    source = rows_of_options(dataset, table, num_parties, seed)
    span = None if column_range is None else _span(column_range)
    if out is not None and out.exists() and not out.is_dir():
        raise RunFolderError(f"out={str(out)!r} is a file; name a folder")
    import torch
    from rich.console import Console

    from pbmvfl.research.joint import train_jointly

    torch.set_num_threads(1)
    console = Console(stderr=json_, quiet=json_, highlight=False)
    result = train_jointly(
        source.load(),
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        joint=screen,
        column_range=span,
        folder=out,
        ledger=ledger,
        exact_metrics=exact_metrics,
        seed=seed,
        say=lambda words: console.print(words, markup=False),
    )
    if json_:
        print(json.dumps(_to_dict(result), indent=2))
        return
    for name, value in result.metrics.items():
        console.print(f"{name.replace('_', ' ')} {value:.4f}", markup=False)
    console.print(str(result.privacy), markup=False)


def _span(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise DataError(f'column_range={text!r} must be two numbers, "low,high"') from None
    if not low < high:
        raise DataError(f"column_range={text!r}: the first number must be below the second")
    return low, high


def _to_dict(result: Any) -> dict[str, Any]:
    return {
        "words": list(result.words),
        "is_joint": result.is_joint,
        "metrics": result.metrics,
        "epsilon": result.privacy.epsilon,
        "delta": result.privacy.delta,
        "screen_epsilon": result.privacy.screen_epsilon,
        "training_epsilon": result.privacy.training_epsilon,
        "composed": result.privacy.composed.to_dict(),
        "plan": result.training.plan.to_dict(),
    }
