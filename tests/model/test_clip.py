"""Towers and CLIP: exact counts, agreement with transformers, and shortcuts that change nothing."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lapclip.config import ModelConfig
from lapclip.errors import UserError
from lapclip.model import blocks
from lapclip.model.clip import CLIP, SIZES, build_model, count_parameters, flops_per_pair, shape_of
from lapclip.model.encoders import Encoder
from lapclip.model.towers import PIXEL_MEAN, PIXEL_STD, Shape


def count(name: str, *, vocab_size: int = 33, has_bias: bool = False) -> int:
    return count_parameters(SIZES[name], vocab_size=vocab_size, has_bias=has_bias)


@pytest.mark.parametrize("name", SIZES)
def test_counting_without_building_agrees_with_building(name):
    with torch.device("meta"):
        built = CLIP(SIZES[name], vocab_size=123, has_bias=True).num_parameters
    assert count(name, vocab_size=123, has_bias=True) == built == 1 + count(name, vocab_size=123)


def test_sizes_have_the_documented_parameter_counts():
    assert (count("small"), count("base")) == (76_736_001, 105_426_689)
    # As published, with the 49,408 tokens of OpenAI's BPE.
    published = {"vit-b-32": 151_277_313, "vit-b-16": 149_620_737, "vit-l-14": 427_616_513}
    assert {name: count(name, vocab_size=49408) for name in published} == published
    about = {"nano": (1e6, 2e6), "tiny": (1.4e6, 1e7), "resnet-tiny": (1.2e6, 1e7), "medium": (1.7e8, 2.3e8), "large": (4.5e8, 5.5e8), "huge": (9e8, 1.1e9)}  # fmt: skip
    assert all(low < count(name, vocab_size=600) < high for name, (low, high) in about.items())


def small_model() -> CLIP:
    image, text = Shape(48, 3, 3), Shape(32, 3, 2)
    size = replace(SIZES["nano"], image=image, text=text, image_size=32, text_length=16, embedding=24)
    torch.manual_seed(0)
    model = CLIP(size, vocab_size=50)
    for parameter in model.parameters():  # biases and gains start at 0 and 1 and would hide a missing term
        if parameter.ndim == 1 and parameter.numel() > 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def some_inputs(num_pairs: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (num_pairs, 3, 32, 32), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(4, 50, (num_pairs, 12), generator=generator)
    ends = torch.randint(3, 12, (num_pairs,), generator=generator)
    return images, tokens, ends


def test_a_caption_is_read_to_its_end_in_order_and_no_further():
    model, (_, tokens, ends) = small_model(), some_inputs()
    longer = torch.cat([tokens, torch.zeros(5, 4, dtype=torch.long)], dim=1)
    for row, end in enumerate(ends):
        longer[row, end + 1 :] = 7
    torch.testing.assert_close(model.embed_texts(longer, ends), model.embed_texts(tokens, ends))
    ends[:] = 11
    first, swapped = tokens.clone(), tokens.clone()
    first[:, 0] = (first[:, 0] + 1) % 50
    swapped[:, [2, 3]] = tokens[:, [3, 2]]
    for other in (first, swapped):
        changed = (model.embed_texts(other, ends) - model.embed_texts(tokens, ends)).abs().amax(dim=1)
        assert (changed[(other != tokens).any(dim=1)] > 1e-4).all()


@pytest.mark.parametrize("tower", ["image", "text"])
def test_the_last_block_worked_at_one_place_equals_the_whole_block(tower):
    transformer = getattr(small_model(), tower).transformer
    x = torch.randn(4, 9, transformer.norm.normalized_shape[0])
    at = torch.tensor([0, 3, 8, 5])
    causal = tower == "text"
    mask = torch.ones(9, 9, dtype=torch.bool).tril() if causal else None
    whole = x
    for block in transformer.blocks:
        whole = block(whole, mask)
    expected = transformer.norm(whole)[torch.arange(4), at]
    torch.testing.assert_close(transformer(x, at, causal=causal), expected)


def test_leaving_padding_out_changes_no_gradient():
    found = []
    for few_shapes in (True, False):
        model = small_model()
        model.prepare_for(few_shapes=few_shapes, compile=False)
        _, tokens, ends = some_inputs()
        tokens = torch.cat([tokens, torch.zeros(5, 4, dtype=torch.long)], dim=1)
        rows = []
        model.text.transformer.blocks[0].mlp.register_forward_hook(lambda _, x, y, rows=rows: rows.append(y))
        embedded = model.embed_texts(tokens, ends)
        (embedded * torch.linspace(-1, 1, embedded.numel()).view_as(embedded)).sum().backward()
        found.append((embedded, [p.grad for p in model.text.parameters()]))
        num_tokens = tokens.numel() if few_shapes else int((ends + 1).sum())
        assert rows[0].numel() == num_tokens * rows[0].shape[-1]
    torch.testing.assert_close(found[0], found[1])


def test_bytes_are_normalised_as_every_clip_does():
    model, (images, _, _) = small_model(), some_inputs()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    torch.testing.assert_close(model.embed_images(images), model.embed_images((images / 255 - mean) / std))


def test_looking_at_all_patches_equals_looking_at_the_image():
    model, (images, _, _) = small_model(), some_inputs()
    everything = torch.arange(16).expand(5, -1)
    torch.testing.assert_close(model.embed_images(images, everything), model.embed_images(images))
    # What was not looked at does not matter; the top left patch is number 0.
    changed = images.clone()
    changed[:, :, :8, :8] = 0
    rest = everything[:, 1:]
    torch.testing.assert_close(model.embed_images(changed, rest), model.embed_images(images, rest))


@pytest.mark.skipif(blocks.ONEDNN is None, reason="this CPU has no AVX-512")
@pytest.mark.parametrize("is_zen5", [False, True])
def test_onednn_changes_no_gradient(monkeypatch, is_zen5):
    gradients = []
    monkeypatch.setattr(blocks, "IS_ZEN5", is_zen5)
    for has_onednn in (blocks.has_onednn, lambda x: False):
        monkeypatch.setattr(blocks, "has_onednn", has_onednn)
        model = small_model()
        image, text = model(*some_inputs())
        (image * text).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


def test_recomputing_changes_no_gradient():
    gradients = []
    for enabled in (False, True):
        model = small_model()
        model.use_recompute(enabled)
        image, text = model(*some_inputs())
        (image * text).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize(("name", "num_tokens"), [("nano", 8), ("tiny", 24), ("resnet-tiny", 24)])
def test_flops_are_what_torch_counts(name, num_tokens):
    size = SIZES[name]
    model = CLIP(size, vocab_size=40)
    images = torch.zeros(1, 3, size.image_size, size.image_size, dtype=torch.uint8)
    tokens, ends = torch.zeros(1, num_tokens, dtype=torch.long), torch.tensor([num_tokens - 1])
    # The plain kernel, because the counter does not see into the fused one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(images, tokens, ends)
    assert flops_per_pair(size, num_tokens=num_tokens) == counter.get_total_flops()


def test_a_residual_network_embeds_an_image_alike_alone_and_among_others_once_it_is_trained():
    torch.manual_seed(0)
    model, (images, tokens, ends) = CLIP(SIZES["resnet-tiny"], vocab_size=50), some_inputs(40)
    before = model.image.norm.running_mean.clone()
    with torch.no_grad():  # the first pass of a step in chunks
        model(images, tokens, ends)
    assert torch.equal(model.image.norm.running_mean, before), "statistics are updated once per step"
    model(images, tokens, ends)
    assert not torch.equal(model.image.norm.running_mean, before)
    with torch.inference_mode():
        together, alone = model.embed_images(images), model.embed_images(images[:1])
    torch.testing.assert_close(together[:1], alone)


def test_the_mean_of_token_embeddings_ends_with_the_caption():
    torch.manual_seed(0)
    model, (_, tokens, ends) = CLIP(SIZES["resnet-tiny"], vocab_size=50), some_inputs()
    longer = torch.cat([tokens, torch.full((5, 4), 7)], dim=1)
    torch.testing.assert_close(model.embed_texts(longer, ends), model.embed_texts(tokens, ends))
    shorter = model.embed_texts(tokens, ends - 1)
    assert (shorter - model.embed_texts(tokens, ends)).abs().max() > 1e-3


def test_a_setting_of_patches_is_refused_for_a_model_without_any():
    with pytest.raises(UserError, match="no patches"):
        shape_of(ModelConfig(size="resnet-tiny", patch_size=8))


@pytest.mark.parametrize("widths", [[], [-4], ["a"], None])
def test_a_network_that_cannot_be_built_is_refused_in_words(widths):
    with pytest.raises(UserError, match="cannot be built"):
        CLIP(replace(SIZES["resnet-tiny"], image_encoder=Encoder("resnet", {"widths": widths})), vocab_size=9)


def test_the_seed_decides_the_weights_and_nothing_else_does():
    config = ModelConfig(size="nano")
    one = build_model(config, vocab_size=40, has_bias=False, seed=3)
    torch.rand(7)
    state = torch.get_rng_state()
    same = build_model(config, vocab_size=40, has_bias=False, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    other = build_model(config, vocab_size=40, has_bias=False, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.image.embed.weight, other.image.embed.weight)


def test_an_impossible_patch_size_is_refused():
    with pytest.raises(UserError, match="is not a multiple of the patch size"):
        shape_of(ModelConfig(size="tiny", image_size=60))


def test_the_scale_has_a_limit():
    model = small_model()
    for beyond, limit in ((50.0, 100.0), (-3.0, 1.0)):
        model.log_scale.data.fill_(beyond)
        model.limit_scale()
        assert model.scale().item() == pytest.approx(limit)
        model.scale().backward()
        assert model.log_scale.grad.item() != 0, "from the limit it can come back"
        model.log_scale.grad = None
    assert model.log_scale.shape == (1,)
