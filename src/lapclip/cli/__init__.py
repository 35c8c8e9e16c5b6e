"""The command line: parses, calls, prints. The only exit codes: 0, 1 what the person can fix, 2 usage, 130 stopped.

stdout is data, stderr is for people. torch is imported by the commands that need it, never by `--help`.
"""

import inspect
import io
import os
import re
import sys
import traceback
import warnings

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError

from lapclip import __version__
from lapclip.cli.bench import bench
from lapclip.cli.completion import install_completion
from lapclip.cli.data import data
from lapclip.cli.evaluate import evaluate
from lapclip.cli.export import export
from lapclip.cli.index import index
from lapclip.cli.models import models
from lapclip.cli.report import report
from lapclip.cli.reproduce import reproduce
from lapclip.cli.runs import runs
from lapclip.cli.screen import Stopped, complain
from lapclip.cli.search import search
from lapclip.cli.serve import serve
from lapclip.cli.train import train
from lapclip.cli.watch import watch
from lapclip.errors import UserError, code, typed
from lapclip.machine.hardware import limit_openmp_spinning

app = App(
    name="lapclip",
    help="Train your own CLIP on the laptop you have, and search your images with it.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # we answer it ourselves
)
app.command(train)
app.command(evaluate, name="eval")
for command in (index, search, serve, models, data, bench, report, runs, watch, export, reproduce):
    app.command(command)
app.command(install_completion, name="--install-completion")


def run_command(arguments: list[str]) -> int:
    limit_openmp_spinning()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in a locale without UTF-8, what it lacks is escaped
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", module="PIL")  # about metadata of images
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without a line of code
    if arguments[:1] == ["search"] and "--" in arguments:
        end = arguments.index("--") + 1  # from here on, words: no flag begins with a space
        arguments = [*arguments[:end], *(f" {word}" for word in arguments[end:])]
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except UserError as problem:
        complain(problem.message, quoting_hint(arguments) or problem.hint)
        return 1
    except CycloptsError as problem:
        meant = " ".join(["lapclip", *app.parse_commands(arguments)[0], "--help"])
        hint = f"`{meant}` lists all options"
        if isinstance(problem, UnusedCliTokensError) and (quoting := quoting_hint(arguments)):
            hint = quoting
        elif isinstance(problem, UnusedCliTokensError) and arguments[0] in ("train", "data"):
            sources = [word for word in arguments if os.path.exists(word)]
            hint = f"join several sources with a plus: {typed(' + '.join(sources))}" if sources[1:] else hint
        complain(in_our_style(problem), hint)
        return 2
    except Stopped as stop:
        complain(stop.message, stop.hint)
        return 130
    except KeyboardInterrupt:
        is_train = arguments[:1] == ["train"]
        goes_on = "`lapclip train --resume NAME` continues from the last checkpoint, if there is one"
        complain("stopped immediately", goes_on if is_train else "the same command starts again")
        return 130
    except Exception as problem:
        if isinstance(problem, ModuleNotFoundError) and not (problem.name or "").startswith("lapclip"):
            hint = "install lapclip again: `make train` in a clone, `pip install lapclip` elsewhere"
            complain(f"the package `{problem.name}` is not installed", hint)
            return 1
        traceback.print_exc()
        what = f"this is a bug in lapclip: {type(problem).__name__}: {problem}"
        complain(what, "please report it with the lines above")
        return 1


def quoting_hint(arguments: list[str]) -> str | None:
    """Where a file or folder exists if some of the words are one path: `My Photos` was typed without quotes."""
    ends = ((start, end) for start in range(len(arguments)) for end in range(start + 2, len(arguments) + 1))
    joined = (" ".join(arguments[start:end]) for start, end in ends)
    path = next((path for path in joined if os.path.exists(path)), None)
    return path and f"quote a path that has spaces: {typed(path)}"


def in_our_style(problem: CycloptsError) -> str:
    """cyclopts' sentence with our quotes: `Unknown option: --minuts.` becomes unknown option: `--minuts`."""
    if isinstance(problem, MissingArgumentError) and problem.argument and not problem.keyword:
        name, choices = problem.argument.name, " or ".join(map(code, problem.argument.get_choices() or ()))
        if problem.argument.field_info.kind is inspect.Parameter.KEYWORD_ONLY:
            return f"{code(name)} is missing" + f": {choices}" * bool(choices)
        return f"an argument is missing: {problem.argument.parameter.help or code(name.lstrip('-').upper())}"
    if isinstance(problem, UnusedCliTokensError) and problem.unused_tokens:
        return f"unexpected argument: `{' '.join(problem.unused_tokens)}`"
    message = str(problem).partition(" Available commands:")[0]
    message = re.sub(r"invalid literal for int\(\) .*: '(.*)'", r"expected a whole number, not `\1`", message)
    message = re.sub(r"unable to convert (.*) into (int|float)", r"expected a number, not \1", message)
    message = re.sub(r"(?<!\S)--\w[\w-]*", r"`\g<0>`", message.replace('"', "`"))
    # The name nearest to `gpu` is another device.
    message = re.sub(r"(`gpu`.*)Did you mean `cpu`\?", r"\1`auto` uses a GPU where it is faster", message)
    return (message[:1].lower() + message[1:]).rstrip(".")
