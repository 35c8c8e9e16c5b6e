"""Batches: every pair once an epoch, the same after a resume, prepared ahead by processes that never hang."""

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import psutil
import pytest
from conftest import environment
from PIL import Image

from lapclip.data.batches import PIECE, load_batches, pairs_of_step
from lapclip.data.source import Source
from lapclip.data.synthetic import SceneSource
from lapclip.data.tokenizer import train_tokenizer
from lapclip.data.workers import in_order
from lapclip.errors import UserError

SOURCE = SceneSource(num_pairs=50)
TOKENIZER = train_tokenizer("bpe", [SOURCE.captions(i)[0] for i in range(50)], 400)


def batches(num: int, *, source=SOURCE, first_step=0, workers=0, seed=0, batch_size=8, captions_per_image=1):
    settings = {"seed": seed, "first_step": first_step, "workers": workers, "batch_size": batch_size}
    settings["captions_per_image"] = captions_per_image
    with closing(load_batches(source, TOKENIZER, image_size=16, text_length=32, **settings)) as loader:
        return list(islice(loader, num))


def order(num_steps: int, seed: int = 0, batch_size: int = 8) -> list[int]:
    steps = [pairs_of_step(SOURCE, s, batch_size=batch_size, seed=seed)[0] for s in range(num_steps)]
    return np.concatenate(steps).tolist()


def test_every_pair_comes_once_an_epoch_in_an_order_that_the_seed_decides():
    seen = order(25)  # 200 places: four epochs of 50, though 50 is no multiple of 8
    for epoch in range(4):
        assert sorted(seen[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
    assert seen[:50] != seen[50:100] != list(range(50))
    assert seen == order(25) and seen != order(25, seed=1)


def test_a_loader_that_starts_later_goes_on_as_the_first_one_did():
    for one, other in zip(batches(9)[5:], batches(4, first_step=5), strict=True):
        for field in ("images", "tokens", "ends", "image_ids", "caption_ids"):
            assert np.array_equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize("batch_size", [8, PIECE + 6])
def test_workers_prepare_exactly_what_one_process_would(batch_size):
    source = SceneSource(num_pairs=100)
    inline = batches(3, source=source, batch_size=batch_size)
    for one, other in zip(inline, batches(3, source=source, workers=2, batch_size=batch_size), strict=True):
        assert np.array_equal(one.images, other.images) and np.array_equal(one.tokens, other.tokens)


@dataclass(frozen=True)
class Album(Source):
    """Two images with three captions each."""

    num_pairs: int = 2

    def image(self, index, image_size):
        return Image.new("RGB", (image_size, image_size))

    def captions(self, index):
        return tuple(f"{word} {index}" for word in ("one", "two", "three"))


def test_each_caption_of_an_image_gets_its_turn_and_equal_captions_and_images_share_a_number():
    seen: Counter = Counter()
    for batch in batches(60, source=Album(), batch_size=2):
        seen.update(map(bytes, batch.tokens))
    assert len(seen) == 6 and set(seen.values()) == {20}
    (batch,) = batches(1, source=Album(), batch_size=8)
    same_image = batch.image_ids[:, None] == batch.image_ids
    assert same_image.sum() == 32
    same_row = (batch.tokens[:, None] == batch.tokens).all(-1)
    assert np.array_equal(same_row, batch.caption_ids[:, None] == batch.caption_ids)


@pytest.mark.parametrize("workers", [0, 1])
def test_several_captions_of_an_image_are_its_own_and_all_different(workers):
    """Of two captions in a step, each of three has its turn as often as the others."""
    seen: Counter = Counter()
    for batch in batches(30, source=Album(), batch_size=2, captions_per_image=2, workers=workers):
        assert batch.tokens.shape[:2] == batch.ends.shape == batch.caption_ids.shape == (2, 2)
        for index, tokens, caption_ids in zip(batch.indices, batch.tokens, batch.caption_ids, strict=True):
            own = [bytes(TOKENIZER.encode([c], 32)[0][0]) for c in Album().captions(int(index))]
            assert all(bytes(row) in own for row in tokens) and len({*caption_ids}) == 2
            seen.update(map(bytes, tokens))
    assert len(seen) == 6 and set(seen.values()) == {20}


@dataclass(frozen=True)
class Deadly(SceneSource):
    """Kills the process that draws its tenth image, as the system does when memory runs out."""

    def image(self, index, image_size):
        if index == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().image(index, image_size)


def test_a_script_without_a_main_guard_runs_once_and_does_not_hang(tmp_path):
    """Spawned processes import the script they come from; one that packs a large source would wait for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        "import lapclip.data.workers as workers\n"
        "print('started', __file__ is not None)\n"
        "with workers.worker_pool('x' * 10**6, 1) as pool:\n"
        "    print(pool.submit(workers.with_held, len).result())\n"
        "print(__file__ is not None)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n") == ["started True", "1000000", "True", ""] and done.stderr == ""


def test_a_killed_worker_is_an_error_and_not_a_wait_without_end():
    with pytest.raises(UserError, match="died"):
        batches(20, source=Deadly(num_pairs=50), workers=1)


PROGRAM = """
import sys, time
from lapclip.data.batches import load_batches
from lapclip.data.synthetic import SceneSource
from lapclip.data.tokenizer import train_tokenizer
def main():
    loader = load_batches(SceneSource(50), train_tokenizer("bpe", ["a"], 300), batch_size=8, image_size=16,
                          text_length=16, seed=0, first_step=0, workers=2)
    next(loader)
    print("ready", flush=True)
    time.sleep(60)
{guard}
    main()
"""


@pytest.mark.slow
def test_workers_die_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(guard="if __name__ == '__main__':"))
    with subprocess.Popen([sys.executable, script], stdout=-1, text=True, env=environment()) as process:
        assert process.stdout.readline() == "ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_leaves_the_workers_alone(tmp_path, number):
    """Ctrl-C, `timeout` and a closing terminal signal every process of the group; the parent here ignores it."""
    script = tmp_path / "script.py"
    ignoring = "import signal\nsignal.signal(signal.SIGINT, lambda *_: None); signal.signal(signal.SIGTERM, lambda *_: None)\n"
    more = "    os.killpg(0, {number}); [next(loader) for _ in range(20)]; print('went on', flush=True)\n"
    program = PROGRAM.format(guard="if __name__ == '__main__':").replace("import sys", "import os, sys")
    program = program.replace("    next(loader)\n", f"    os.killpg(0, {int(number)}); next(loader)\n")
    program = program.replace("    time.sleep(60)\n", more.format(number=int(number)))
    script.write_text(ignoring + program)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=environment(), start_new_session=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "ready\nwent on\n", done.stderr


def test_work_ahead_is_bounded_in_order_and_stops_when_it_is_closed():
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 7:
            raise ValueError("seven")
        return item * item

    results = in_order(work, iter(range(10**9)), threads=2, ahead=4)
    assert [next(results) for _ in range(7)] == [n * n for n in range(7)]
    with pytest.raises(ValueError, match="seven"):
        next(results)
    results.close()
    assert len(begun) <= 7 + 5
