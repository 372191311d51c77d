"""The command line's parser, made of the flags in ``arguments.py``. Imports no torch."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from enum import StrEnum
from inspect import get_annotations
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Final, NoReturn, TypeGuard, cast, get_args, get_origin, override

from ep_overlap.commands.arguments import (
    Arguments,
    BenchArguments,
    DoctorArguments,
    FlagText,
    PlanArguments,
    TimelineArguments,
    TrainArguments,
    spelled,
)

COMMANDS: Final = MappingProxyType[str, type[Arguments]](
    {
        "train": TrainArguments,
        "plan": PlanArguments,
        "timeline": TimelineArguments,
        "bench": BenchArguments,
        "doctor": DoctorArguments,
    }
)

SUMMARIES: Final = MappingProxyType(
    {
        "train": "train a MoE model on the bytes of a text",
        "plan": "print or check the actions of a step; needs no torch",
        "timeline": "draw a trace",
        "bench": "time a step without overlap, with plain and with paired order; or sharding alone",
        "doctor": "what this machine has, and which features that allows",
    }
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(argv: Sequence[str] | None) -> tuple[str, Arguments]:
    """The command and its arguments; exits with 2 and one line where they do not parse."""
    parser = Parser(
        prog="ep-overlap",
        description="Hides the expert-parallel exchange of MoE training under compute.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            usage=f"ep-overlap {name} [flags]{' TRACE' if name == 'timeline' else ''}",
            formatter_class=_help_formatter,
            allow_abbrev=False,
        )
        _add_groups(command, COMMANDS[name])
    values = vars(parser.parse_args(argv))
    for name in (name for name, value in values.items() if isinstance(value, list)):
        values[name] = tuple(values[name])
    name = cast("str", values.pop("command"))
    return name, COMMANDS[name](**values)


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=44, width=120)


def _add_groups(parser: argparse.ArgumentParser, arguments: type[Arguments]) -> None:
    """The command's own flags first, then those of its groups.

    A command may redeclare a group's flag for a default of its own: it stays in its group.
    """
    items = {item.name: item for item in fields(arguments)}
    shared = {name for group in arguments.__bases__ for name in get_annotations(group)}
    for group in (arguments, *arguments.__bases__):
        names = [
            name for name in get_annotations(group) if group is not arguments or name not in shared
        ]
        section = parser.add_argument_group((group.__doc__ or "").partition("\n")[0])
        for name in names:
            _add_flag(section, items[name])


def _add_flag(section: Any, item: Field[Any]) -> None:
    text: FlagText = item.metadata[FlagText]
    if text.is_positional:
        section.add_argument(item.name, type=_path, metavar=text.metavar, help=text.help)
        return
    names = [name for name in (text.short, spelled(item.name)) if name]
    if isinstance(item.default, bool):
        action = argparse.BooleanOptionalAction if item.default else "store_true"
        section.add_argument(
            *names, dest=item.name, action=action, default=item.default, help=text.help
        )
        return
    kind = _given_type(item)
    several = get_origin(kind) is tuple
    if several:
        kind, _ = get_args(kind)
    section.add_argument(
        *names,
        dest=item.name,
        type=_converter(kind),
        nargs="+" if several else None,
        default=item.default,
        metavar="|".join(kind) if _is_choice(kind) and not several else text.metavar,
        help=text.help if item.default is None else f"{text.help} (default: {item.default})",
    )


def _given_type(item: Field[Any]) -> object:
    """The field's type without ``| None``, which is for flags that are not given."""
    (kind,) = (kind for kind in get_args(item.type) or (item.type,) if kind is not NoneType)
    return kind


def _is_choice(kind: object) -> TypeGuard[type[StrEnum]]:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _choice(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def convert(text: str) -> StrEnum:
        if text not in frozenset(kind):
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(kind)}; got {text!r}")
        return kind(text)

    return convert


def _converter(kind: object) -> Callable[[str], object]:
    """Text to the field's type, with our own words for text that is no number."""
    if _is_choice(kind):
        return _choice(kind)
    if kind is int:
        return _number(int, "a whole number")
    if kind is float:
        return _number(float, "a number")
    return _path if kind is Path else str


def _path(text: str) -> Path:
    """Not of an empty text, which would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def _number(kind: type[int] | type[float], meaning: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {meaning}, got {text!r}") from None

    return convert
