"""Use a trained model: similar images, the best image for a text, and zero-shot classification.

    python examples/ask_a_model.py [RUN] [FOLDER]

RUN defaults to the newest run in `runs/`. Without FOLDER, the script draws a few images. Each `# %%` starts a cell for
an editor or a notebook.
"""

# %% Load a model: a run by name or path, a model folder, or a Hugging Face CLIP folder
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import lapclip

runs = sorted(Path("runs").glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
if len(sys.argv) < 2 and not runs:
    sys.exit("there is no run in this folder; train one: `lapclip train --minutes 3`")
model = lapclip.load(sys.argv[1] if len(sys.argv) > 1 else runs[-1].parent)
print(f"{model.name}: image size {model.image_size}, embedding width {model.width}")


# %% Images: paths, PIL images, arrays and tensors may be mixed
def draw(colour: str, shape: str) -> Image.Image:
    image = Image.new("RGB", (128, 128), "white")
    outline = {"circle": ImageDraw.Draw(image).ellipse, "square": ImageDraw.Draw(image).rectangle}
    outline[shape]((32, 32, 96, 96), fill=colour)
    return image


if len(sys.argv) > 2:
    files = sorted(
        path for path in Path(sys.argv[2]).iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png")
    )
    pictures: list = files[:500]
    names = [path.name for path in pictures]
else:
    names = [f"{colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square")]
    pictures = [draw(*name.split()) for name in names]
rows = model.images(pictures)
print(f"{len(rows)} images embedded, each with norm {np.linalg.norm(rows[0]):.3f}")

# %% Most similar images: the cosine similarity of their embeddings
alike = rows @ rows.T - 2 * np.eye(len(rows))
one, other = np.unravel_index(alike.argmax(), alike.shape)
print(f"most similar: {names[one]} and {names[other]}, {alike[one, other]:.2f}")

# %% The best images for a text
words = ["a red circle", "a blue square", "something green"]
scores = model.similarity(rows, words)
for text, column in zip(words, scores.T, strict=True):
    first = np.argsort(-column)[:3]
    print(f"{text}: " + ", ".join(f"{names[number]} {column[number]:.2f}" for number in first))

# %% Zero-shot classification with your own labels
labels = ["red", "green", "blue"]
chances = model.classify(rows[:6], labels)
for name, row in zip(names, chances, strict=False):
    print(f"{name}: {labels[row.argmax()]} ({row.max():.0%})")
