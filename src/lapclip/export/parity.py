"""Whether a model in another format embeds as the original does: one check for every format."""

import warnings
from functools import partial
from timeit import repeat
from typing import Any

import numpy as np

from lapclip.data.decode import channels_first
from lapclip.data.synthetic import SceneSource
from lapclip.embedder import Embedder

NUM_IMAGES = 16
MIN_COSINE = 0.9999  # of formats that keep all weights
TIMINGS = 3


def compare(original: Embedder, exported: Embedder) -> dict[str, Any]:
    """Cosines of the embeddings of the same images and texts, and how long images take beside the original."""
    scenes, side = SceneSource(NUM_IMAGES), original.image_size
    pixels = np.stack([channels_first(scenes.image(index, side)) for index in range(NUM_IMAGES)])
    texts = [scenes.captions(index)[0] for index in range(NUM_IMAGES)]
    texts += ["", "A  Photo of 3 Dogs & a cat.", "été à la plage"]
    with warnings.catch_warnings(action="ignore"):  # of texts that are too long
        ours, theirs = ((model.pixels(pixels), model.texts(texts)) for model in (original, exported))
    cosines = np.concatenate([(one * other).sum(axis=1) for one, other in zip(ours, theirs, strict=True)])
    best = [(words @ images.T).argmax(axis=1) for images, words in (ours, theirs)]
    calls = [partial(model.pixels, pixels) for model in (original, exported)]
    seconds = [min(repeat(call, number=1, repeat=TIMINGS)) for call in calls]
    return {
        "parity": {
            "min_cosine": float(cosines.min()),
            "mean_cosine": float(cosines.mean()),
            "top1_agreement": float((best[0] == best[1]).mean()),
        },
        "latency_ratio": seconds[1] / seconds[0],
    }
