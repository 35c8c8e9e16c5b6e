"""Train your own CLIP on the laptop you have, and search your pictures with it.

Everything below is imported when first used, so that `import lapclip` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapclip.config import Config, load_config
    from lapclip.embedder import Embedder, load
    from lapclip.errors import UserError
    from lapclip.prepare import prepare
    from lapclip.train import train

__version__ = "0.1.0"
__all__ = ["Config", "Embedder", "UserError", "load", "load_config", "prepare", "train"]

HOMES = {
    "Config": "config",
    "load_config": "config",
    "Embedder": "embedder",
    "load": "embedder",
    "UserError": "errors",
    "prepare": "prepare",
    "train": "train",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module `lapclip` has no attribute `{name}`")
    module = importlib.import_module(f"lapclip.{HOMES[name]}")
    # All names of that module at once: importing `lapclip.train` has just put the module where the function belongs.
    globals().update({other: getattr(module, other) for other, home in HOMES.items() if home == HOMES[name]})
    return globals()[name]
