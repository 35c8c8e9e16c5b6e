"""What fine-tuning forgets, and the models between the pretrained and the trained one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, as_flags, picture_folder
from made_events import RECALL, evaluated, started
from rich.console import Console

import lapclip
from lapclip.config import TrainConfig
from lapclip.data.images import squares
from lapclip.data.tokenizer import train_bpe
from lapclip.embedder import Embedder
from lapclip.evaluate.interpolation import ALPHAS, choose
from lapclip.machine.device import processor
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP, shape_of
from lapclip.model.towers import Size
from lapclip.runs.events import Evaluated, Interpolated
from lapclip.runs.history import mean_recall, summarize
from lapclip.runs.run import Run, open_run
from lapclip.step.loss import softmax_loss
from lapclip.step.optim import build_optimizer
from lapclip.units import percent
from lapclip.view.terminal import View
from lapclip.weights.reading import load_between

SIZE = Size(Shape(24, 2, 2, 40), Shape(16, 2, 2), 16, 8, 16, 20)
RUN = [
    "--steps",
    "4",
    "--batch-size",
    "20",
    "--validation-share",
    "0.5",
    "--eval-every",
    "100",
    "--threads",
    "1",
]
TUNES = ("heads", "lora", "full")


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_thread) -> Path:
    """Two folders, and a model that knows their pairs by heart: what is trained further can only forget."""
    here = tmp_path_factory.mktemp("made")
    folders = picture_folder(here / "photos", 40), picture_folder(here / "others", 24, first=40)
    files = [path for folder in folders for path in sorted(folder.glob("*.jpg"))]
    captions = [path.with_suffix(".txt").read_text() for path in files]
    pixels = torch.from_numpy(np.stack(list(squares(files, 16))))
    torch.manual_seed(0)
    tokenizer = train_bpe(captions, 400)
    model = CLIP(SIZE, vocab_size=tokenizer.vocab_size)
    optimizer = build_optimizer(model, TrainConfig(lr=3e-3))
    tokens = [torch.from_numpy(part) for part in tokenizer.encode(captions, 16)]
    is_pair = torch.eye(len(captions), dtype=torch.bool)
    for _ in range(60):
        image_BE, text_BE = model(pixels, *tokens)
        softmax_loss(image_BE, text_BE, model.scale(), None, is_pair).backward()
        optimizer.step()
        optimizer.zero_grad()
    Embedder(model, tokenizer, processor(), name="base").save(here / "base")
    return here


@pytest.fixture
def trained(made, call):
    """Trains so fast that much is forgotten; what it prints as JSON, and what it says."""

    shutil.copytree(made, ".", dirs_exist_ok=True)

    def train(*flags: str) -> tuple[dict, str]:
        ran = call("train", "photos", "--from", "base", "--run", "mine", *RUN, *flags, "--json")
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout), " ".join(ran.stderr.split())

    return train


def recalls(found: dict) -> list[float]:
    return [found[way][f"recall@{k}"] for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)]


@pytest.mark.parametrize("tune", TUNES)
def test_recall_before_is_what_eval_says_of_the_pretrained_model(trained, call, tune):
    told, said = trained("--tune", tune, "--lr", "0.3", "--general", "others")
    expected = json.loads(call("eval", "base", "others", "--json").stdout)
    general, swept = told["general"], told["interpolated"]
    noise = 1.01 / 24 if tune == "heads" else 0  # whose features are in half precision
    assert general["before"]["num_images"] == 24 and general["source"] == str(Path("others").absolute())
    assert recalls(general["before"]) == pytest.approx(recalls(expected), abs=noise)
    assert mean_recall(expected) > 0.8 and mean_recall(swept["general"][-1]) < mean_recall(expected) - 0.1
    place = swept["alphas"].index(swept["chosen"])
    assert general["now"] == swept["general"][place] and told["recall"] == swept["recall"][place]
    before, now = (percent(general[when]["text_to_image"]["recall@10"]) for when in ("before", "now"))
    assert f"(general): {before} before, {now} now" in said


@pytest.mark.parametrize("tune", TUNES)
def test_the_best_mean_of_both_models_is_what_is_loaded(trained, call, tune):
    told, said = trained("--tune", tune, "--lr", "0.3", "--general", "others")
    swept, run = told["interpolated"], open_run("mine")
    first, last = [event for event in run.events() if isinstance(event, Evaluated)]
    assert (swept["recall"][0], swept["general"][0]) == (first.recall, first.general), "the pretrained model"
    assert (swept["recall"][-1], swept["general"][-1]) == (last.recall, last.general), "the trained model"
    assert swept["chosen"] < 1 and f"`best` is {swept['chosen']:g} of the way" in said
    assert swept["chosen"] == ALPHAS[int(np.argmax([mean_recall(one) for one in swept["recall"]]))]
    start, end = (lapclip.load(run.checkpoints / name) for name in ("step-000000", "step-000004"))
    before, after = start.model.state_dict(), end.model.state_dict()
    best = lapclip.load("mine").model.state_dict()
    assert all(
        tensor.equal(torch.lerp(before[name], after[name], swept["chosen"])) for name, tensor in best.items()
    )
    size = shape_of(run.load_config().model)
    for alpha in ALPHAS:
        model = CLIP(size, vocab_size=start.tokenizer.vocab_size)
        load_between(run.checkpoints / "step-000000", run.checkpoints / "step-000004", alpha, model)
        model.merge_adapters()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(
                tensor, torch.lerp(before[name], after[name], alpha), atol=1e-5, rtol=1e-4
            )
    evaluated = json.loads(call("eval", "mine", "--json").stdout)
    noise = 1.01 / evaluated["num_images"] if tune == "heads" else 0
    assert recalls(evaluated) == pytest.approx(recalls(told["recall"]), abs=noise)


@pytest.mark.parametrize("tune", ["heads", "lora"])
def test_a_run_resumes_from_its_trained_weights(trained, call, tune):
    before, _ = trained("--tune", tune, "--lr", "0.3", "--general", "others")
    assert before["interpolated"]["chosen"] < 1 and "alpha" in before["checkpoint"]
    plain = Path(
        shutil.copytree("runs/mine", "runs/plain"), "checkpoints"
    )  # as if nothing had been interpolated
    shutil.rmtree(plain / Path(before["checkpoint"]).name)
    (plain / "best").write_text("step-000004")
    (plain / "start").unlink()
    ends = {}
    for name in ("mine", "plain"):
        ran = call("train", "--resume", name, "--steps", "6", "--json")
        assert ran.returncode == 0, ran.stderr
        after = json.loads(ran.stdout)
        ends[name] = Path(after["checkpoint"]).name
        assert (after["interpolated"] is not None) == (name == "mine")
        assert after["general"]["before"] == before["general"]["before"]
    files = ("model.safetensors", "state/optimizer.safetensors")
    for file in files:
        one, other = (Path("runs", name, "checkpoints/step-000006", file) for name in ("mine", "plain"))
        assert one.read_bytes() == other.read_bytes()
    kept = {path.name for path in Path("runs/mine/checkpoints").glob("step-*")}
    assert {"step-000000", "step-000006"} <= kept
    assert {name for name in kept if "alpha" in name} <= {ends["mine"]}, (
        "an interpolated one only as the best"
    )


def test_views_show_what_is_forgotten(trained, call):
    told, _ = trained("--lr", "0.3", "--general", "others")
    markdown = call("report", "mine", "--markdown").stdout
    assert "(general)" in markdown and "Between the pretrained and the trained model" in markdown
    (numbers,) = json.loads(call("report", "mine", "--json").stdout)["runs"]
    watched = json.loads(call("watch", "mine", "--json").stdout)
    for name in ("general", "interpolated"):
        assert numbers[name] == watched[name] == told[name]
    assert "(general)" in Path("runs/mine/report.html").read_text()
    view = call("watch", "mine", "--once").stdout
    assert "(general): 100% before, 100% now" in view and "`best` is 0 of the way" in view, view


def test_a_view_of_a_run_that_has_only_been_evaluated_before_its_first_step_is_drawn(capsys):
    run = Run(Path("runs/new"))
    run.path.mkdir(parents=True)
    for event in (started(), replace(evaluated(0), is_best=False, general=RECALL)):
        run.write(event)
    Console(width=80, height=24).print(View(summarize(run), is_live=False))
    assert "(general): 60.0% before, 60.0% now" in capsys.readouterr().out


def test_of_what_the_pretrained_model_was_trained_on_validation_images_are_measured(call):
    picture_folder(Path("photos"), 40)
    picture_folder(Path("others"), 40, first=40)
    flags = SMALL | {"source": "photos", "validation_share": 0.25, "steps": 2}
    assert call("train", *as_flags(flags), "--run", "first").returncode == 0
    expected = json.loads(call("eval", "first", "photos", "--json").stdout)["num_images"]
    ran = call("train", "others", "--from", "first", "--general", "photos", "--steps", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["general"]["before"]["num_images"] == expected < 20


def test_a_model_from_scratch_forgets_nothing(call):
    ran = call("train", "synthetic:200", "--general", "emoji", "--steps", "2")
    assert ran.returncode == 1 and "`--general` needs a pretrained model" in ran.stderr


def test_a_small_difference_leaves_the_trained_model():
    def found(share: float) -> dict:
        way = RECALL["text_to_image"] | {f"recall@{k}": share for k in (1, 5, 10)}
        return RECALL | {"text_to_image": way, "image_to_text": way}  # of 100 images

    assert choose([found(share) for share in (0.2, 0.505, 0.505, 0.5)]) == 3
    assert choose([found(share) for share in (0.2, 0.51, 0.51, 0.5)]) == 1, "of equal ones what forgets least"
    assert choose([found(share) for share in (0.5, 0.5)]) == 1


def test_a_line_that_does_not_fit_together_is_no_event():
    from lapclip.runs.events import from_line, to_line

    event = Interpolated(1, [0.0, 1.0], [RECALL] * 2, None, 1.0)
    assert from_line(to_line(event)) == event
    for damage in ({"chosen": 0.5}, {"recall": [RECALL]}, {"general": [RECALL, {}]}):
        assert from_line(to_line(replace(event, **damage))) is None


def test_validation_images_that_the_pretrained_model_was_trained_on_are_warned_of(made, call):
    shutil.copytree(made, ".", dirs_exist_ok=True)
    flags = [{"0.5": "{}"}.get(flag, flag) for flag in RUN]

    def warnings(name: str, base: str, share: str) -> tuple[list[str], str]:
        own = [flag.format(share) for flag in flags]
        done = call("train", "photos", "--from", base, "--run", name, "--tune", "full", *own)
        assert done.returncode == 0, done.stderr
        return [warned.kind for warned in summarize(open_run(name)).history.warnings], done.stderr

    assert "seen-before" not in warnings("first", "base", "0.2")[0]
    assert "seen-before" not in warnings("same", "first", "0.2")[0], "the same split"
    kinds, said = warnings("more", "same", "0.5")
    assert "seen-before" in kinds and "were training images of the model" in " ".join(said.split())
    expected = json.loads(call("eval", "first", "--json").stdout)["num_images"]
    done = call("eval", "more", "--json")
    assert json.loads(done.stdout)["num_images"] == expected, "only what no run before it was trained on"
    said = call("report", "more", "--markdown").stdout
    assert "| batch" in said and "| size |" not in said, "the shape is that of `base`"
