"""Killed at any moment, an index opens, can be searched, and the next update embeds only the rest."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from conftest import begin, wait_for
from test_update import make_run

from lapclip.search.index import Index, list_indexes

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 400
# A command that commits after every few images to a slow disk, so that there is something to kill in the middle of.
SLOW = """
import os, sys, time
from lapclip.cli import run_command
from lapclip.search import update
update.SECONDS_BETWEEN_COMMITS, update.BATCH, fsync = 0, 8, os.fsync
os.fsync = lambda file: (fsync(file), time.sleep(0.04))
sys.exit(run_command(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A run, and many images that cost nothing to decode: small files, each one different."""
    folder = tmp_path_factory.mktemp("prepared")
    make_run(folder / "runs" / "a", 0)
    (folder / "photos").mkdir()
    header = b"BM" + (54 + 48).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    shape = b"".join(n.to_bytes(4, "little") for n in (40, 4, 4)) + b"\x01\x00\x18\x00" + bytes(24)
    for number in range(COUNT):
        pixels = np.random.default_rng(number).bytes(48)
        (folder / "photos" / f"{number:04}.bmp").write_bytes(header + shape + pixels)
    return folder


def start(folder: Path) -> subprocess.Popen:
    """The command, when it has begun to add to what the index has."""
    known = num_indexed(folder)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = begin(folder, sys.executable, "-c", SLOW, "index", "photos", "--json", **pipes)
    wait_for(lambda: process.poll() is not None or num_indexed(folder) > known)
    return process


def num_indexed(folder: Path) -> int:
    """Images of the index, each with an embedding of unit length; 0 while there is no index."""
    for info in list_indexes():
        with closing(Index(info)) as index:
            vectors_NE = index.vectors[index.live_rows()]
            assert np.allclose(np.linalg.norm(vectors_NE, axis=1), 1, atol=1e-4)
            return index.num_images
    return 0


def kill(folder: Path) -> int:
    """Kills the command at a random moment after it began to embed; how many images the index has then."""
    before = num_indexed(folder)
    process = start(folder)
    time.sleep(random.uniform(0, 0.2))
    process.kill()
    process.communicate()
    after = num_indexed(folder)
    assert before <= after, "what was there is kept"
    return after


def go_on(call, *arguments: str) -> dict[str, int]:
    """What the same command does now, in this process."""
    done = call("index", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def copied(prepared, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LAPCLIP_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(prepared, tmp_path, dirs_exist_ok=True))


@pytest.mark.slow
def test_stopped_and_then_killed_midway_the_next_update_embeds_only_the_rest(copied, call):
    process = start(copied)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and "the same command continues from there" in said
    stopped = num_indexed(copied)
    killed = kill(copied)
    assert 0 < stopped < killed < COUNT
    result = go_on(call)
    assert result["num_embedded"] == COUNT - killed and result["num_indexed"] == COUNT == num_indexed(copied)


@pytest.mark.prove
def test_killed_many_times_at_random_moments(copied, call):
    for _ in range(4):
        shutil.rmtree(copied / "cache", ignore_errors=True)
        kept = [kill(copied) for _ in range(4)][-1]
        assert go_on(call, "photos")["num_embedded"] == COUNT - kept and num_indexed(copied) == COUNT
