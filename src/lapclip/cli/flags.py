"""One flag for every setting of `config.py`, which has its name, type and help.

The help of a command's other flags is in its docstring.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from lapclip.cli.screen import say
from lapclip.config import ALIASES, BUDGETS, SETTINGS, Config, Setting
from lapclip.errors import UserError, code

Switch = Annotated[bool, Parameter(negative="")]  # without a `--no-` form
AsJson = Annotated[bool, Parameter(help="print the result as one JSON object on stdout", negative="")]


def with_settings(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command a flag for each of these settings; those that were passed arrive as `flags`."""

    def give(command: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
        added = [flag_of(SETTINGS[name]) for name in names]
        signature = inspect.Signature(sorted([*added, *own], key=lambda p: p.kind))

        def parse(*arguments: Any, **keywords: Any) -> int:
            passed = signature.bind(*arguments, **keywords).arguments
            flags = {name: passed.pop(name) for name in names if name in passed}
            given = {name: value for name, value in flags.items() if value is not None}
            return command(**passed, flags=given)

        parse.__signature__ = signature  # type: ignore[attr-defined]  # what cyclopts reads
        parse.__name__, parse.__doc__ = command.__name__, command.__doc__
        return parse

    return give


def whole_number(kind: Any, tokens: Sequence[Any]) -> int:
    """Refuses 1.5, which cyclopts would round."""
    return int(tokens[0].value)


def flag_of(setting: Setting) -> inspect.Parameter:
    default = setting.field.default
    shown = "automatic" if default is None else str(default)
    others = [f"--{alias.replace('_', '-')}" for alias, name in ALIASES.items() if name == setting.name]
    help = Parameter(
        name=[setting.flag, *others],
        show=setting.name != "shape",
        help=setting.help,
        converter=whole_number if setting.type is int else None,
        show_default=False if setting.name in (*BUDGETS, "source") else shown,
        group=setting.section.capitalize(),
    )
    flag = inspect.Parameter
    kind = flag.POSITIONAL_OR_KEYWORD if setting.name == "source" else flag.KEYWORD_ONLY
    return flag(setting.name, kind, default=None, annotation=Annotated[setting.type | None, help])


def output_file(path: Path, *suffixes: str, hint: str = "", is_said: bool = True) -> Path:
    """A file to write, checked before the work whose result it is to hold; it is said if it will replace one."""
    from lapclip.files import refuse_foreign

    path = path.expanduser()
    if suffixes and path.suffix.lower() not in suffixes:
        what = f"{code(path)} does not end in {' or '.join(map(code, suffixes))}"
        raise UserError(what, hint=hint or f"name it {code((path.stem or 'lapclip') + suffixes[0])}")
    refuse_foreign(path)
    if is_said and path.exists():
        say(f"{code(path)} exists and will be replaced")
    return path


def refuse_missing_data(config: Config) -> None:
    """Before any work is done for a source that is not there."""
    from lapclip.data.formats.detect import refuse_missing

    refuse_missing(config.data.source, config.data.format)
    if config.data.general:
        refuse_missing(config.data.general)


def refuse_together(**flags: bool) -> None:
    asked = [f"`--{name}`" for name, is_asked in flags.items() if is_asked]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} cannot be combined", hint="choose one of them")
