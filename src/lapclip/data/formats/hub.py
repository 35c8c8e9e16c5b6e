"""Loads datasets with the `datasets` package: splits by name come out, or a sentence about what went wrong.

Nothing of a dataset is run, and no file is read that lies neither in its folder nor on the hub.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from lapclip.data.files import Folders, is_image_name, open_regular
from lapclip.errors import UserError, shortened

# The kinds of file that are read: tables and images. Others may be programs, or need packages of their own.
BUILDERS = {"arrow", "cache", "csv", "imagefolder", "json", "parquet", "webdataset"}
SUFFIXES = (".parquet", ".arrow", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".tar", ".zip")
MOST_FILES = 100_000  # looked at before a folder is taken for none
NO_SCRIPTS = "which lapclip does not run"
LOCAL_COPY = "check the name, or pass a local copy as `hf:FOLDER`"


def load_splits(name: str) -> tuple[dict[str, Any], list[str]]:
    """The splits of `hf:...` by name, and the folders that images may be read from."""
    wanted = name.removeprefix("hf:")
    if not wanted or "://" in wanted:
        raise UserError(f"`{name}` names no dataset", hint="write `hf:NAME` or `hf:FOLDER`")
    path, config = wanted, None
    if not os.path.isdir(path) and ":" in wanted:
        path, _, config = wanted.rpartition(":")
    folder = os.path.abspath(path) if os.path.isdir(path) else None
    if folder is None and (os.path.exists(path) or path.startswith((".", "/", "~"))):
        raise UserError(f"`{path}` is not a folder", hint="write `hf:NAME` or `hf:FOLDER`")
    if folder is not None:
        check_folder(folder, name)
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            f"`{name}` cannot be opened without the package `datasets`", hint="pip install 'lapclip[data]'"
        ) from None
    if folder is None and hasattr(datasets.packaged_modules, path):
        # For `datasets` this is a kind of file, and means all such files below the present folder.
        raise UserError(f"`{name}` is a kind of file, not a dataset", hint=LOCAL_COPY)
    roots = own_folders(folder) if folder else hub_folders(path)
    try:
        with quietly():
            if folder is not None and is_saved(folder):
                found = datasets.load_from_disk(folder)
            else:
                builder = datasets.load_dataset_builder(folder or path, config)
                check_builder(builder, name, roots if folder else None)
                builder.download_and_prepare()
                found = builder.as_dataset()
    except UserError:
        raise
    except Exception as error:  # datasets, pyarrow, httpx and the hub have errors of their own
        raise explained(error, name) from error
    splits = dict(found) if isinstance(found, dict) else {str(found.split or ""): found}
    return {str(split): dataset for split, dataset in splits.items()}, roots


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` wrote it."""
    return any(os.path.isfile(os.path.join(folder, file)) for file in ("dataset_dict.json", "state.json"))


def check_folder(folder: str, name: str) -> None:
    """UserError for a folder that is a program, holds no data, or whose notes lead out of it."""
    script = os.path.basename(folder) + ".py"
    if os.path.exists(os.path.join(folder, script)):
        raise UserError(
            f"`{name}` has a loading script, `{script}`, {NO_SCRIPTS}",
            hint="pass a copy in Parquet, as `Dataset.to_parquet` writes it",
        )
    if is_saved(folder):
        check_saved(folder, name)
        return
    files = (file for _, _, files in os.walk(folder) for file in files)
    if not any(file.lower().endswith(SUFFIXES) or is_image_name(file) for file in islice(files, MOST_FILES)):
        raise UserError(
            f"`{name}` holds no data that can be read safely: no Parquet, Arrow, CSV, JSON or images",
            hint="pass a copy in Parquet, as `Dataset.to_parquet` writes it",
        )


