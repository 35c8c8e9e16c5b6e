"""Distillation: a new model learns from the embeddings that a trained one, the teacher, gives its data."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lapclip.config import Config, with_values
from lapclip.data.batches import Batch
from lapclip.data.open import Data, open_source
from lapclip.data.source import Source
from lapclip.data.tokenizer import Tokenizer
from lapclip.embedder import Embedder, find_model
from lapclip.errors import UserError
from lapclip.evaluate.pool import Pool, embed_pool
from lapclip.finetune.features import as_tensor, feature_folder, features_of
from lapclip.machine.device import DEFAULT_THREADS, processor, set_up_process
from lapclip.model.clip import shape_of
from lapclip.runs.run import Run
from lapclip.step.feed import feed
from lapclip.train.prepare import own_tokenizer
from lapclip.units import Progress

ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Teacher:
    """The embeddings of all training images [N, E] and of all their captions, in half precision."""

    image_NE: np.ndarray
    text_UE: np.ndarray
    number_of: dict[str, int]  # the row of a caption

    def of(self, run: Run, data: Data) -> "TaughtData":
        config = run.load_config()
        return TaughtData(self, config, data, own_tokenizer(config, run))

    def rows(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        texts = [self.number_of[caption] for caption in batch.captions]
        return self.image_NE[batch.indices].astype(np.float32), self.text_UE[texts].astype(np.float32)


def find_teacher(config: Config) -> Generator[Progress, None, tuple[Config, Teacher]]:
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
    number_of = {
        caption: int(row) for caption, row in zip(features.captions, features.caption_ids, strict=True)
    }
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


@dataclass(frozen=True)
class TaughtData:
    """Batches with the teacher's embeddings of them, as the training loop takes them."""

    teacher: Teacher
    config: Config
    data: Data
    tokenizer: Tokenizer

    def batches(self, *, batch_size: int, seed: int, first_step: int) -> Generator[Batch]:
        draw = {"batch_size": batch_size, "seed": seed, "first_step": first_step}
        size, workers = shape_of(self.config.model), self.config.data.workers or 0
        own = feed(self.data.training, self.tokenizer, size, self.config.data, workers=workers, **draw)
        with closing(own):
            for batch in own:
                yield replace(batch, teacher=self.teacher.rows(batch))

    def pool(self, embedder: Embedder, source: Source, num_images: int) -> Pool:
        return embed_pool(embedder, source, num_images)
