"""CLIP: two towers, two projections, one learned temperature, and the table of sizes.

Shapes: B pairs, T tokens, K patches kept, D width, E embedding.
"""

import math
from dataclasses import replace

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapclip.config import MAX_SCALE, SHAPE, ModelConfig
from lapclip.errors import UserError, shortened
from lapclip.model.blocks import Shape
from lapclip.model.encoders import Encoder
from lapclip.model.lora import add_adapters, merge_adapters
from lapclip.model.resnet import GROUP, resnet_flops
from lapclip.model.towers import ImageTower, Projection, Size, TextTower, TokenMean, Transformer, as_is


def openai(image: Shape, text: Shape, patch_size: int, embedding: int) -> Size:
    """As OpenAI's models are."""
    size = Size(image, text, 224, patch_size, 77, embedding, "quick_gelu")
    return replace(size, pre_norm=True, patch_bias=False, projection_bias=False)


def resnet(widths: list[int], text_width: int, image_size: int, text_length: int, embedding: int) -> Size:
    """A residual network and the mean of token embeddings; an image has one feature per channel of the last stage."""
    shapes = Shape(widths[-1], 1, 1), Shape(text_width, 1, 1)
    size = Size(*shapes, image_size, 2 ** len(widths), text_length, embedding)
    return replace(size, image_encoder=Encoder("resnet", {"widths": widths}), token_mean=True)


# All the sizes there are. `small` and `base` count 76,736,001 and 105,426,689 parameters with 33 symbols.
SIZES = {
    "nano": Size(Shape(128, 3, 4), Shape(128, 2, 4), 32, 8, 32, 128),
    "tiny": Size(Shape(160, 3, 5), Shape(128, 2, 4), 64, 8, 48, 128),
    "resnet-tiny": resnet([32, 64, 128, 256], 128, 64, 48, 128),
    "small": Size(Shape(512, 12, 8), Shape(512, 12, 8), 224, 16, 77, 512),
    "base": Size(Shape(768, 12, 12), Shape(512, 6, 8), 224, 16, 77, 512),
    "medium": Size(Shape(1024, 12, 16), Shape(640, 10, 10), 224, 16, 77, 640),
    "large": Size(Shape(1280, 20, 20), Shape(768, 12, 12), 224, 16, 77, 768),
    "huge": Size(Shape(1536, 28, 24), Shape(1024, 16, 16), 224, 14, 77, 1024),
    "vit-b-32": openai(Shape(768, 12, 12), Shape(512, 12, 8), 32, 512),
    "vit-b-16": openai(Shape(768, 12, 12), Shape(512, 12, 8), 16, 512),
    "vit-l-14": openai(Shape(1024, 24, 16), Shape(768, 12, 12), 14, 768),
}


