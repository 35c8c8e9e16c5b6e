"""What a step holds in memory, estimated before it is run."""

from lapclip.model.clip import Size

PROCESS_BYTES = 400_000_000  # Python, torch and a few batches


def step_bytes(size: Size, num_parameters: int, chunk: int, recompute: bool) -> int:
    """The process, weights with their gradients and AdamW's two moments, and the activations of one chunk."""
    return PROCESS_BYTES + 16 * num_parameters + chunk * activation_bytes(size, recompute)


def activation_bytes(size: Size, recompute: bool) -> int:
    """What one pair leaves for the backward pass, about: 14 vectors a token and layer.

    With `recompute` one a layer, and 14 for the layer that is computed again.
    """
    patches = (size.image_size // size.patch_size) ** 2 + 1
    towers = ((size.image, patches), (size.text, size.text_length))
    return 4 * sum(
        (tower.depth + 14 if recompute else 14 * tower.depth) * tower.width * num_tokens
        for tower, num_tokens in towers
    )
