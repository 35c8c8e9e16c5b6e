"""Killed at any moment, an index opens, can be searched, and the next update embeds only the rest."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import command, environment, wait_for
from test_index import make_run

from lapclip.search.about import all_abouts
from lapclip.search.store import Index

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
COUNT = 1500
# A command that commits several times a second, so that there is something to kill in the middle of.
HURRIED = (
    "import sys; from lapclip.search import writing; writing.SECONDS_BETWEEN_COMMITS = 0.02;"
    "from lapclip.cli import run_command; sys.exit(run_command(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A run, and many pictures that cost nothing to decode: small files, each one different."""
    folder = tmp_path_factory.mktemp("prepared")
    make_run(folder / "runs" / "a", 0)
    (folder / "photos").mkdir()
    header = b"BM" + (54 + 48).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    shape = b"".join(n.to_bytes(4, "little") for n in (40, 4, 4)) + b"\x01\x00\x18\x00" + bytes(24)
    for number in range(COUNT):
        pixels = np.random.default_rng(number).bytes(48)
        (folder / "photos" / f"{number:04}.bmp").write_bytes(header + shape + pixels)
    return folder


def start(folder: Path, program: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [*program, "index", "photos", "--json"],
        cwd=folder,
        env=environment(LAPCLIP_CACHE=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def num_indexed(folder: Path) -> int:
    """Pictures of the index, each with an embedding of unit length; 0 while there is no index."""
    os.environ["LAPCLIP_CACHE"] = str(folder / "cache")
    for about in all_abouts():
        with Index(about) as index:
            vectors_NE = index.vectors[index.live_rows()]
            assert np.allclose(np.linalg.norm(vectors_NE, axis=1), 1, atol=1e-4)
            return index.num_pictures
    return 0


def kill_and_go_on(folder: Path, num_kills: int) -> None:
    """Kills the command some times, at random moments after it began to embed, and lets it finish."""
    before = 0
    for _ in range(num_kills):
        process = start(folder, [sys.executable, "-c", HURRIED])
        wait_for(
            lambda known=before, process=process: process.poll() is not None or num_indexed(folder) > known
        )
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        after = num_indexed(folder)
        assert after >= before, "what was there is kept"
        before = after
    process = start(folder, [sys.executable, "-c", HURRIED])
    result = json.loads(process.communicate()[0])
    assert result["num_embedded"] == COUNT - before and result["num_indexed"] == COUNT
    assert num_indexed(folder) == COUNT


@pytest.fixture
def copied(prepared, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(prepared, tmp_path, dirs_exist_ok=True))


def test_killed_midway_the_next_update_embeds_only_the_rest(copied):
    kill_and_go_on(copied, 1)


@pytest.mark.prove
def test_killed_many_times_at_random_moments(copied):
    for _ in range(8):
        shutil.rmtree(copied / "cache", ignore_errors=True)
        kill_and_go_on(copied, 4)


def test_asked_to_stop_it_saves_and_says_how_to_go_on(copied):
    process = start(copied, [sys.executable, "-c", HURRIED])
    wait_for(lambda: process.poll() is not None or num_indexed(copied) > 0)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    if process.returncode == 0:
        pytest.skip("it was done before it was asked")
    assert process.returncode == 130 and "the same command goes on from there" in said
    kept = num_indexed(copied)
    assert 0 < kept < COUNT
    second = start(copied, command())
    assert json.loads(second.communicate()[0])["num_embedded"] == COUNT - kept
