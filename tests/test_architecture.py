"""The rules of the design that a machine can check: layers, backend names, flags, file sizes."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

from lapclip.config import SETTINGS, SizeName, settings
from lapclip.model.clip import SIZES

SOURCE = ROOT / "src" / "lapclip"
FILES = sorted(SOURCE.rglob("*.py"))

# A module imports only from lower layers; inside data/, model/ and monitor/ each part may import its own.
LAYERS = [
    {"errors"},
    {
        "amounts", "config", "intake", "events", "history", "lock", "run", "cores", "machine", "provenance", "plot", "sensors",
        "battery", "awake", "diagnose", "web", "device",
    },
    {"data", "model", "loss", "optim", "augment", "closeup"},
    {"step", "checkpoint", "feed", "pretrained"},
    {"embedder", "measure", "recover", "negatives", "resample", "mishaps", "inspection"},
    {"evaluate", "zero_shot", "settle"},
    {"tryout", "trust", "snapshot", "mistakes"},
    {"prepare", "appraise"},
    {"checkup", "forewarn"},
    {"train"},
    {"runs"},
    {"background", "comparison"},
    {"bench", "monitor", "report", "search"},
    {"serve"},
    {"cli", "__init__"},
    {"__main__"},
]  # fmt: skip
# Within layer 1 these may build on one another, in this order; nothing else on its own layer may.
ORDER_IN_LAYER_1 = [
    "amounts", "config", "intake", "events", "history", "cores", "machine", "provenance", "plot", "lock", "run", "sensors",
    "battery", "awake", "diagnose", "web", "device",
]  # fmt: skip
WITHOUT_TORCH = {
    "errors", "amounts", "config", "intake", "events", "history", "lock", "run", "cores", "machine", "provenance", "plot", "sensors",
    "battery", "awake", "diagnose", "web", "negatives", "resample", "runs", "background", "comparison", "monitor", "report", "data", "search",
}  # fmt: skip


def part(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name in names)


def imports(path: Path) -> set[str]:
    """Every lapclip part and outside package a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"lapclip.{a.name}" for a in node.names} if node.module == "lapclip" else {node.module}
    return found


@pytest.mark.parametrize("own", sorted({part(path) for path in FILES}))
def test_imports_point_down_the_layers(own):
    for name in {name for path in FILES if part(path) == own for name in imports(path)}:
        if not name.startswith("lapclip."):
            continue
        other = name.split(".")[1]
        if other in (own, "__version__"):
            continue
        if layer(other) == layer(own) == 1:
            assert ORDER_IN_LAYER_1.index(other) < ORDER_IN_LAYER_1.index(own), f"{own} imports {other}"
        else:
            assert layer(other) < layer(own), f"{own} imports {other}"


@pytest.mark.parametrize("own", sorted(WITHOUT_TORCH))
def test_the_parts_without_torch_do_not_import_it(own):
    for path in (p for p in FILES if part(p) == own):
        assert not any(name.split(".")[0] in ("torch", "safetensors") for name in imports(path)), path


def test_what_shows_a_run_reaches_nothing_that_has_torch():
    allowed = WITHOUT_TORCH - {"data", "negatives", "resample", "diagnose", "monitor", "report", "search"}
    for own in ("monitor", "report", "runs", "background", "comparison"):
        for path in (p for p in FILES if part(p) == own):
            ours = {name.split(".")[1] for name in imports(path) if name.startswith("lapclip.")}
            assert ours <= allowed | {own}, path


def test_every_module_has_a_layer():
    assert {part(path) for path in FILES} <= set().union(*LAYERS)


def test_only_device_names_a_backend():
    """Everywhere else the word is a bug waiting for another machine; the config lists what may be asked for."""
    for path in FILES:
        words = re.findall(r"\b(cuda|mps|xpu|cudnn)\b", strip_comments(path))
        if part(path) == "config":
            words = [w for w in words if w not in ("cuda", "mps")]
        assert part(path) == "device" or not words, f"{path} names {words}"


def strip_comments(path: Path) -> str:
    return re.sub(r"#.*", "", path.read_text())


def test_no_collective_outside_parallel():
    assert not [
        path for path in FILES if part(path) != "parallel" and "torch.distributed" in path.read_text()
    ]


def test_only_the_command_line_and_the_monitor_print():
    for path in FILES:
        if part(path) not in ("cli", "monitor"):
            assert not re.search(r"\bprint\(|sys\.std(out|err)", strip_comments(path)), path


def test_no_setting_is_declared_twice():
    assert [name for name, count in Counter(s.name for s in settings()).items() if count > 1] == []
    assert [name for name, count in Counter(s.flag for s in SETTINGS.values()).items() if count > 1] == []


def test_every_setting_explains_itself_in_a_sentence():
    for setting in SETTINGS.values():
        assert len(setting.help) > 10 and not setting.help.endswith("."), setting.name


def test_the_config_knows_every_size():
    assert list(SizeName.__args__) == list(SIZES)


@pytest.mark.parametrize("own", sorted({part(path) for path in FILES}))
def test_a_file_is_one_thing(own):
    for path in (p for p in FILES if part(p) == own):
        assert_is_one_thing(path)


def assert_is_one_thing(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 350, path
    assert path.stem not in (
        "utils",
        "util",
        "common",
        "helpers",
        "misc",
        "base",
        "manager",
        "factory",
        "registry",
    )
    assert not text or ast.get_docstring(ast.parse(text)), f"{path} says in its first lines what it is"


def test_no_pickle_is_ever_loaded():
    for path in FILES:
        assert not imports(path) & {"pickle", "dill", "joblib", "shelve", "marshal"}, path
        assert "torch.load" not in path.read_text(), path


def test_help_and_mistakes_cost_no_torch():
    program = "import sys, lapclip.cli as c; c.run_command({!r}); assert 'torch' not in sys.modules, 'torch was imported'"
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["train", "--minuts", "3"],
        ["train", "--steps", "0"],
        ["eval", "none"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program.format(arguments)], capture_output=True, text=True
        )
        assert done.returncode == 0, (arguments, done.stderr)
