"""Distillation: a new model learns from the embeddings that a trained one, the teacher, gives its data."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lapclip.config import Config, with_values
from lapclip.data.batches import Batch
from lapclip.data.open import open_source
from lapclip.data.source import Source
from lapclip.embedder import Embedder, find_model
from lapclip.errors import UserError
from lapclip.evaluate.pool import Pool, embed_pool
from lapclip.finetune.features import as_tensor, feature_folder, features_of
from lapclip.machine.device import DEFAULT_THREADS, processor, set_up_process
from lapclip.units import LongWork

ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Teacher:
    """The embeddings of all training images [N, E] and of all their captions, in half precision.

    The training loop takes its batches from here, each with the teacher's embeddings of it.
    """

    image_NE: np.ndarray
    text_UE: np.ndarray
    number_of: dict[str, int]  # the row of a caption

    def batches(self, usual: Generator[Batch], /, **_: int) -> Generator[Batch]:
        with closing(usual):
            for batch in usual:
                yield replace(batch, teacher=self.rows(batch))

    def pool(self, embedder: Embedder, source: Source, num_images: int) -> Pool:
        return embed_pool(embedder, source, num_images)

    def rows(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        texts = [self.number_of[caption] for caption in batch.captions]
        return self.image_NE[batch.indices].astype(np.float32), self.text_UE[texts].astype(np.float32)


def find_teacher(config: Config) -> LongWork[tuple[Config, Teacher]]:
    """What the teacher makes of the training data, and the config with embeddings as wide as the teacher's."""
    assert config.model.teacher is not None
    set_up_process(config.device.threads or DEFAULT_THREADS, keep_memory=True)
    found = find_model(Path(config.model.teacher))
    embedder = Embedder(found.model.eval(), found.tokenizer, processor())
    data = yield from open_source(config.data, embedder.image_size)
    with feature_folder(embedder, data) as folder:
        features = yield from features_of(embedder, data.training, folder / "training")
    if features.faults:
        problem = f"{len(features.faults)} training images cannot be read"
        raise UserError(problem, hint="remove them, or allow a pack: omit `--no-pack`")
    number_of = dict(zip(features.captions, features.caption_ids.tolist(), strict=True))
    with torch.inference_mode():
        image_NE, text_UE = (
            np.concatenate([embed(as_tensor(rows[n : n + ROWS_AT_ONCE])).half().numpy()
                            for n in range(0, len(rows), ROWS_AT_ONCE)])
            for rows, embed in (
                (features.views[0], embedder.model.embed_images),
                (features.text_UD, lambda rows: embedder.model.embed_texts(rows, rows)),
            )
        )  # fmt: skip
    width = image_NE.shape[1]
    if config.model.embedding not in (None, width):
        problem = f"embeddings of the teacher have {width} numbers, not {config.model.embedding}"
        raise UserError(problem, hint="omit `--embedding`")
    return with_values(config, {"embedding": width}), Teacher(image_NE, text_UE, number_of)
