"""Ask a trained model about images: what is alike, what it is, which one fits the words.

    python examples/ask_a_model.py [RUN] [FOLDER]

Without a run the newest one in `runs/` here; without a folder a few images are drawn. Each `# %%` is a cell for an
editor or a notebook.
"""

# %% A model: a run by name or path, a model folder, or a CLIP folder of Hugging Face
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import lapclip

runs = sorted(Path("runs").glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
if len(sys.argv) < 2 and not runs:
    sys.exit("there is no run here; make one: `lapclip train --minutes 3`")
model = lapclip.load(sys.argv[1] if len(sys.argv) > 1 else runs[-1].parent)
print(f"{model.name} looks at {model.image_size} pixels and answers with {model.width} numbers")


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
print(f"{len(rows)} images embedded, each of length {np.linalg.norm(rows[0]):.3f}")

# %% Which images are alike: the cosine of their rows
alike = rows @ rows.T - 2 * np.eye(len(rows))
one, other = np.unravel_index(alike.argmax(), alike.shape)
print(f"most alike: {names[one]} and {names[other]}, {alike[one, other]:.2f}")

# %% The best image for some words
words = ["a red circle", "a blue square", "something green"]
scores = model.similarity(rows, words)
for text, column in zip(words, scores.T, strict=True):
    first = np.argsort(-column)[:3]
    print(f"{text}: " + ", ".join(f"{names[number]} {column[number]:.2f}" for number in first))

# %% What an image is, among labels of your own
labels = ["red", "green", "blue"]
chances = model.classify(rows[:6], labels)
for name, row in zip(names, chances, strict=False):
    print(f"{name}: {labels[row.argmax()]} ({row.max():.0%})")
