"""Datasets of Hugging Face, from the hub or a local copy, loaded with the `datasets` package.

Rows stay in Arrow files: no image is decoded, nothing of a dataset is run, and no file is read that lies neither in its
folder nor on the hub.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from lapclip.data.catalogue import Catalogue, Gathering, Options, Problems, Side
from lapclip.data.files import Folders, Problem
from lapclip.data.formats.columns import Columns, Row, Table, image_name, listed, plain
from lapclip.data.formats.folder import find_image
from lapclip.data.formats.names import sides_in
from lapclip.data.formats.tables import gather, same_columns
from lapclip.errors import MissingPackage, UserError, shortened
from lapclip.files import read_json

NUM_ROWS = 1_000  # in a batch of texts
NUM_IMAGES = 16  # in a batch with images
# The kinds of file that are read: tables and images. Others may be programs, or need packages of their own.
BUILDERS = {"arrow", "cache", "csv", "imagefolder", "json", "parquet", "webdataset"}
AS_PARQUET = "pass a copy in Parquet, as `Dataset.to_parquet` writes it"
LOCAL_COPY = "check the name, or pass a local copy as `hf:FOLDER`"


@dataclass(frozen=True)
class ArrowTable(Table):
    """One split of a dataset."""

    dataset: Any
    split: str
    names: tuple[str, ...]  # of columns that may hold images or texts
    roots: list[str]  # the dataset's own folders
    side: Side | None = None
    format: str = "hf"
    image_columns: dict[str, Any] = field(default_factory=dict)  # selected when first read

    @property
    def label(self) -> str:
        return self.split

    def row_name(self, label: str, number: int) -> str:
        return f"{label}/{number - 1}"

    def state(self) -> str:
        return str(self.dataset._fingerprint)

    def batches(self, names: list[str], num_rows: int) -> Iterator[Any]:
        return self.dataset.select_columns(names).with_format("arrow").iter(batch_size=num_rows)

    def values(self, batch: Any, name: str) -> list[Any]:
        """The cells of a column; a class's name instead of its number."""
        feature, cells = self.dataset.features[name], batch.column(name).to_pylist()
        if type_of(feature) != "ClassLabel" or not feature.names:
            return cells
        return list(map(dict(enumerate(feature.names)).get, cells))

    def first_batches(self) -> Iterator[tuple[list[list[Any]], int]]:
        for batch in self.batches(list(self.names), NUM_IMAGES):
            rows = zip(*(self.values(batch, name) for name in self.names), strict=True)
            yield list(map(list, rows)), batch.nbytes

    def rows(self, columns: Columns, problems: Problems) -> Iterator[Row]:
        """All rows; of images only their paths, and whether there are bytes."""
        is_class = type_of(self.dataset.features[columns.caption]) == "ClassLabel"
        label = columns.caption if is_class else columns.label
        used = dict.fromkeys([columns.image, columns.caption, columns.side, label])
        present = [name for name in used if name and name in self.dataset.column_names]
        number = 0
        for batch in self.batches(present, NUM_ROWS):
            texts = {name: self.values(batch, name) for name in present if name != columns.image}
            nothing = [None] * batch.num_rows
            sides, labels = texts.get(columns.side or "", nothing), texts.get(label or "", nothing)
            images = images_in(batch.column(columns.image), columns.kind)
            cells = zip(*images, texts[columns.caption], sides, labels, strict=True)
            for path, data, text, side, name in cells:
                number += 1
                caption = text.replace("_", " ") if is_class and text else text
                image = {"path": os.path.basename(path)} if data else relative(path, self.roots)
                yield number, number - 1, image, data, caption, side, name, None

    def cell(self, columns: Columns, place: int) -> Any:
        if columns.image not in self.image_columns:  # selecting a column takes longer than reading a cell
            selected = self.dataset.select_columns([columns.image])
            self.image_columns[columns.image] = selected.with_format("arrow")
        try:
            return self.image_columns[columns.image][place].column(0)[0].as_py()
        except IndexError:
            raise ValueError("has changed since the dataset was opened") from None


def open_hugging_face(name: str, options: Options) -> Catalogue:
    """The catalogue of `hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER`."""
    splits, roots = load_splits(name)
    gathering = Gathering()
    named = {plain(column) for column in (options.image_column, options.caption_column) if column}
    tables = [
        ArrowTable(dataset, split or "rows", text_columns(dataset, named), roots, side)
        for (split, dataset), side in zip(splits.items(), sides_in(splits), strict=True)
    ]
    if options.image_column is None:
        features = tables[0].dataset.features.items()
        image = next((key for key, feature in features if type_of(feature) == "Image"), None)
        options = replace(options, image_column=image)
    parts, columns = same_columns(tables, name, options, gathering.problems)
    if columns is None:
        raise UserError(f"`{name}` has no rows", hint="choose another dataset")
    folders = Folders(*([options.images] if options.images else []), *roots)
    reader = gather(parts, columns, gathering, partial(find_image, folders))
    return gathering.catalogue(name, "hf", reader)


def text_columns(dataset: Any, named: set[str]) -> tuple[str, ...]:
    """Columns that may hold images or texts: numbers are neither, unless a person says so or classes have names."""
    return tuple(
        key
        for key, feature in dataset.features.items()
        if plain(key) in named
        or not str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float", "bool"))
        or type_of(feature) == "ClassLabel"
    )