class CLIP(nn.Module):
    """Images and captions as embeddings of unit length in one space."""

    def __init__(
        self,
        size: Size,
        *,
        vocab_size: int,
        has_bias: bool = False,
        scale: float = 1 / 0.07,
        towers: tuple[nn.Module, nn.Module] | None = None,  # trained ones
    ):
        super().__init__()
        self.size, self.vocab_size = size, vocab_size
        self.image, self.text = towers or new_towers(size, vocab_size)
        is_direct = size.siglip and size.head is None
        self.project_image = nn.Identity() if is_direct else projection(size, size.image.width)
        self.project_text = projection(size, size.text.width)
        # Of shape [1]: FSDP2 refuses scalars.
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale)]))
        # For the sigmoid loss only, arXiv 2303.15343.
        self.bias = nn.Parameter(torch.tensor([-10.0])) if has_bias else None
        for module in (self.project_image, self.project_text) if towers else (self,):
            module.apply(initialise)
        for tower, width in ((self.image, size.image.width), (self.text, size.text.width)):
            if towers or not isinstance(tower, ImageTower | TextTower):
                continue
            nn.init.normal_(tower.positions, std=0.02)
            # Keeps the sum over all blocks at the size of one: the initialisation of arXiv 2103.00020.
            spread = width**-0.5 * (2 * len(tower.transformer.blocks)) ** -0.5
            for name, weight in tower.transformer.named_parameters():
                if name.endswith(("attention.out.weight", "mlp.down.weight")):
                    nn.init.normal_(weight, std=spread)
        for module in self.modules():
            if isinstance(module, Projection):
                nn.init.zeros_(module.down.weight)
        if size.lora_rank:
            add_adapters(self, size.lora_rank)
        for name, vector in () if towers else self.image.named_parameters():
            if name in ("class_token", "pool.query"):
                nn.init.normal_(vector, std=0.02)

    def forward(
        self,
        images: Tensor,
        tokens_BT: Tensor,
        ends_B: Tensor,
        keep_BK: Tensor | None = None,
        drop: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Tensor, Tensor]:
        """The embeddings of both sides of a batch of pairs."""
        return self.embed_images(images, keep_BK, drop[0]), self.embed_texts(tokens_BT, ends_B, drop[1])

    def embed_images(
        self, images: Tensor, keep_BK: Tensor | None = None, drop_BD: Tensor | None = None
    ) -> Tensor:
        """Also of features [B, D], the image tower's output computed before; `drop_BD` are factors of features."""
        features_BD = images if images.ndim == 2 else as_is(self.image)(images, keep_BK)
        features_BD = features_BD if drop_BD is None else features_BD * drop_BD
        # In float32: under float16 the sum of squares of a wide vector can overflow.
        return F.normalize(self.project_image(features_BD).float(), dim=-1)

    def embed_texts(self, tokens_BT: Tensor, ends_B: Tensor, drop_BD: Tensor | None = None) -> Tensor:
        """Also of features [B, D], the text tower's output computed before; of several captions each, [B, N, E]."""
        if tokens_BT.ndim == 3:
            drop_BD = None if drop_BD is None else drop_BD.flatten(0, 1)
            text_BE = self.embed_texts(tokens_BT.flatten(0, 1), ends_B.flatten(), drop_BD)
            return text_BE.unflatten(0, ends_B.shape)
        features_BD = tokens_BT if tokens_BT.is_floating_point() else as_is(self.text)(tokens_BT, ends_B)
        features_BD = features_BD if drop_BD is None else features_BD * drop_BD
        return F.normalize(self.project_text(features_BD).float(), dim=-1)

    def scale(self) -> Tensor:
        """How much a difference of cosines counts: 1 / temperature."""
        return self.log_scale.exp()

    def limit_scale(self) -> None:
        """Keeps the scale within its limits, to be called after each update: from there it can still come back."""
        with torch.no_grad():
            self.log_scale.clamp_(0.0, math.log(MAX_SCALE))

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def chunk_multiple(self) -> int:
        """A chunk holds a multiple of so many pairs: images that are normalised together."""
        return GROUP if self.size.image_encoder and self.size.image_encoder.kind == "resnet" else 1

    @property
    def num_trained(self) -> int:
        """Parameters that are not frozen."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def merge_adapters(self) -> None:
        merge_adapters(self)
        self.size = replace(self.size, lora_rank=0)

    def use_recompute(self, enabled: bool) -> None:
        """Whether activations are computed again in the backward pass instead of kept: less memory, more work."""
        for module in self.modules():
            if isinstance(module, Transformer):
                module.recompute = enabled

    def prepare_for(self, *, few_shapes: bool, compile: bool) -> None:
        """Leaves padding out, except where a program is made for each shape; may have torch compile both towers.

        They are compiled when they first run; the blocks of a transformer share one program.
        """
        for tower in (self.image, self.text):
            modules = [tower]
            if isinstance(tower, ImageTower | TextTower):
                tower.transformer.packs = not few_shapes
                modules = list(tower.transformer.blocks)
            for module in modules if compile else ():
                module.compile(dynamic=False)


def new_towers(size: Size, vocab_size: int) -> tuple[nn.Module, nn.Module]:
    image = size.image_encoder.build() if size.image_encoder else ImageTower(size)
    if size.text_encoder:
        return image, size.text_encoder.build()
    return image, (TokenMean if size.token_mean else TextTower)(size, vocab_size=vocab_size)


def projection(size: Size, width: int) -> nn.Module:
    if size.head is not None:
        return Projection(width, size.embedding, size.head)
    return nn.Linear(width, size.embedding, bias=size.projection_bias)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def shape_of(config: ModelConfig) -> Size:
    """The named size or the shape of a pretrained model, with whatever the config overrides."""
    try:
        size = msgspec.json.decode(config.shape, type=Size) if config.shape else SIZES[config.size]
    except msgspec.MsgspecError as error:
        what = f"`model.shape` is not the shape of a model: {shortened(str(error))}"
        raise UserError(what, hint="copy the whole run folder again") from None
    if size.image_encoder and config.patch_size not in (None, size.patch_size):
        raise UserError(f"the image tower of `{config.size}` has no patches", hint="omit `--patch-size`")
    size = replace(size, **{name: value for name in SHAPE if (value := getattr(config, name))})
    if size.image_size % size.patch_size:
        patch = f"{'stride' if size.image_encoder else 'patch size'} {size.patch_size}"
        what = f"an image size of {size.image_size} is not a multiple of the {patch}"
        raise UserError(what, hint=f"choose a multiple of {size.patch_size} as `--image-size`")
    return size


def build_model(config: ModelConfig, *, vocab_size: int, has_bias: bool, seed: int = 0) -> CLIP:
    """A new model, the same for the same seed; the caller's random numbers are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIP(shape_of(config), vocab_size=vocab_size, has_bias=has_bias)
    model.use_recompute(config.recompute)
    return model


