"""The rules of the design that a machine can check: layers, backend names, flags."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from lapclip.config import SETTINGS, SizeName, settings
from lapclip.model.clip import SIZES

SOURCE = ROOT / "src" / "lapclip"
FILES = sorted(SOURCE.rglob("*.py"))

# A module imports only from its own package and from lower layers. The packages of one row do not import one another,
# but for those in `IN_ORDER`, each of which may import the ones before it. CONTRIBUTING.md shows the same table.
LAYERS = [
    ("0", ["errors", "units", "files", "config"]),
    ("1", ["machine"]),
    ("2", ["runs", "data", "model"]),
    ("2b", ["weights"]),
    ("3", ["step", "diagnose", "view"]),
    ("4", ["embedder", "autotune"]),
    ("5", ["evaluate"]),
    ("6", ["train"]),
    ("7", ["search", "bench", "finetune", "export"]),
    ("8", ["serve", "reproduce"]),
    ("9", ["cli", "__init__", "__main__"]),
]
IN_ORDER = {"0", "9"}
WITHOUT_TORCH = [
    "errors",
    "units",
    "files",
    "config",
    "machine",
    "runs",
    "data",
    "diagnose",
    "view",
    "search",
]
TORCH_ALLOWED = {"machine/device.py"}  # the only file that names a backend


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"lapclip.{a.name}" for a in node.names} if node.module == "lapclip" else {node.module}
    return found


def may_import(own: str) -> set[str]:
    allowed: set[str] = {own, "__version__"}
    for number, packages in LAYERS:
        if own in packages:
            return allowed | (set(packages[: packages.index(own)]) if number in IN_ORDER else set())
        allowed |= set(packages)
    raise AssertionError(f"`{own}` has no layer")


@pytest.mark.parametrize("own", sorted({part(path) for path in FILES}))
def test_imports_point_down_the_layers(own):
    for path in (path for path in FILES if part(path) == own):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("lapclip.")}
        if own == "__init__":
            ours = set()  # lazy: it names what it exports, and imports it when it is first used
        assert ours <= may_import(own), f"{path.relative_to(SOURCE)} imports {ours - may_import(own)}"


def test_contributing_shows_the_same_table():
    rows = re.findall(r"^\| (\d\w?) \| ([^|]+) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = [(number, re.findall(r"`(\w+)/?`", packages)) for number, packages in rows]
    assert shown == [(number, [p for p in packages if p != "__main__"]) for number, packages in LAYERS]


@pytest.mark.parametrize("own", WITHOUT_TORCH)
def test_the_parts_without_torch_do_not_import_it(own):
    for path in (p for p in FILES if part(p) == own and str(p.relative_to(SOURCE)) not in TORCH_ALLOWED):
        assert not any(name.split(".")[0] in ("torch", "safetensors") for name in imports(path)), path


def test_few_modules_stand_outside_a_package():
    assert len(list(SOURCE.glob("*.py"))) <= 8


def test_only_device_names_a_backend():
    """Everywhere else the word is a bug waiting for another machine; the config lists what may be asked for."""
    for path in FILES:
        words = re.findall(r"\b(cuda|mps|xpu|cudnn)\b", strip_comments(path))
        if part(path) == "config":
            words = [w for w in words if w not in ("cuda", "mps")]
        assert path == SOURCE / "machine" / "device.py" or not words, f"{path} names {words}"


def strip_comments(path: Path) -> str:
    return re.sub(r"#.*", "", path.read_text())


def test_no_collective_outside_parallel():
    assert not [path for path in FILES if path.stem != "parallel" and "torch.distributed" in path.read_text()]


def test_only_the_command_line_and_the_views_print():
    for path in FILES:
        if part(path) not in ("cli", "view"):
            assert not re.search(r"\bprint\(|sys\.std(out|err)", strip_comments(path)), path


def test_every_setting_is_declared_once_and_explains_itself_and_every_size_is_known():
    assert max(Counter(setting.name for setting in settings()).values()) == 1
    assert max(Counter(setting.flag for setting in SETTINGS.values()).values()) == 1
    for setting in SETTINGS.values():
        assert len(setting.help) > 10 and not setting.help.endswith("."), setting.name
    assert list(SizeName.__args__) == list(SIZES)


def test_a_file_says_what_it_is():
    drawers = {"utils", "util", "common", "helpers", "misc", "base", "manager", "factory", "registry"}
    for path in FILES:
        text = path.read_text()
        assert path.stem not in drawers, path
        assert not text or ast.get_docstring(ast.parse(text)), f"{path} says in its first lines what it is"


def test_no_pickle_is_ever_loaded():
    for path in FILES:
        assert not imports(path) & {"pickle", "dill", "joblib", "shelve", "marshal"}, path
        calls = re.findall(r"torch\.load\(.*", path.read_text())
        is_guarded = path.relative_to(SOURCE).as_posix() == "weights/reading.py"
        assert all(is_guarded and "weights_only=True" in call for call in calls), path


def test_help_mistakes_and_wrong_paths_cost_no_torch(tmp_path):
    """A wrong path is refused within 0.5 s (`benchmarks/start.py`); most of that is spent on imports."""
    commands = (
        "--help", "train --help", "train --minuts 3", "train --steps 0", "train none", "train none --background",
        "train --resume none", "data check none", "data pack none", "bench none",
        "eval none", "eval . none", "index none", "export none --to hf --out x",
        "index . --model none", "search --like none.jpg", "search cat --model none",
        "serve --model none --no-open", "watch none", "report none",
    )  # fmt: skip
    program = (
        "import sys, lapclip.cli as c\n"
        "for words in {!r}:\n"
        "    code = c.run_command(words.split())\n"
        "    assert 'torch' not in sys.modules, 'torch was imported: ' + words\n"
        "    assert bool(code) == ('--help' not in words), words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program.format(commands)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]


# What other programs print, where their words are all there is to go by.
FOREIGN_TEXT = {
    r"^model name\s*:\s*(.+)$",  # /proc/cpuinfo
    r"\bOpenMP (\d+)(?: \(a\.k\.a\. OpenMP ([\d.]+)\))?",  # torch.__config__
    " Available commands:",  # cyclopts
}
SEARCHES = {
    "startswith", "endswith", "find", "index", "count", "search", "match", "fullmatch", "partition", "rpartition", "split",
}  # fmt: skip


def texts(node: ast.AST) -> Iterator[str]:
    """The string constants of a comparison's or search's operand."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.JoinedStr(values=parts):
            for part_of in parts:
                yield from texts(part_of)


def searched(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare():
            operands = [node.left, *node.comparators]
        case ast.Call(func=ast.Attribute(attr=name)) if name in SEARCHES:
            operands = node.args
        case ast.MatchValue():
            operands = [node.value]
        case _:
            operands = []
    for operand in operands:
        yield from texts(operand)


def test_no_sentence_is_state():
    """Nothing compares with, or searches for, words meant for people: another wording would change what happens."""
    for path in FILES:
        found = {text for node in ast.walk(ast.parse(path.read_text())) for text in searched(node)}
        assert not [text for text in found - FOREIGN_TEXT if " " in text.strip()], path
