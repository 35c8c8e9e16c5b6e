"""Writes docs/cli.md and docs/config.md from the code; `make docs` runs it, and a test compares."""

import io
import typing
from dataclasses import fields
from pathlib import Path

from cyclopts import App
from rich.console import Console

from lapclip.cli import app
from lapclip.config import SETTINGS, Config

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Generated from the code by `make docs`. -->\n"


def main() -> None:
    (ROOT / "docs" / "cli.md").write_text(cli_page(), "utf-8")
    (ROOT / "docs" / "config.md").write_text(config_page(), "utf-8")


def cli_page() -> str:
    parts = [NOTE, "# Commands\n"]
    for command in all_commands(app):
        name = " ".join(["lapclip", *command])
        parts.append(f"## {name}\n\n```\n{help_of(command)}\n```\n")
    return "\n".join(parts)


def all_commands(part: App, above: tuple[str, ...] = ()) -> list[list[str]]:
    """Each command and the commands below it."""
    found = [list(above)]
    for name in part:
        if not name.startswith("-"):
            found += all_commands(part[name], (*above, name))
    return found


def help_of(command: list[str]) -> str:
    console = Console(file=io.StringIO(), width=100, no_color=True, force_terminal=False)
    app.help_print(command, console=console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip().splitlines())


def config_page() -> str:
    lines = [
        NOTE,
        "# Settings\n",
        "Each setting is a flag of `lapclip train` and a key of a TOML file (`--config`). Flags override the file.",
        "Settings without a default depend on model size, data and machine, and are printed with the reason.\n",
    ]
    for section in (f.name for f in fields(Config)):
        description = type(getattr(Config(), section)).__doc__
        lines += [
            f"## [{section}]\n",
            f"{description}\n",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for setting in SETTINGS.values():
            if setting.section == section:
                default = "" if setting.field.default is None else f"`{setting.field.default}`"
                lines.append(f"| `{setting.name}` | {type_name(setting.type)} | {default} | {setting.help} |")
        lines.append("")
    return "\n".join(lines)


def type_name(kind: typing.Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[kind]


if __name__ == "__main__":
    main()