def count_parameters(size: Size, *, vocab_size: int, has_bias: bool) -> int:
    """What `CLIP(...).num_parameters` would say, without building it."""
    if size.head or size.image_encoder or size.text_encoder or size.token_mean or size.lora_rank:
        with torch.device("meta"):
            return CLIP(size, vocab_size=vocab_size, has_bias=has_bias).num_parameters
    image, text, siglip = size.image.width, size.text.width, size.siglip
    patches = 3 * size.patch_size**2 * image + (image if size.patch_bias else 0)
    positions = (size.num_patches + (not siglip)) * image + size.text_length * text
    projections = (text + (0 if siglip else image)) * size.embedding
    projections += (1 if siglip else 2) * size.embedding if size.projection_bias else 0
    blocks = sum(s.depth * block_parameters(s) + 2 * s.width for s in (size.image, size.text))
    norm = 2 * image if size.pre_norm else 0
    pool = block_parameters(size.image) - 2 * image if siglip else 0  # with one norm less
    return patches + image + positions + vocab_size * text + norm + blocks + pool + projections + 1 + has_bias


def block_parameters(shape: Shape) -> int:
    return 4 * shape.width**2 + 9 * shape.width + 2 * shape.width * shape.mlp_width + shape.mlp_width


def flops_per_pair(size: Size, *, num_tokens: int, num_patches: int | None = None) -> int:
    """Floating-point operations of the matrix products in a forward pass of one pair; training takes three times that.

    A product of [m, k] by [k, n] counts 2mkn. The last block works at one place only, so it counts as it is run.
    """
    projections = 2 * size.embedding * (size.image.width + size.text.width)
    if (own := size.image_encoder) and own.kind == "resnet":
        return resnet_flops(own.numbers["widths"], size.image_size) + projections
    kept = num_patches or size.num_patches
    patches = 2 * kept * 3 * size.patch_size**2 * size.image.width
    towers = transformer_flops(size.image, kept + 1) + transformer_flops(size.text, num_tokens)
    return patches + projections + towers


def transformer_flops(shape: Shape, num_tokens: int) -> int:
    T, D, mlp = num_tokens, shape.width, 4 * shape.width * shape.mlp_width
    block = 8 * T * D**2 + T * mlp + 4 * T**2 * D  # qkv 6, out 2; scores and their sum 2 each
    last = 4 * T * D**2 + 4 * D**2 + mlp + 4 * T * D  # keys and values of all, the rest at one place
    return (shape.depth - 1) * block + last
