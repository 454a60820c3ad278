"""Options and output shared by several commands, and checks of options, which run before any long work."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pbmvfl._files import write_atomically
from pbmvfl._settings import Setting
from pbmvfl.errors import DataError, PlanError, RunFolderError
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan.flat_names import plan_settings
from pbmvfl.plan.groups import DATA
from pbmvfl.plan.search import USUAL_EPSILON


def on_or_off(name: str, *, on: bool, off: bool) -> bool | None:
    """Return the value of a pair of on and off flags, or None if neither was given."""
    if on and off:
        raise PlanError(f"--{name} and --no-{name} contradict each other; give one of them, or neither for the default")
    return on if on or off else None


def check_target(option: str, path: Path | None, *, may_exist: bool = False) -> None:
    """Refuse a file that could not be written or would replace another, before its content is computed."""
    if path is None:
        return
    if path.is_dir() or (path.exists() and not may_exist):
        raise RunFolderError(f"{option}={str(path)!r} exists already and was not touched; choose another name")
    if not path.parent.is_dir():
        raise RunFolderError(
            f"{option}={str(path)!r} cannot be written: {str(path.parent)!r} is not a folder; make it, or name another"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise RunFolderError(
            f"{option}={str(path)!r} cannot be written: you have no right to write there; name another place"
        )


#: Formats that matplotlib writes without further packages and common viewers open.
_PICTURES = (".png", ".pdf", ".svg")


def check_picture(option: str, path: Path | None) -> None:
    """Refuse a picture that could not be written; an existing one may be replaced."""
    check_target(option, path, may_exist=True)
    if path is not None and path.suffix.lower() not in _PICTURES:
        raise RunFolderError(f"{option}={str(path)!r} must end in one of {', '.join(_PICTURES)}; choose another name")


def option_in(panel: str) -> Callable[..., Any]:
    """Return `typer.Option` for options that `--help-all` shows in a panel."""
    return functools.partial(typer.Option, rich_help_panel=panel)


data_option, budget_option = option_in(DATA), option_in("Budget")
TableLabelData = Annotated[
    Path | None,
    data_option(help="A file with id and label, if no party's file has the label."),
]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
OutFile = Annotated[Path | None, typer.Option("--out", help="File to write; default stdout.")]


def print_or_write(text: str, out: Path | None) -> None:
    """Write a text to a file, or to standard output."""
    check_target("out", out)
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, text)


def say(*lines: str, style: str | None = None) -> None:
    """Print lines without markup or breaks in them, because they may name files."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


