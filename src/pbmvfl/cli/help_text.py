"""Help of the commands: `--help` shows the options that most people use, `--help-all` shows every one."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

ALL = "--help-all"
#: A command with more options than this shows only the usual ones.
_MOST = 14
#: Names of the parameters that `--help` shows of such a command.
_USUAL = frozenset(
    {
        *("help", "data", "label", "columns", "id_"),
        *("epsilon", "prediction_epsilon", "unit", "delta", "algorithm"),
        *("out", "ledger", "resume", "verbose", "json_"),
    }
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Command(TyperCommand):
    """Command whose help hides less-used options, and whose paragraphs wrap at the terminal's width."""

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        if self.help:
            # A line that begins in bold is one of a list.
            paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(self.help))
            self.help = "\n\n".join(re.sub(r"\n(?!\[bold\])", " ", paragraph) for paragraph in paragraphs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ALL] = ALL in args
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options = _options(self)
        is_long = len(options) > _MOST
        words = "Show the usual options; --help-all shows every one." if is_long else "Show this and leave."
        hidden = [param for param in options if is_long and not ctx.meta.get(ALL) and param.name not in _USUAL]
        with _help_option(self, ctx, words), _hidden(hidden):
            super().format_help(ctx, formatter)


class Group(TyperGroup):
    """Group of such commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _help_option(self, ctx, "Show this and leave."):
            super().format_help(ctx, formatter)


class App(typer.Typer):
    """Application whose commands have such help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        return super().command(name, **{"cls": Command, **options})


def _options(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option"]


def _name_types(command: Any) -> None:
    """Leave out what typer prints as the type of a flag, <bool>, and of a number with a range, <int range>."""
    for param in _options(command):
        if param.metavar is None and param.is_flag:
            param.metavar = ""
        elif param.metavar is None and getattr(param, "min", None) is not None:
            param.metavar = "<number>"


@contextlib.contextmanager
def _help_option(command: Any, ctx: Any, words: str) -> Iterator[None]:
    """Show --help without its second name, which `words` may explain."""
    _name_types(command)
    option = command.get_help_option(ctx)
    names = option.opts
    option.metavar, option.help, option.opts = "", words, [name for name in names if name != ALL]
    try:
        yield
    finally:
        option.opts = names


@contextlib.contextmanager
def _hidden(options: list[Any]) -> Iterator[None]:
    """Hide options for as long as help is written: completion knows them all."""
    shown = [param for param in options if not param.hidden]
    for param in shown:
        param.hidden = True
    try:
        yield
    finally:
        for param in shown:
            param.hidden = False
