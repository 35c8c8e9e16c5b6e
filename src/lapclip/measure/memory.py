"""What a step holds in memory, estimated before it is run."""

from lapclip.model.clip import Size

PROCESS_BYTES = 400_000_000  # Python, torch and a few batches


def step_bytes(size: Size, num_parameters: int, chunk: int, recompute: bool) -> int:
    """The process, weights with their gradients and AdamW's two moments, and the activations of one chunk."""
    return PROCESS_BYTES + 16 * num_parameters + chunk * activation_bytes(size, recompute)


def activation_bytes(size: Size, recompute: bool) -> int:
    """What one pair leaves for the backward pass, about: 14 vectors a token and layer, or one with `recompute`."""
    kept = 1 if recompute else 14
    patches = (size.image_size // size.patch_size) ** 2 + 1
    image = patches * size.image.width * size.image.depth
    text = size.text_length * size.text.width * size.text.depth
    return 4 * kept * (image + text)
