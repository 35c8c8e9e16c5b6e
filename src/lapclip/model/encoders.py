"""Encoders other than CLIP's own transformers as towers, most of them pretrained: pixels or token ids in, one vector of
features each out.

Shapes: B images or texts, T tokens, D width of the features.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapclip.errors import UserError, shortened
from lapclip.model.blocks import MLP, Attention, Shape
from lapclip.model.resnet import ResNet

LAST_LAYERS = 4  # of a text encoder that features are read from, besides its first
MAX_NUMBER, MAX_NUMBERS = 2_000_000, 2000  # that describe an encoder


@dataclass(frozen=True)
class Encoder:
    """Which of `ENCODERS` a tower is, and the numbers it is built from."""

    kind: str
    numbers: dict[str, Any]

    def problem(self) -> str | None:
        """What is wrong with numbers that may come from a file of a stranger."""
        leaves = [self.numbers]
        for value in leaves:
            if isinstance(value, dict | list):
                leaves += value.values() if isinstance(value, dict) else value
            if len(leaves) > MAX_NUMBERS or (isinstance(value, int | float) and abs(value) > MAX_NUMBER):
                return f"its `{shortened(self.kind)}` tower is described by implausible numbers"
        return None if self.kind in ENCODERS else f"towers of kind `{shortened(self.kind)}` are not known"

    def build(self) -> nn.Module:
        """The module with random weights."""
        try:
            return ENCODERS[self.kind](**self.numbers)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            problem = f"the model has a tower of kind `{shortened(self.kind)}` that cannot be built"
            hint = "copy the whole folder again"
            raise UserError(f"{problem}: {shortened(str(error))}", hint=hint) from None


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's `SAME` padding: of an odd number of pixels, one more at the end."""

    def __init__(self, width: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1):
        super().__init__(width, out, kernel, stride, padding=kernel // 2 if stride == 1 else 0, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride[0] > 1:
            step, kernel = self.stride[0], self.kernel_size[0]
            missing = [max((-(-n // step) - 1) * step + kernel - n, 0) for n in (x.shape[3], x.shape[2])]
            x = F.pad(x, [part for n in missing for part in (n // 2, n - n // 2)])
        return super().forward(x)


class InvertedResidual(nn.Module):
    """Expands channels, convolves each alone, and projects back; with a residual connection where shapes agree."""

    def __init__(self, width: int, hidden: int, out: int, kernel: int, stride: int):
        super().__init__()
        self.expand = SameConv(width, hidden) if hidden != width else None
        self.depthwise = SameConv(hidden, hidden, kernel, stride, groups=hidden)
        self.project = SameConv(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if x.shape == y.shape else y


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite without its classifier; batch norms are part of the convolutions."""

    def __init__(self, stem: int, blocks: Sequence[Sequence[int]], width: int, stages: int = 0):
        super().__init__()
        self.stages = stages  # whose output is read too
        self.stem = SameConv(3, stem, 3, 2)
        self.blocks = nn.Sequential(*(InvertedResidual(*numbers) for numbers in blocks))
        self.head = SameConv(blocks[-1][2], width)

    def forward(self, images: Tensor, keep_BK: Tensor | None = None) -> Tensor:
        """Mean and maximum over the image, of each channel: of the output, and of the last stages before it."""
        x = ((images.float() - 127) / 128).contiguous(memory_format=torch.channels_last)
        x = F.relu6(self.stem(x))
        outputs = {}  # by number of channels: what the last block of each stage gives
        for block in self.blocks:
            x = block(x)
            outputs[x.shape[1]] = x
        x = F.relu6(self.head(x))
        read = [x, *list(outputs.values())[len(outputs) - self.stages :]]
        return torch.cat([pooled for y in read for pooled in (y.mean((2, 3)), y.amax((2, 3)))], dim=1)


class BertBlock(nn.Module):
    """Attention, then an MLP, each with a residual connection and then a norm."""

    def __init__(self, shape: Shape, activation: str, norm_eps: float):
        super().__init__()
        self.attention = Attention(shape.width, shape.heads)
        self.norm1 = nn.LayerNorm(shape.width, norm_eps)
        self.mlp = MLP(shape, activation)
        self.norm2 = nn.LayerNorm(shape.width, norm_eps)

    def forward(self, x_BTD: Tensor, mask: Tensor) -> Tensor:
        x_BTD = self.norm1(x_BTD + self.attention(x_BTD, mask))
        return self.norm2(x_BTD + self.mlp(x_BTD))


class Bert(nn.Module):
    """BERT without its pooling layer."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        vocab_size: int,
        text_length: int,
        norm_eps: float,
    ):
        super().__init__()
        shape = Shape(width, depth, heads, hidden)
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.zeros(text_length, width))
        self.norm = nn.LayerNorm(width, norm_eps)
        self.blocks = nn.ModuleList(BertBlock(shape, "gelu", norm_eps) for _ in range(depth))

    def forward(self, tokens_BT: Tensor, ends_B: Tensor) -> Tensor:
        x_BTD = self.norm(self.embed(tokens_BT) + self.positions[: tokens_BT.shape[1]])
        is_text_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) <= ends_B[:, None]
        layers = [x_BTD]
        for block in self.blocks:
            layers.append(block(layers[-1], is_text_BT[:, None, None]))
        return read_out(layers, is_text_BT)


def read_out(layers: Sequence[Tensor], kept_BT: Tensor) -> Tensor:
    """Features of each text: the mean over its tokens in the first and in the last layers, and the last's maximum.

    The last layer's mean alone is what sentence encoders give; the others hold more of the single words.
    """
    used, kept = [*layers[: len(layers) > 1], *layers[-LAST_LAYERS:]], kept_BT[..., None]
    means = [(layer * kept).sum(1) / kept.sum(1) for layer in used]
    return torch.cat([*means, layers[-1].masked_fill(~kept, -torch.inf).amax(1)], dim=1)


class TimmImage(nn.Module):
    """An image model of the timm library, without its classifier."""

    mean: Tensor
    std: Tensor

    def __init__(self, name: str, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        import timm

        if not re.fullmatch(r"[a-z0-9_.]+", name):  # others would be downloaded
            raise ValueError(f"`{name}` is not the name of a timm model")
        self.model = timm.create_model(name, pretrained=False, num_classes=0)
        for part, values in (("mean", mean), ("std", std)):
            self.register_buffer(part, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor, keep_BK: Tensor | None = None) -> Tensor:
        return self.model((images.float() - self.mean) / self.std)


class TransformersText(nn.Module):
    """A text encoder of the transformers library."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        from transformers import AutoConfig, AutoModel

        self.model = AutoModel.from_config(AutoConfig.for_model(**config))

    def forward(self, tokens_BT: Tensor, ends_B: Tensor) -> Tensor:
        is_text_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) <= ends_B[:, None]
        masks = {"attention_mask": is_text_BT.long(), "output_hidden_states": True}
        return read_out(self.model(input_ids=tokens_BT, **masks).hidden_states, is_text_BT)


class Onnx(nn.Module):
    """An encoder in an ONNX file: of images if it has a mean and a spread of pixels from 0 to 255, else of texts."""

    mean: Tensor
    std: Tensor
    session: Any = None  # an `onnxruntime.InferenceSession`: `weights/onnx.py` opens the file with this hash

    def __init__(self, sha256: str, name: str, mean: Sequence[float] = (), std: Sequence[float] = ()):
        super().__init__()
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError("its file is not named by a hash")
        self.sha256, self.name, self.is_image = sha256, shortened(name), len(mean) > 0
        for part, values in (("mean", mean), ("std", std)):
            self.register_buffer(part, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, inputs: Tensor, ends_B: Tensor | None = None) -> Tensor:
        """One vector as it is; of several, [B, T, D] or [B, D, h, w], the mean and maximum."""
        given, kept_BT = {}, None
        if not self.is_image and ends_B is not None:
            if isinstance(length := self.session.get_inputs()[0].shape[1], int):  # it takes no other
                inputs = F.pad(inputs, (0, length - inputs.shape[1]))
            kept_BT = torch.arange(inputs.shape[1], device=inputs.device) <= ends_B[:, None]
            given = {"attention_mask": kept_BT.long(), "token_type_ids": torch.zeros_like(inputs)}
        x = self.run((inputs.float() - self.mean) / self.std if self.is_image else inputs, given)
        if x.ndim == 2:
            return x
        x_BTD = x.flatten(2).mT if x.ndim == 4 else x
        return read_out([x_BTD], torch.ones_like(x_BTD[..., 0]).bool() if kept_BT is None else kept_BT)

    def run(self, inputs: Tensor, given: dict[str, Tensor]) -> Tensor:
        """The first output; for one row after the other if the file takes only one."""
        wanted, outputs = self.session.get_inputs(), []
        rows = {one.name: given.get(one.name, inputs).cpu().numpy() for one in wanted}
        at_once = 1 if wanted[0].shape[0] == 1 else len(inputs)
        for start in range(0, len(inputs), at_once):
            some = {name: array[start : start + at_once] for name, array in rows.items()}
            outputs.append(self.session.run(None, some)[0])
        return torch.from_numpy(np.concatenate(outputs)).float().to(inputs.device)


ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "efficientnet-lite": EfficientNetLite, "bert": Bert, "timm": TimmImage, "transformers": TransformersText,
    "onnx": Onnx, "resnet": ResNet,
}  # fmt: skip
