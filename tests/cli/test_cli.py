"""The command line as people and programs meet it: exit codes, errors, JSON, help."""

import ast
import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, as_flags, environment, lapclip

import lapclip as library
from lapclip.cli import run_command, screen
from lapclip.cli.screen import own_name
from lapclip.config import SETTINGS, load_config
from lapclip.errors import suggest
from lapclip.runs.run import Run
from lapclip.units import Progress

TRAIN = ["train", *as_flags(SMALL)]
RECALL_KEYS = {"recall@1", "recall@5", "recall@10", "median_rank", "chance@1", "chance@10", "interval@10"}


def said(capsys) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tran"], 2, "did you mean `?train"),
        (["train", "--minuts", "3"], 2, "did you mean `--minutes`"),
        (["train", "--size", "tinny"], 2, "`tinny`.*did you mean `tiny`"),
        (["train", "--steps", "many"], 2, "--steps"),
        (["train", "--steps", "1.5"], 2, "--steps"),
        (["train", "--steps", "0"], 1, "`--steps` is 0, less than 1"),
        (["train", "--minutes", "-3"], 1, "--minutes"),
        (["train", "--minutes", "1", "--steps", "5"], 1, "both budgets"),
        (["train", "synthetc"], 1, "did you mean `synthetic`"),
        (["train", "--config", "none.toml"], 1, "`none.toml`"),
        (["train", "--resume", "none"], 1, "no run `none`"),
        (["train", "--resume", "none", "--run", "x"], 1, "omit `--run`"),
        (["train", "--device", "cuda", "--steps", "1"], 1, "no device `cuda`"),
        (["train", "--device", "gpu"], 2, "`auto`, `cpu`, .*`auto` uses a GPU where it is faster"),
        (["train", "--image-size", "60"], 1, "is not a multiple of the stride 16"),
        (["eval", "none"], 1, "no run `none`"),
        (["eval"], 2, "run"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence_with_a_way_out(arguments, code, message, capsys):
    assert run_command(arguments) == code
    error = said(capsys)
    assert re.search(message, error, re.IGNORECASE), error
    assert error.startswith("error: ") and "\nhint: " in error and "Traceback" not in error


def test_in_the_background_commands_are_named_as_in_the_foreground(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lapclip").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    for typed in (
        "bin/lapclip",
        "src/lapclip/__main__.py",
    ):  # `python -m lapclip`, as a run in the background is
        monkeypatch.setattr("sys.argv", [typed])
        assert own_name() == "bin/lapclip"


def test_commands_in_hints_can_be_pasted(capsys):
    run = Run(Path("my runs/a"))
    run.path.mkdir(parents=True)
    run.write_config(load_config(flags=SMALL))
    assert shlex.split(run.reference) == ["my runs/a"]
    Path("my model").mkdir()  # a hint to index with a model is for one that exists
    for arguments, path in (
        (["train", "--resume", "my runs/a", "--size", "small"], "my runs/a/config.toml"),
        (["search", "cat", "--model", "my model"], "my model"),
    ):
        assert run_command(arguments) == 1
        error = said(capsys)
        command = re.search(r"`(lapclip [^`]+)`", error)
        assert command and path in shlex.split(command[1]), error


def test_a_config_with_five_mistakes_names_all_five(tmp_path, capsys):
    (tmp_path / "bad.toml").write_text(
        "[train]\nlr = 'x'\nstep = 1\nwarmup = 5\n[modl]\n[data]\nworkers = -1\n"
    )
    assert run_command(["train", "--config", "bad.toml"]) == 1
    error = said(capsys)
    mistakes = ("train.lr", "did you mean `steps`", "train.warmup", "did you mean `model`", "data.workers")
    assert "5 mistakes" in error and all(mistake in error for mistake in mistakes)


@pytest.mark.slow
def test_train_then_eval_agree_and_speak_json(call):
    """stdout is one JSON object with the promised keys; everything for people is on stderr."""
    done = lapclip(*TRAIN, "--run", "r", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() >= {
        "run", "steps", "epochs", "seconds", "num_pairs_seen", "pairs_per_second", "peak_memory_bytes",
        "num_parameters", "settled", "recall", "checkpoint",
    }  # fmt: skip
    assert result["steps"] == 6 and result["run"] == "runs/r" and result["peak_memory_bytes"] > 1e8
    for choice in result["settled"].values():
        assert choice.keys() == {"value", "reason"} and choice["reason"]
    assert result["recall"]["text_to_image"].keys() >= RECALL_KEYS and result["recall"]["num_images"] == 16
    evaluated = json.loads(call("eval", "r", "--json").stdout)
    for way in ("text_to_image", "image_to_text"):
        assert evaluated[way] == result["recall"][way], "intervals included"
        for k in (1, 5, 10):
            low, high = evaluated[way][f"interval@{k}"]
            assert 0 <= low <= evaluated[way][f"recall@{k}"] <= high <= 1
    for key in ("num_images", "num_captions", "in_batch", "negatives"):
        assert evaluated[key] == result["recall"][key]
    assert evaluated["held_out"] and evaluated["model"] == "r" and evaluated["protocol"] == "shared"
    assert evaluated["pool"] == {"size": 16, "num_pools": 1}
    by_path = call("eval", result["run"])
    assert "text → image" in by_path.stdout and "chance" in by_path.stdout
    assert call(*TRAIN, "--run", "r").returncode == 1, "the name is taken"


@pytest.mark.slow
def test_piped_output_is_plain_lines_and_what_cannot_change_on_resume_is_refused(capsys):
    done = lapclip(*TRAIN, "--run", "r")
    assert done.stdout == "" and "\x1b" not in done.stderr and "\r" not in done.stderr
    expected = ("loss", "pairs/s", "tau", "left", "text → image", "learned.png", "eval r", "--resume r")
    assert all(text in done.stderr for text in expected), done.stderr
    table = done.stderr[done.stderr.index("validation images, ") :].splitlines()[:8]
    assert max(map(len, table)) <= 80 and "\u2026" not in done.stderr, "nothing is cut at 80 columns"
    # What cannot change on resume is refused.
    assert run_command(["train", "--resume", "r", "--size", "small"]) == 1
    assert "`--size` cannot change" in said(capsys)
    assert run_command(["train", "--resume", "r"]) == 1
    assert "has used up its budget" in said(capsys)
    assert run_command(["train", "--resume", "r", "--steps", "3"]) == 1
    assert "has used up this budget: 6 steps" in said(capsys)


def test_every_setting_is_a_flag_with_its_sentence(capsys):
    run_command(["train", "--help"])
    help = capsys.readouterr().out
    for setting in SETTINGS.values():
        if setting.name == "shape":
            continue  # written by training, not by people
        assert setting.flag in help, setting.flag
        assert " ".join(setting.help.split()[:2]) in help, setting.name


@pytest.mark.slow
def test_help_costs_little_more_than_the_libraries_that_print_it():
    """The promise is 0.3 s on a quiet machine (`benchmarks/start.py`); this ratio of processor time holds on a busy one too."""
    ours, theirs = [], []
    for _ in range(5):
        for took, arguments in (
            (ours, ["-m", "lapclip", "--help"]),
            (theirs, ["-c", "import cyclopts.help, rich.table"]),
        ):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=environment())
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(ours) < 2 * min(theirs)


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("ZSH", "ZSH_CUSTOM", "ZSH_VERSION", "BASH_VERSION", "FISH_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_bash_completes_commands_flags_and_values_and_files_elsewhere(home, capsys):
    (home / ".bashrc").write_text("alias mine=ls")  # without a line break at its end
    for _ in range(2):  # a second time changes nothing
        assert run_command(["--install-completion", "--shell", "bash"]) == 0
    assert "`~/.bashrc` loads it" in said(capsys)
    lines = (home / ".bashrc").read_text().splitlines()
    assert lines[0] == "alias mine=ls" and len(lines) == 3
    ask = """
        . ~/.bashrc; complete -p lapclip
        for line in "lapclip tra" "lapclip runs st" "lapclip train --minu" "lapclip train --size na" "lapclip train phot"; do
            COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _lapclip; echo "${COMPREPLY[*]}"
        done"""
    asked = ["bash", "--norc", "-c", ask]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment(HOME=str(home)), check=True)
    registered, *answers = done.stdout.splitlines()
    assert answers == ["train", "stop", "--minutes", "nano", ""] and done.stderr == ""
    assert "-o default" in registered, "no answer: bash offers files, as without completion"


@pytest.mark.parametrize(
    ("shell", "file"),
    [("zsh", ".zsh/completions/_cyclopts_lapclip"), ("fish", ".config/fish/completions/lapclip.fish")],
)
def test_completion_for_other_shells_is_a_script_they_can_read(home, shell, file, capsys):
    assert run_command(["--install-completion", "--shell", shell]) == 0
    assert ("autoload -Uz compinit" in said(capsys)) == (shell == "zsh")
    assert "Train a CLIP from images and captions" in (home / file).read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", home / file], check=True)


def test_completion_that_cannot_be_installed_says_why(home, monkeypatch, capsys):
    from cyclopts.completion import detect

    monkeypatch.setattr(detect, "detect_shell", lambda: "powershell")
    assert run_command(["--install-completion"]) == 1
    assert "completion is not available for `powershell`\nhint: name one: `lapclip --install" in said(capsys)
    (home / ".config").write_text("not a folder")
    assert run_command(["--install-completion", "--shell", "fish"]) == 1
    assert re.search(r"cannot install completion: `.*`: Not a directory\nhint: ", said(capsys))


def test_version_is_said():
    assert lapclip("--version").stdout.strip() == library.__version__


def test_a_missing_package_is_named_with_what_installs_it():
    code = "import sys; sys.modules['msgspec'] = None; from lapclip.cli import run_command; run_command(['runs'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert "the package `msgspec` is not installed" in done.stderr and "hint: install lapclip" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_with_spaces_that_was_not_quoted_is_recognised(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My Photos").mkdir()
    assert run_command(["data", "check", "My", "Photos"]) == 2
    assert "unexpected argument: `Photos`" in (told := said(capsys)) and "hint: quote a path" in told
    assert "'My Photos'" in told
    assert run_command(["index", "My", "Photos", "--model", "x"]) == 1
    assert "hint: quote a path that has spaces: 'My Photos'" in said(capsys)


def test_several_sources_are_joined_with_a_plus(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("flags", "units"):
        (tmp_path / name).mkdir()
    assert run_command(["train", "flags", "units", "--minutes", "1"]) == 2
    assert "unexpected argument: `units`" in (told := said(capsys)) and "'flags + units'" in told


def test_a_name_is_suggested_with_or_without_its_accents():
    assert suggest("ete", ["hiver", "\u00e9t\u00e9"]) == "; did you mean `\u00e9t\u00e9`?"
    assert suggest("\u00e9t\u00e9", iter(["ete"])) == "; did you mean `ete`?"


def test_long_work_is_mentioned_where_there_is_no_terminal(capsys, monkeypatch):
    def work():
        for done in range(3):
            time.sleep(0.02)
            yield Progress("embedding captions", done, 3)

    screen.follow(work())
    assert capsys.readouterr().err == "", "short work is not worth a line"
    monkeypatch.setattr(screen, "SECONDS_QUIET", 0.01)
    screen.follow(work())
    assert capsys.readouterr().err.count("embedding captions: 1 of 3, about ") == 1, "and then once a minute"


def test_long_work_in_short_stages_is_mentioned_too(capsys, monkeypatch):
    def work():
        for n in range(4):
            time.sleep(0.02)
            yield f"measuring plan {n}"

    monkeypatch.setattr(screen, "SECONDS_QUIET", 0.05)
    screen.follow(work())
    assert capsys.readouterr().err.count("measuring plan") == 1


def test_help_breaks_no_line_within_a_sentence():
    """Line breaks of a description are kept as they are, at any width."""
    for file in (ROOT / "src" / "lapclip" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and "Args:" in (said := ast.get_docstring(node) or ""):
                described = said.partition("Args:")[0].split("\n")
                assert all(line.endswith((".", ":")) for line in described if line.strip()), node.name
