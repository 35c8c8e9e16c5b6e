"""Train your own CLIP on the laptop you have, and search your images with it.

`lapclip.load("my-run")` gives an `Embedder`, which embeds, compares and classifies images and words. It is imported
when first used, so that `import lapclip` costs nothing.
To train from Python: `lapclip.train.prepare.prepare` makes a run, `lapclip.train.loop.train` goes through it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapclip.config import Config, load_config
    from lapclip.embedder import TEMPLATES, Embedder, load
    from lapclip.errors import UserError

__version__ = "0.2.0"
__all__ = ["TEMPLATES", "Config", "Embedder", "UserError", "load", "load_config"]

HOMES = {
    "Config": "config",
    "load_config": "config",
    "Embedder": "embedder",
    "TEMPLATES": "embedder",
    "load": "embedder",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module `lapclip` has no attribute `{name}`")
    if HOMES[name] == "embedder":
        # It has an effect before torch is imported only.
        importlib.import_module("lapclip.machine.hardware").limit_openmp_spinning()
    return getattr(importlib.import_module(f"lapclip.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
