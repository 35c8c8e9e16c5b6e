"""The tensors of other programs' files under our names, as tables: read in one direction, written in the other."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lapclip.model.clip import Size

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Their name for each tensor of ours; `*` is weight and bias. Those of several names are concatenated to ours."""

    names: Mapping[str, str]
    towers: Mapping[str, str]  # where the blocks of our towers are
    block: Mapping[str, str]  # the names inside of a block
    transposed: tuple[str, ...] = ()  # of ours, stored as columns
    scalar: Shape = ()  # the shape of the logit scale

    def sources(self, size: Size) -> dict[str, list[str]]:
        """For each tensor that this layout has, and that a model of this size may have, their names."""
        rows = dict(self.names)
        for tower, prefix in self.towers.items():
            for number in range(getattr(size, tower).depth):
                for ours, theirs in self.block.items():
                    names = (f"{prefix}.{number}.{name}" for name in theirs.split())
                    rows[f"{tower}.transformer.blocks.{number}.{ours}"] = " ".join(names)
        return {
            ours.replace("*", kind): theirs.replace("*", kind).split()
            for ours, theirs in rows.items()
            for kind in (("weight", "bias") if "*" in ours else ("",))
        }

    def stored_shape(self, name: str, ours: Shape, num_parts: int = 1) -> Shape:
        """The shape in a file of each of the tensors that make up one of ours."""
        if not self.names:
            return ours
        if name in ("log_scale", "bias"):
            return self.scalar
        if name == "image.embed.weight":  # of a convolution, where ours is a matrix
            side = math.isqrt(ours[1] // 3)
            return (ours[0], 3, side, side)
        if name == "image.pool.query":
            return (1, 1, *ours)
        if name in self.transposed:
            return ours[::-1]
        return (ours[0] // num_parts, *ours[1:])

    def to_ours(self, name: str, parts: list[Tensor], shape: Shape) -> Tensor:
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (joined.T if name in self.transposed else joined).reshape(shape)

    def to_theirs(self, tensors: Mapping[str, Tensor], size: Size) -> dict[str, Tensor]:
        """A model's tensors under their names; KeyError for one that has no place in this layout."""
        sources, stored = self.sources(size), {}
        for name, tensor in tensors.items():
            for part, theirs in zip(tensor.chunk(len(sources[name])), sources[name], strict=True):
                shape = self.stored_shape(name, tuple(part.shape))
                stored[theirs] = (part.T if name in self.transposed else part).reshape(shape).contiguous()
        return stored


OURS = Layout({}, {}, {})
TRANSFORMERS_BLOCK = {
    "attention.qkv.*": "self_attn.q_proj.* self_attn.k_proj.* self_attn.v_proj.*",
    "attention.out.*": "self_attn.out_proj.*", "mlp.up.*": "mlp.fc1.*", "mlp.down.*": "mlp.fc2.*",
    "norm1.*": "layer_norm1.*", "norm2.*": "layer_norm2.*",
}  # fmt: skip
TRANSFORMERS = {
    "log_scale": "logit_scale",
    "image.embed.*": "vision_model.embeddings.patch_embedding.*",
    "image.positions": "vision_model.embeddings.position_embedding.weight",
    "image.transformer.norm.*": "vision_model.post_layernorm.*",
    "text.embed.weight": "text_model.embeddings.token_embedding.weight",
    "text.positions": "text_model.embeddings.position_embedding.weight",
    "text.transformer.norm.*": "text_model.final_layer_norm.*",
}
TRANSFORMERS_TOWERS = {"image": "vision_model.encoder.layers", "text": "text_model.encoder.layers"}
CLIP = Layout(
    TRANSFORMERS | {
        "image.class_token": "vision_model.embeddings.class_embedding",
        "image.pre_norm.*": "vision_model.pre_layrnorm.*",  # transformers' spelling
        "project_image.weight": "visual_projection.weight", "project_text.weight": "text_projection.weight",
    },
    TRANSFORMERS_TOWERS, TRANSFORMERS_BLOCK,
)  # fmt: skip
SIGLIP = Layout(
    TRANSFORMERS | {
        "bias": "logit_bias", "project_text.*": "text_model.head.*",
        "image.pool.query": "vision_model.head.probe", "image.pool.norm.*": "vision_model.head.layernorm.*",
        "image.pool.attention.qkv.*": "vision_model.head.attention.in_proj_*",
        "image.pool.attention.out.*": "vision_model.head.attention.out_proj.*",
        "image.pool.mlp.up.*": "vision_model.head.mlp.fc1.*", "image.pool.mlp.down.*": "vision_model.head.mlp.fc2.*",
    },
    TRANSFORMERS_TOWERS, TRANSFORMERS_BLOCK, scalar=(1,),
)  # fmt: skip
OPENAI = Layout(
    {
        "log_scale": "logit_scale", "bias": "logit_bias",
        "image.class_token": "visual.class_embedding", "image.embed.weight": "visual.conv1.weight",
        "image.positions": "visual.positional_embedding", "image.pre_norm.*": "visual.ln_pre.*",
        "image.transformer.norm.*": "visual.ln_post.*", "project_image.weight": "visual.proj",
        "text.embed.weight": "token_embedding.weight", "text.positions": "positional_embedding",
        "text.transformer.norm.*": "ln_final.*", "project_text.weight": "text_projection",
    },
    {"image": "visual.transformer.resblocks", "text": "transformer.resblocks"},
    {
        "attention.qkv.*": "attn.in_proj_*", "attention.out.*": "attn.out_proj.*",
        "mlp.up.*": "mlp.c_fc.*", "mlp.down.*": "mlp.c_proj.*", "norm1.*": "ln_1.*", "norm2.*": "ln_2.*",
    },
    transposed=("project_image.weight", "project_text.weight"),
)  # fmt: skip
