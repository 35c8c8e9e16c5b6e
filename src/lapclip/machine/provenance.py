"""What a result depends on besides settings and data: the versions of what computed it."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "pillow", "safetensors", "tokenizers")  # whose versions can change a number


def versions() -> dict[str, Any]:
    """Of lapclip, of its checkout if it runs from one, and of the packages that compute."""
    return {
        "lapclip": version_of("lapclip"),
        "commit": commit(),
        "versions": {p: version_of(p) for p in PACKAGES},
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that lapclip runs from, with a mark when files differ from it."""
    here = Path(__file__).resolve().parent.parent
    if not (here.parent.parent / ".git").exists():
        return None
    try:
        asked = subprocess.run(  # noqa: S603
            ["git", "-C", here, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