def check_saved(folder: str, name: str) -> None:
    """UserError unless each Arrow file of a saved dataset is its own."""
    folders = Folders(folder)
    try:
        splits = [folder]
        if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
            listed = read_json(os.path.join(folder, "dataset_dict.json"))["splits"]
            splits = [os.path.join(folder, split) for split in listed]
        for split in splits:
            for file in read_json(os.path.join(split, "state.json"))["_data_files"]:
                path, why = folders.find(os.path.join(split, file["filename"]))
                if path is None:
                    raise UserError(
                        f"`{name}` cannot be read: its file `{shortened(file['filename'])}` {why}",
                        hint="save it anew with `save_to_disk`",
                    )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"`{name}` is not as `save_to_disk` leaves it: {shortened(str(error))}",
            hint="save it anew with `save_to_disk`",
        ) from None


def read_json(path: str) -> Any:
    with open_regular(path) as file:
        return json.loads(file.read(2**26))


def check_builder(builder: Any, name: str, roots: list[str] | None) -> None:
    """UserError if a dataset is of a kind that is not read, or its own notes point at somebody else's files."""
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in BUILDERS:
        raise UserError(
            f"`{name}` is of the kind `{kind}`, which is not read", hint="pass a copy in Parquet, or images"
        )
    folders = Folders(*(roots or []))
    for files in (getattr(builder.config, "data_files", None) or {}).values():
        for file in files:
            last = str(file).rpartition("::")[2]
            is_local = "://" not in last
            is_own = is_local and roots is not None and folders.find(last)[0] is not None
            if not is_own and (is_local or roots is not None):
                raise UserError(
                    f"`{name}` wants to read `{shortened(last)}`, which lies outside it",
                    hint="take that file out of `data_files` in its README.md",
                )


def own_folders(folder: str) -> list[str]:
    """A local copy's folder; in the hub's cache, files are links to where their bytes are."""
    parent = Path(folder).parent
    if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
        return [folder, str(parent.parent / "blobs")]
    return [folder]


def hub_folders(repository: str) -> list[str]:
    """Where `datasets` puts the files of a dataset from the hub."""
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    own = os.path.join(HF_HUB_CACHE, "datasets--" + repository.replace("/", "--"))
    return [own, str(config.DOWNLOADED_DATASETS_PATH)]


@contextmanager
def quietly() -> Iterator[None]:
    """Without the progress bars of `datasets` and the hub where nobody would see them; they come back afterwards."""
    import datasets
    from huggingface_hub import utils as hub

    bars = [
        (
            datasets.are_progress_bars_disabled(),
            datasets.disable_progress_bars,
            datasets.enable_progress_bars,
        ),
        (hub.are_progress_bars_disabled(), hub.disable_progress_bars, hub.enable_progress_bars),
    ]
    is_seen = os.isatty(2)  # where they are written: a download may take long
    for was_off, off, _ in bars:
        if not was_off and not is_seen:
            off()
    try:
        yield
    finally:
        for was_off, _, on in bars:
            if not was_off and not is_seen:
                on()


def explained(error: Exception, name: str) -> UserError:
    """An error of `datasets` as a sentence with a way out."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and isinstance(cause, Exception) and len(chain) < 10:
        chain.append(cause)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    text = " ".join(str(error).split())
    if "scripts are no longer supported" in text:
        return UserError(
            f"`{name}` has a loading script, {NO_SCRIPTS}",
            hint="pass a copy in Parquet, as `Dataset.to_parquet` writes it",
        )
    if "Config name is missing" in text or "BuilderConfig" in text:
        return UserError(
            f"`{name}` does not say which part is meant: {shortened(text, 400)}",
            hint="write `hf:NAME:CONFIG`",
        )
    if kinds & {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}:
        return UserError(f"`{name}` cannot be fetched: the hub cannot be reached", hint=LOCAL_COPY)
    if kinds & {"DatasetNotFoundError", "RepositoryNotFoundError", "HFValidationError"}:
        return UserError(f"`{name}` is not on the hub, or not open to you", hint=LOCAL_COPY)
    reason = " ".join(str(chain[-1]).split()) or type(chain[-1]).__name__
    return UserError(f"`{name}` cannot be read: {shortened(reason, 300)}", hint=LOCAL_COPY)
