"""Distillation of a trained model into a new one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import opened, picture_folder

import lapclip
from lapclip.config import load_config
from lapclip.data.tokenizer import train_bpe
from lapclip.embedder import Embedder
from lapclip.finetune.distill import find_teacher
from lapclip.machine.device import processor
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP
from lapclip.model.towers import Size
from lapclip.step.feed import feed
from lapclip.units import finished


@pytest.fixture
def teacher() -> Embedder:
    """Saved as the folder `teacher`; its images are larger than those of `nano`."""
    torch.manual_seed(0)
    tokenizer = train_bpe(["red green blue old new cat dog tree number 1 2 3"], 400)
    size = Size(Shape(48, 2, 2), Shape(32, 2, 2), 48, 8, 16, 40)
    own = Embedder(CLIP(size, vocab_size=tokenizer.vocab_size).eval(), tokenizer, processor(), name="teacher")
    own.save("teacher")
    return own


@pytest.mark.slow
def test_a_new_model_learns_to_match_its_teacher(teacher, call):
    photos = picture_folder(Path("photos"), 60)
    flags = ["--size", "nano", "--steps", "40", "--batch-size", "24", "--seed", "1"]
    for name, more in (("taught", ["--teacher", "teacher"]), ("alone", ["--embedding", "40"])):
        ran = call("train", "photos", "--run", name, *flags, *more)
        assert ran.returncode == 0, ran.stderr
    images = sorted(photos.glob("*.jpg"))
    teacher_text_NE = teacher.texts([image.with_suffix(".txt").read_text() for image in images])

    def rank(name: str) -> float:
        """Of an image's own caption, as the teacher embeds it, for the new model's image; 0.5 is chance."""
        cosine_NN = lapclip.load(name).images(images) @ teacher_text_NE.T
        return float((cosine_NN > np.diag(cosine_NN)[:, None]).mean())

    assert lapclip.load("taught").width == teacher.width == 40
    assert rank("taught") < 0.3 < rank("alone") - 0.1
    assert call("train", "--resume", "taught", "--steps", "50").returncode == 0
    assert rank("taught") < 0.3


def test_each_pair_of_a_batch_has_its_own_embeddings_of_the_teacher(teacher):
    picture_folder(Path("photos"), 30)
    config = load_config(flags={"source": "photos", "teacher": "teacher", "crop": 1.0})
    config, taught = finished(find_teacher(config))
    assert config.model.embedding == 40
    data = opened("photos", image_size=48)
    draw = {"batch_size": 8, "seed": 0, "first_step": 0, "workers": 0}
    batch = next(feed(data.training, teacher.tokenizer, teacher.model.size, config.data, **draw))
    image_BE, text_BE = taught.rows(batch)
    images = [data.training.image(index, 48) for index in batch.indices.tolist()]
    np.testing.assert_allclose(image_BE, teacher.images(images), atol=2e-3)  # half precision
    np.testing.assert_allclose(text_BE, teacher.texts(batch.captions), atol=2e-3)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--teacher", "teacher", "--from", "teacher"], "does not need a teacher"),
        (["--teacher", "teacher", "--embedding", "64"], "have 40 numbers, not 64"),
        (["--teacher", "techer"], "did you mean `teacher`"),
    ],
)
def test_what_a_teacher_cannot_be_combined_with_is_refused(teacher, call, flags, problem):
    picture_folder(Path("photos"), 20)
    ran = call("train", "photos", *flags)
    assert ran.returncode == 1 and problem in ran.stderr, ran.stderr


def test_a_run_of_a_stranger_does_not_choose_the_teacher(teacher, call):
    picture_folder(Path("photos"), 20)
    flags = ["--teacher", "teacher", "--size", "nano", "--batch-size", "8"]
    assert call("train", "photos", "--run", "mine", "--steps", "2", *flags).returncode == 0
    file = Path("runs/mine/config.toml")
    file.write_text(file.read_text().replace('teacher = "teacher"', 'teacher = "hf-hub:somebody/else"'))
    for source in ((), ("photos",)):
        ran = call("train", "--resume", "mine", *source, "--steps", "4")
        assert ran.returncode == 1 and "--teacher TEACHER" in ran.stderr, ran.stderr
    named = call("train", "--resume", "mine", "photos", "--teacher", "teacher", "--steps", "4")
    assert named.returncode == 0, named.stderr
