"""Options of the command line that are settings of a plan: made from the settings themselves, with their own words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from typing import Any

import typer

from pbmvfl._settings import Setting
from pbmvfl.cli.options import on_or_off
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan.flat_names import plan_settings

Command = Callable[..., None]


def plan_options(
    *names: str, required: Collection[str] = (), defaults: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command an option for each of these settings; it gets those that were given as one dict, `choices`.

    They stand in the place of its parameter `choices`. With `mechanism` come the numbers that any mechanism has of its
    own. A setting in `required` must be given. One in `defaults` has the plan's default, shown and handed over.
    """
    known = plan_settings()
    chosen = [known[name] for name in _with_own_numbers(names)]

    def decorated(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        options = [
            option
            for setting in chosen
            for option in _options(setting, required=setting.name in required, default=setting.name in defaults)
        ]
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += options if parameter.name == "choices" else [parameter]

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            choices = {setting.name: _taken(setting, values) for setting in chosen}
            given = {name: value for name, value in choices.items() if value is not None}
            command(**values, choices=given)

        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
        return with_options

    return decorated


def _with_own_numbers(names: Iterable[str]) -> Iterator[str]:
    """The names, and after `mechanism` the own numbers of all mechanisms."""
    for name in names:
        yield name
        if name == "mechanism":
            yield from dict.fromkeys(own for mechanism in MECHANISMS.values() for own in mechanism.own_settings())


def _options(setting: Setting, *, required: bool, default: bool) -> Iterator[inspect.Parameter]:
    if setting.kind is bool:
        # Two flags and not one with two names: typer prints both side by side, and on 80 columns cuts them.
        for prefix, words in (("", setting.help), ("no_", setting.help_off)):
            flag = "--" + (prefix + setting.name).replace("_", "-")
            option = typer.Option(False, flag, help=words, rich_help_panel=setting.panel)
            yield _parameter(prefix + setting.name, bool, option)
        return
    # Names out of a closed set stay words here: the plan refuses others, in the same terms as everywhere.
    kind = str if isinstance(setting.kind, type) and issubclass(setting.kind, StrEnum) else setting.kind
    value = setting.default if default else ... if required else None
    yield _parameter(
        setting.name,
        kind if required or default else kind | None,
        typer.Option(value, help=setting.help, rich_help_panel=setting.panel),
    )


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _taken(setting: Setting, values: dict[str, Any]) -> Any:
    """A setting's value, taken out of the command's; None if it was not given."""
    value = values.pop(setting.name)
    if setting.kind is not bool:
        return value
    return on_or_off(setting.name.replace("_", "-"), on=value, off=values.pop("no_" + setting.name))
