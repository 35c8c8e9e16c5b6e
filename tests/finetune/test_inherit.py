"""A smaller model that starts from the weights of a larger one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import picture_folder

import lapclip
from lapclip.errors import UserError
from lapclip.finetune.inherit import inherit
from lapclip.model.blocks import Shape
from lapclip.model.clip import CLIP, SIZES
from lapclip.model.encoders import Encoder
from lapclip.model.towers import Head, Size

# Heads are 8 wide.
LARGE = Size(Shape(32, 5, 4), Shape(24, 4, 3), 32, 8, 24, 20, "quick_gelu", pre_norm=True, patch_bias=False)
SMALL = Size(Shape(16, 3, 2), Shape(16, 2, 2), 16, 4, 16, 12)


def model_of(size: Size = LARGE, **settings) -> CLIP:
    """A model none of whose weights is as at the start of a training."""
    torch.manual_seed(1)
    model = CLIP(size, vocab_size=50, **settings).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def embeddings(model: CLIP) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    side = model.size.image_size
    images = torch.randint(0, 256, (6, 3, side, side), dtype=torch.uint8, generator=random)
    tokens = torch.randint(0, 50, (6, 10), generator=random)
    with torch.inference_mode():
        return list(model(images, tokens, torch.full((6,), 9)))


@pytest.mark.parametrize("size", [LARGE, replace(LARGE, siglip=True, embedding=32, pre_norm=False)])
def test_the_same_size_computes_the_same(size):
    large = model_of(size, has_bias=True)
    small = inherit(large, replace(size, activation="gelu", pre_norm=False, siglip=False, patch_bias=True))
    assert small.size == size, "all but the shapes is the large model's"
    for ours, theirs in zip(embeddings(small), embeddings(large), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(small.scale(), large.scale()) and torch.equal(small.bias, large.bias)
    small.log_scale.data += 1
    assert not torch.equal(small.scale(), large.scale()), "they share no memory"


def test_a_smaller_siglip_embeds_both_sides_alike():
    large = model_of(replace(LARGE, siglip=True, embedding=32, pre_norm=False))
    small = inherit(large, replace(SMALL, text_length=10))
    images, texts = embeddings(small)
    assert images.shape == texts.shape == (6, SMALL.image.width), "images have no projection"


@pytest.mark.parametrize(("depth", "kept"), [(3, [0, 2, 4]), (2, [0, 4]), (1, [4]), (4, [0, 1, 3, 4])])
def test_blocks_come_from_all_over_the_large_tower(depth, kept):
    large = model_of()
    small = inherit(large, replace(LARGE, image=Shape(32, depth, 4)))
    for ours, number in zip(small.image.transformer.blocks, kept, strict=True):
        theirs = large.image.transformer.blocks[number].state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


def test_whole_heads_of_queries_keys_and_values_are_kept():
    large = model_of()
    small = inherit(large, SMALL)
    theirs, ours = (model.text.transformer.blocks[0].attention for model in (large, small))
    second = slice(8, 16)  # the rows of the second head
    for q_k_or_v in range(3):
        weight = theirs.qkv.weight.view(3, 24, 24)[q_k_or_v]
        assert torch.equal(ours.qkv.weight.view(3, 16, 16)[q_k_or_v, second], weight[second, :16])
        assert torch.equal(ours.qkv.bias.view(3, 16)[q_k_or_v], theirs.qkv.bias.view(3, 24)[q_k_or_v, :16])
    assert torch.equal(ours.out.weight[:, second], theirs.out.weight[:16, second])
    assert torch.equal(small.text.embed.weight, large.text.embed.weight[:, :16])
    assert torch.equal(small.project_text.weight, large.project_text.weight[:12, :16])


@pytest.mark.parametrize("patch_size", [4, 16])
def test_another_patch_size_sees_a_plain_image_as_before(patch_size):
    large = model_of()
    weight = large.image.embed.weight.data
    weight.view(32, 3, 8, 8)[:] = torch.randn(32, 3, 1, 1) + torch.linspace(-1, 1, 8)  # a smooth kernel
    small = inherit(large, replace(LARGE, patch_size=patch_size))
    plain = torch.tensor([0.5, -1.0, 2.0])
    before, after = (
        model.image.embed(plain.repeat_interleave(model.size.patch_size**2)) for model in (large, small)
    )
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-2)


def test_positions_keep_their_place_in_another_grid():
    large = model_of()
    rows = torch.arange(4.0).repeat_interleave(4)  # the row of each patch
    large.image.positions.data[1:] = rows[:, None]
    small = inherit(large, replace(LARGE, image_size=64))
    assert torch.equal(small.image.positions[0], large.image.positions[0]), "of the class token"
    grid = small.image.positions[1:, 0].view(8, 8)
    assert torch.equal(grid, grid[:, :1].expand(8, 8)) and (grid[:, 0].diff() >= 0).all()
    assert grid[0, 0] == 0 and grid[-1, 0] == 3


@pytest.mark.parametrize(
    ("large", "small", "said"),
    [
        (LARGE, replace(SMALL, image=Shape(64, 3, 4)), "width of the image tower is 64, but only 32"),
        (LARGE, replace(SMALL, text=Shape(16, 6, 2)), "depth of the text tower is 6, but only 4"),
        (LARGE, replace(SMALL, text_length=25), "text length is 25, but only 24"),
        (LARGE, replace(SMALL, embedding=21), "width of the embedding is 21, but only 20"),
        (LARGE, SIZES["resnet-tiny"], "residual network cannot start"),
        (replace(LARGE, head=Head(8)), SMALL, "trained heads"),
        (replace(LARGE, lora_rank=2), SMALL, "adapters"),
        (
            replace(LARGE, image=Shape(32, 1, 1), image_encoder=Encoder("efficientnet-lite", {"stem": 4, "blocks": [[4, 4, 4, 3, 1]], "width": 16})),
            SMALL,
            "other towers than transformers",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_inherited_is_refused(large, small, said):
    with pytest.raises(UserError, match=said):
        inherit(model_of(large), small)


@pytest.mark.slow
def test_a_small_model_inherits_from_a_run_trains_resumes_and_searches(call):
    picture_folder(Path("photos"), 40)
    flags = ["--batch-size", "16", "--no-compile", "--threads", "1", "--eval-every", "4"]
    assert call("train", "photos", "--size", "tiny", "--steps", "3", "--run", "big", *flags).returncode == 0
    inherited = ["train", "photos", "--from", "big", "--size"]
    ran = call(*inherited, "nano", "--run", "mine", "--steps", "4", *flags)
    assert ran.returncode == 0, ran.stderr
    big, mine = lapclip.load("big"), lapclip.load("mine")
    assert replace(mine.model.size, vocabulary=None) == SIZES["nano"]
    assert mine.tokenizer.to_json() == big.tokenizer.to_json()
    start = lapclip.load("runs/mine/checkpoints/step-000000").model.state_dict()
    expected = inherit(big.model, SIZES["nano"]).state_dict()
    assert all(torch.equal(start[name], expected[name]) for name in expected)
    trained = mine.model.state_dict()
    assert not any(torch.equal(start[name], trained[name]) for name in start), "all is trained"
    config = Path("runs/mine/config.toml").read_text()
    assert "lr = 0.001" in config and "tune =" not in config, "the recipe of `nano`"
    (listed,) = [run for run in json.loads(call("runs", "--json").stdout)["runs"] if run["name"] == "mine"]
    assert listed["state"] == "finished" and Path("runs/mine/report.html").exists()

    again = call("train", "--config", "runs/mine/config.toml", "--run", "again")
    assert again.returncode == 0, again.stderr
    repeated = lapclip.load("again").model.state_dict()
    assert all(torch.equal(trained[name], repeated[name]) for name in trained), (
        "`config.toml` repeats the run"
    )
    resumed = call("train", "--resume", "mine", "--steps", "6")
    assert resumed.returncode == 0 and "step 6" in resumed.stderr, resumed.stderr
    assert call("index", "photos", "--model", "mine").returncode == 0
    assert call("search", "red cat").returncode == 0

    for wrong, said in (
        (["nano", "--tune", "full"], "all of which is trained"),
        (["nano", "--loss", "sigmoid"], "the pretrained model determines `--loss`"),
        (["small"], "width of the image tower is 512, but only 160"),
    ):
        refused = call(*inherited, *wrong)
        assert refused.returncode == 1 and said in " ".join(refused.stderr.split()), refused.stderr
