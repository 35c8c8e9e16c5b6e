"""Small files of the kernel, read at little cost: a reading opens some fifty of them."""

import os
from contextlib import suppress
from pathlib import Path


def read_file(path: str | Path) -> str:
    """The text of a file, without the buffers and decoders that large files need."""
    with open(path, "rb", buffering=0) as file:
        return file.read().decode(errors="replace")


def read_text(path: str | Path) -> str:
    """The text of a small file without its end of line; empty if it cannot be read."""
    with suppress(OSError):
        return read_file(path).strip()
    return ""


def read_number(path: str | Path) -> int | None:
    return as_integer(read_text(path))


def as_integer(text: str | None) -> int | None:
    with suppress(ValueError):
        return int(text) if text else None
    return None


def list_folder(folder: Path) -> list[str]:
    """The paths in a folder, sorted; none if there is no folder."""
    with suppress(OSError):
        return [f"{folder}/{name}" for name in sorted(os.listdir(folder))]
    return []
