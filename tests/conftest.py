"""Small real things to test with: a model that steps in milliseconds, a run trained in a second."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lapclip.config import Config, load_config
from lapclip.machine import wait_calmly

wait_calmly()  # before torch is imported, as the command line does

ROOT = Path(__file__).resolve().parent.parent

# As flags, for commands, and as settings, for calls: the same small training.
SMALL = {
    "source": "synthetic:200",
    "size": "nano",
    "image_size": 16,
    "num_validation": 16,
    "batch_size": 8,
    "steps": 6,
    "workers": 0,
    "threads": 1,
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_config() -> Config:
    return load_config(flags=SMALL)


@pytest.fixture
def with_train(small_config):
    """The small config with some training settings changed."""

    def change(**settings) -> Config:
        if settings.keys() & {"minutes", "epochs"}:
            settings.setdefault("steps", None)
        return replace(small_config, train=replace(small_config.train, **settings))

    return change


def as_flags(settings: dict) -> list[str]:
    flags = []
    for name, value in settings.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def lapclip(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own, as a person would, on a pipe."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment(),
        **options,
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lapclip", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "80", **more}