def images_in(column: Any, kind: str) -> tuple[list[str], list[bool]]:
    """The paths in a column of images, and which rows hold bytes; these are not touched."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.compute as compute  # type: ignore[import-untyped]

    if pyarrow.types.is_struct(column.type):
        fields = [field.name for field in column.type]
        paths = compute.struct_field(column, "path").to_pylist() if "path" in fields else [None] * len(column)
        has_data = compute.struct_field(column, "bytes").is_valid().to_pylist() if "bytes" in fields else None
        return [path or "" for path in paths], has_data or [False] * len(column)
    if kind == "data":
        return [""] * len(column), column.is_valid().to_pylist()
    return [image_name(cell) for cell in column.to_pylist()], [False] * len(column)


def type_of(feature: Any) -> str:
    return type(feature).__name__


def relative(path: str, roots: list[str]) -> str:
    """A path as a person would write it, within the dataset's own folder."""
    return next((path[len(root) + 1 :] for root in roots if path.startswith(root + os.sep)), path)


def load_splits(name: str) -> tuple[dict[str, Any], list[str]]:
    """The splits of `hf:...` by name, and the folders that images may be read from."""
    path, config = name.removeprefix("hf:"), None
    is_address = not path or "://" in path
    if not os.path.isdir(path) and ":" in path:
        path, _, config = path.rpartition(":")
    folder = os.path.abspath(path) if os.path.isdir(path) else None
    if is_address or (folder is None and (os.path.exists(path) or path.startswith((".", "/", "~")))):
        raise UserError(f"`{name}` is neither a dataset nor a folder", hint="write `hf:NAME` or `hf:FOLDER`")
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise MissingPackage(f"`{name}` cannot be opened without the package `datasets`", "data") from None
    if folder is None and hasattr(datasets.packaged_modules, path):
        # For `datasets` this is a kind of file, and means all such files below the present folder.
        raise UserError(f"`{name}` is a file format, not a dataset", hint=LOCAL_COPY)
    roots = own_folders(folder) if folder else hub_folders(path)
    try:
        with quietly():
            if folder is not None and is_saved(folder):
                check_saved(folder, name)
                found = datasets.load_from_disk(folder)
            else:
                builder = datasets.load_dataset_builder(folder or path, config)
                check_builder(builder, name, roots if folder else None)
                builder.download_and_prepare()
                found = builder.as_dataset()
    except UserError:
        raise
    except Exception as error:  # datasets, pyarrow, httpx and the hub have errors of their own
        choices: list[str] = []
        if type(error) is ValueError:
            with suppress(Exception), quietly():  # this error is shown then
                choices = datasets.get_dataset_config_names(folder or path)
        if len(choices) > 1 and config not in choices:
            hint = f"name one: `hf:{path}:{choices[0]}`"
            raise UserError(f"`{name}` has the configurations {listed(choices)}", hint=hint) from None
        raise explained(error, name, folder) from error
    splits = dict(found) if isinstance(found, dict) else {str(found.split or ""): found}
    return {str(split): dataset for split, dataset in splits.items()}, roots


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` wrote it."""
    return any(os.path.isfile(os.path.join(folder, file)) for file in ("dataset_dict.json", "state.json"))


def check_saved(folder: str, name: str) -> None:
    """UserError unless each Arrow file of a saved dataset is its own."""
    folders = Folders(folder)
    try:
        is_dict = os.path.isfile(os.path.join(folder, "dataset_dict.json"))
        for split in read_json(os.path.join(folder, "dataset_dict.json"))["splits"] if is_dict else [""]:
            for file in read_json(os.path.join(folder, split, "state.json"))["_data_files"]:
                found = folders.find(os.path.join(split, file["filename"]))
                if isinstance(found, Problem):
                    raise ValueError(f"its file `{file['filename']}` {found.what}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"`{name}` is not a valid `save_to_disk` dataset: {shortened(str(error))}"
        raise UserError(what, hint="save it again with `save_to_disk`") from None


def check_builder(builder: Any, name: str, roots: list[str] | None) -> None:
    """UserError if a dataset is of a kind that is not read, or its own notes point at somebody else's files."""
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in BUILDERS:
        raise UserError(f"`{name}` has the type `{kind}`, which is not supported", hint=AS_PARQUET)
    folders = Folders(*(roots or []))
    for file in chain.from_iterable((getattr(builder.config, "data_files", None) or {}).values()):
        last = str(file).rpartition("::")[2]
        is_local = "://" not in last
        is_own = is_local and roots is not None and isinstance(folders.find(last), str)
        if not is_own and (is_local or roots is not None):
            hint = "remove that file from `data_files` in its README.md"
            raise UserError(f"`{name}` refers to `{shortened(last)}`, which is outside it", hint=hint)


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
    """Without the progress bars of `datasets` and the hub, unless stderr is a terminal: a download may take long."""
    import datasets
    from huggingface_hub import utils as hub

    with ExitStack() as at_end:
        for bars in () if os.isatty(2) else (datasets, hub):
            if not bars.are_progress_bars_disabled():
                bars.disable_progress_bars()
                at_end.callback(bars.enable_progress_bars)
        yield


def explained(error: Exception, name: str, folder: str | None) -> UserError:
    """An error of `datasets` as a sentence with a way out."""
    causes = [error]
    while isinstance(cause := causes[-1].__cause__, Exception) and len(causes) < 10:
        causes.append(cause)
    kinds = {kind.__name__ for link in causes for kind in type(link).__mro__}
    if kinds & {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}:
        return UserError(f"`{name}` cannot be fetched: the hub cannot be reached", hint=LOCAL_COPY)
    if kinds & {"DatasetNotFoundError", "RepositoryNotFoundError", "HFValidationError"}:
        return UserError(f"`{name}` is not on the hub, or you do not have access", hint=LOCAL_COPY)
    reason = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
    hint = AS_PARQUET if folder or type(error) is RuntimeError else LOCAL_COPY  # the latter for a program
    return UserError(f"`{name}` cannot be read: {shortened(reason, 300)}", hint=hint)
