"""`pbmvfl schema`: write a schema template, or check a schema against a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pbmvfl._files import write_atomically
from pbmvfl.cli.options import AsJson, check_target, option_in, table_files
from pbmvfl.errors import DataError

_template_option, _check_option = option_in("Template"), option_in("Check")


def schema(
    *,
    tables: Annotated[
        list[str],
        typer.Argument(
            help="A .parquet or .csv file, or one for each party: bank=BANK.csv shop=SHOP.csv.",
            metavar="FILE | PARTY=FILE ...",
            show_default=False,
        ),
    ],
    columns: Annotated[
        str | None,
        typer.Option(help='Who holds what: "bank=a,b,c;hospital=d,e". Default: all columns but label and id.'),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The label column; it is in no schema.")] = None,
    id_: Annotated[str | None, typer.Option("--id", help="The column of row ids; it is in no schema.")] = None,
    public_values: Annotated[
        str | None,
        _template_option(
            help="Columns whose values may be known to everybody, as in age,job: ranges and words are taken from FILE."
        ),
    ] = None,
    out: Annotated[
        Path | None, _template_option(help="Write the template there; must not exist. Default: stdout.")
    ] = None,
    check: Annotated[
        Path | None, _check_option(help="A schema that is filled in: name all its faults and FILE's.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """A schema to fill in, from the names and types of your columns; or --check one: all faults at once, or "fine".

    [bold]Try[/]  pbmvfl schema people.csv --label sick --out schema.json

    Fill in what everybody may know (people are 0 to 120 years old); never look it up in the table.
    Where values may be missing, add "missing": true.

    [bold]Then[/]  pbmvfl schema people.csv --label sick --check schema.json
    """
    source = table_files("FILE", tables)
    if check is not None:
        if out is not None or public_values is not None:
            raise DataError("--check looks at a schema that is there; --out and --public-values make a new one")
        _check(source, check, columns=columns, label=label, id=id_, as_json=json_)
        return
    from rich.console import Console

    from pbmvfl.data.column_rules import split_names
    from pbmvfl.data.schema_template import schema_template

    check_target("--out", out)
    chosen = split_names(public_values or "")
    made = schema_template(source, columns=columns, label=label, id=id_, public_values=chosen)
    if out is not None:
        write_atomically(out, made.to_json())
    if json_:
        shown = {"schema": made.schema, "fill_in": list(made.holes), "published": list(made.published)}
        print(json.dumps({**shown, "notes": list(made.notes)}, indent=2, ensure_ascii=False))
        return
    # Notes go to stderr: the template on stdout may be redirected to a file.
    console = Console(stderr=out is None, highlight=False)
    if out is None:
        print(made.to_json(), end="")
    else:
        console.print(
            f"{out} has a line for each of {len(made.entries)} column{'s' * (len(made.entries) != 1)}.",
            markup=False,
            soft_wrap=True,
        )
    for line in _advice(made):
        console.print(line, markup=False, soft_wrap=not console.is_terminal)


def _advice(made: Any) -> list[str]:
    words = [*made.notes]
    if made.published:
        has = "its values are" if len(made.published) == 1 else "their values are"
        words.append(f"Public from now on, because you said so: {', '.join(made.published)} ({has} in the schema).")
    if made.holes:
        words.append(
            f"To fill in: {', '.join(made.holes)}. Write what everybody may know and do not look it up in the rows."
        )
    words.append('Where values may be missing, add "missing": true; words outside a vocabulary need "other": true.')
    return words


def _check(source: Any, check: Path, *, columns: str | None, label: str | None, id: str | None, as_json: bool) -> None:
    from pbmvfl.data.tables import check_table

    try:
        found = check_table(source, schema=check, columns=columns, label=label, id=id)
    except DataError as error:
        if not as_json:
            raise
        print(json.dumps({"fine": False, "faults": list(error.faults) or [str(error)]}, indent=2))
        raise typer.Exit(2) from None
    if as_json:
        parties = {part.party: {"columns": len(part.rules), "numbers": part.width} for part in found.columns}
        shown = {"fine": True, "faults": [], "rows": found.num_rows, "parties": parties, "notes": list(found.notes)}
        print(json.dumps(shown, indent=2))
    else:
        print(found)