# --- Groups of options: a frozen dataclass with a field for each, the same in every command that takes the group ---


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of a user's table."""

    data: Annotated[
        list[str] | None,
        data_option(
            help="Your own table, .parquet or .csv, instead of DATASET. A file for each party: --data bank=BANK.csv "
            "--data shop=SHOP.csv, and --id.",
            metavar="<file>",
        ),
    ] = None
    label: Annotated[
        str | None, data_option(help="The label column of --data, or of a file of ids and labels, --label-data.")
    ] = None
    columns: Annotated[
        str | None,
        data_option(
            help='Who holds what in --data: "bank=a,b,c;hospital=d,e". With a file for each party: all but id and '
            "label."
        ),
    ] = None
    id_: Annotated[
        str | None,
        data_option(
            "--id",
            help="The column of row ids: files are joined by it, ledgers know rows by it. Default: a row's number.",
        ),
    ] = None
    label_data: TableLabelData = None
    schema: Annotated[
        Path | None,
        data_option(
            help="Public vocabularies and ranges of the columns of --data, JSON; `pbmvfl schema` writes a template."
        ),
    ] = None
    test_data: Annotated[
        list[str] | None,
        data_option("--test-data", help="Test rows, given as --data is; else a part of it.", metavar="<file>"),
    ] = None
    test_fraction: Annotated[
        float | None, data_option(help="That part, chosen by the public seed; 0 for none. Default: 0.2.")
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The values by name, as they were given."""
        return {each.name.rstrip("_"): getattr(self, each.name) for each in fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, with absolute paths."""
        files = {name: table_files(f"--{name.replace('_', '-')}", self.given[name]) for name in ("data", "test_data")}
        return {**self.given, **files, "label_data": absolute(self.label_data), "schema": absolute(self.schema)}


def absolute(path: Path | None) -> str | None:
    """Return an absolute path: a run may be resumed from another working folder."""
    return None if path is None else str(path.resolve())


def table_files(option: str, given: Sequence[str | Path] | None) -> str | dict[str, str] | None:
    """Return one file for all parties or one for each, as absolute paths.

    A run may be resumed from another working folder.
    """
    if not given:
        return None
    texts, repeated = [str(each) for each in given], f"{option} " if option.startswith("-") else ""
    example = f"{repeated}bank=bank.csv {repeated}shop=shop.csv"
    if len(texts) == 1 and ("=" not in texts[0] or Path(texts[0]).is_file()):
        return str(Path(texts[0]).resolve())
    files: dict[str, str] = {}
    for text in texts:
        party, equals, file = text.partition("=")
        if not equals or not party.strip() or not file:
            raise DataError(
                f"{option}={text!r} is not of the form PARTY=FILE; give one file for all parties, or name the party of "
                f"each: {example}"
            )
        if party.strip() in files:
            raise DataError(f"{option} names party={party.strip()!r} twice; a party has one file")
        files[party.strip()] = str(Path(file).resolve())
    return files


@dataclass(frozen=True, kw_only=True)
class AskedBudget:
    """Privacy budget that the user requested."""

    epsilon: float
    unit: str
    accounting: str
    prediction_epsilon: float | None = None
    same_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """Options of a privacy budget, and their combined meaning."""

    epsilon: Annotated[float | None, budget_option(help="What training may cost. Default: 8.")] = None
    unit: Annotated[
        str | None, budget_option(help="cell | record | party: what the epsilon protects. Default: cell.")
    ] = None
    record: Annotated[bool, budget_option("--record", help="Short for --unit record.")] = False
    accounting: Annotated[
        str | None,
        budget_option(help="strict (a theorem) | paper (as the paper counts, not a proof). Default: strict."),
    ] = None
    prediction_epsilon: Annotated[
        float | None,
        budget_option(
            help="What a prediction may cost, with --algorithm staged; test rows are then released. Without it later "
            "rows cost 8, and test rows are simulated, outside the epsilon."
        ),
    ] = None
    delta: Annotated[float | None, budget_option(help="Of every epsilon. Default: a tenth of 1/N, at most 1e-5.")] = (
        None
    )

    @property
    def given(self) -> dict[str, Any]:
        """The budget's values by name, None where not given; --unit and --record name one unit together."""
        if self.record and self.unit not in (None, "record"):
            raise PlanError(f"--unit {self.unit} and --record contradict each other; give one of them")
        unit = "record" if self.record else self.unit
        return {
            "epsilon": self.epsilon,
            "unit": unit,
            "accounting": self.accounting,
            "prediction_epsilon": self.prediction_epsilon,
        }

    def asked(
        self, *, same_rows: bool = False, instead: str | None = None, by_hand: bool = False
    ) -> AskedBudget | None:
        """Return the requested budget or the default one; None where a plan or its numbers were given.

        `instead` names an option that fixes the spending by itself; it excludes all of the others.
        """
        given = {name: value for name, value in self.given.items() if value is not None}
        if instead is not None and given:
            way_out = "; a budget as the paper counts is --epsilon 8 --accounting paper" if instead == "--paper" else ""
            first = f"--{next(iter(given)).replace('_', '-')}"
            raise PlanError(f"{first} and {instead} both say what is spent; give one of them{way_out}")
        if instead is not None or (not given and by_hand):
            return None
        predicted = self.prediction_epsilon
        if predicted is not None and not predicted > 0:
            raise PlanError(f"prediction_epsilon={predicted:g} must be above 0; leave it out for exact sums")
        if same_rows and predicted is None:
            raise PlanError("--same-rows goes with --prediction-epsilon: without it nothing is predicted at a cost")
        usual: dict[str, Any] = {"epsilon": USUAL_EPSILON, "unit": "cell", "accounting": "strict"}
        return AskedBudget(**{**usual, **given}, same_rows=same_rows)


def refuse_on_resume(asked: dict[str, object]) -> None:
    """Refuse a budget with --resume: a resumed run keeps its own plan."""
    for name, value in asked.items():
        if value is not None:
            raise PlanError(
                f"--{name.replace('_', '-')} with --resume: a run goes on with its own plan; leave it out, or start a "
                "new run"
            )


# ---
# Command-line options for the settings of a plan, generated from the settings and their help texts.


Command = Callable[..., None]

#: Settings of training, the same in every command that makes a plan to train by.
TRAINING_SETTINGS = (
    *("algorithm", "label_epsilon"),
    *("mechanism", "embedding_dim", "bound", "secure_aggregation", "num_fusion_samples", "fusion", "evaluation"),
    *("labels", "num_epochs", "batch_size", "learning_rate", "optimizer", "momentum"),
    *("encoder", "activation", "features", "gradient_codec", "noise_multiplier", "clip_norm", "seed"),
)


def plan_options(*names: str, defaults: Collection[str] = ()) -> Callable[[Command], Command]:
    """Add an option to a command for each of these settings, and pass those given as one dict, `choices`.

    The options replace its parameter `choices`. `mechanism` also adds the own settings of every mechanism. A setting in
    `defaults` has the plan's default, which is shown and passed on.
    """
    known = plan_settings()
    chosen = [known[name] for name in _with_own_numbers(names)]
    options = [option for setting in chosen for option in _options(setting, default=setting.name in defaults)]

    def made(values: dict[str, Any]) -> dict[str, Any]:
        given = {setting.name: value for setting in chosen if (value := _taken(setting, values)) is not None}
        return {name: _number_or_none(name, value) for name, value in given.items()}

    return lambda command: _with_options(option_groups(command), {"choices": options}, {"choices": made})


def option_groups(command: Command) -> Command:
    """Replace every parameter of a command whose type is a group of options by these."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in own if is_dataclass(each.annotation)}
    options = {
        name: [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=kind)
            for each, kind in zip(fields(group), get_type_hints(group, include_extras=True).values(), strict=True)
        ]
        for name, group in groups.items()
    }

    def maker(group: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda values: group(**{each.name: values.pop(each.name) for each in fields(group)})

    return _with_options(command, options, {name: maker(group) for name, group in groups.items()})


def _with_options(
    command: Command,
    options: Mapping[str, list[inspect.Parameter]],
    made: Mapping[str, Callable[[dict[str, Any]], Any]],
) -> Command:
    """Return a command with options in the place of some parameters; `made` takes their values and makes one."""
    own = inspect.signature(command, eval_str=True)
    parameters = [each for name, value in own.parameters.items() for each in options.get(name, [value])]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        command(**{name: make(values) for name, make in made.items()}, **values)

    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    return with_options


def _with_own_numbers(names: Iterable[str]) -> Iterator[str]:
    """Yield the names, and after `mechanism` the own settings of all mechanisms."""
    for name in names:
        yield name
        if name == "mechanism":
            yield from dict.fromkeys(own for mechanism in MECHANISMS.values() for own in mechanism.own_settings())


def _options(setting: Setting, *, default: bool) -> Iterator[inspect.Parameter]:
    if setting.kind is bool:
        # Two flags instead of one with two names: typer prints both names side by side and truncates at 80 columns.
        for prefix, words in (("", setting.help), ("no_", setting.help_off)):
            flag = "--" + (prefix + setting.name).replace("_", "-")
            option = typer.Option(False, flag, help=words, rich_help_panel=setting.panel)
            yield _parameter(prefix + setting.name, bool, option)
        return
    # Enum values stay strings here, so that the plan refuses unknown names with the same message everywhere.
    kind = str if isinstance(setting.kind, type) and issubclass(setting.kind, StrEnum) else setting.kind
    value = setting.default if default else None
    metavar = None
    if setting.name in _OR_NONE:
        kind, metavar = str, "<float>"
    yield _parameter(
        setting.name,
        kind if default else kind | None,
        typer.Option(value, help=setting.help, rich_help_panel=setting.panel, metavar=metavar),
    )


#: Settings that are a number or none.
_OR_NONE = frozenset({"label_epsilon"})


def _number_or_none(name: str, value: Any) -> Any:
    """Return the number that an option's text names, or None for the text none; other options as they are."""
    if name not in _OR_NONE:
        return value
    if value == "none":
        return None
    try:
        return float(value)
    except ValueError:
        raise PlanError(f"--{name.replace('_', '-')}={value!r} must be a number or none") from None


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _taken(setting: Setting, values: dict[str, Any]) -> Any:
    """Remove a setting's value from the command's values and return it, or None if it was not given."""
    value = values.pop(setting.name)
    if setting.kind is not bool:
        return value
    return on_or_off(setting.name.replace("_", "-"), on=value, off=values.pop("no_" + setting.name))
