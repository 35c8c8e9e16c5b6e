"""Pretrained models of the Hugging Face hub, which is untrusted: only files with known names are fetched."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lapclip import files
from lapclip.errors import UserError, shortened, suggest
from lapclip.units import LongWork, Progress, size

PREFIX, ORIGIN = "hf-hub:", "origin.json"
WEIGHTS = ("model.safetensors", "open_clip_model.safetensors")  # the first of these that there is
OTHERS = {
    "config.json", "open_clip_config.json", "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "preprocessor_config.json", "processor_config.json",
}  # fmt: skip
MAX_BYTES, SECONDS = 16 * 10**9, 30  # of a model, and to wait for an answer
WORD = r"[A-Za-z0-9](?:\w|[.-](?![.-]))*"  # neither `..` nor `--`
REFERENCE = re.compile(rf"{PREFIX}({WORD}/{WORD})(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub; for a downloaded model, in `origin.json`, also where exactly its files come from."""

    repository: str
    revision: str | None  # in the list a commit, so that everybody gets the same files
    megabytes: int = 0  # to download
    millions: int | None = None  # of parameters
    licence: str = ""
    image_size: int | None = None
    good_at: str = ""
    commit: str = ""
    sha256: dict[str, str] = field(default_factory=dict)  # by the names of the files


MODELS = {
    "tinyclip-8m": HubModel("wkcn/TinyCLIP-ViT-8M-16-Text-3M-YFCC15M", "a2a8c6eaa2549ad66eb7c31b85022bf58273a26c",
                            96, 23, "MIT", 224, "the smallest and fastest, for many photos or an old laptop"),
    "tinyclip-39m": HubModel("wkcn/TinyCLIP-ViT-39M-16-Text-19M-YFCC15M", "07a4b0bc751cb64fecd2b661c048c1dd98d69444",
                             335, 83, "MIT", 224, "everyday photos, half as large as the base models"),
    "clip-b32": HubModel("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "1a25a446712ba5ee05982a381eed697ef9b435cf",
                         609, 151, "MIT", 224, "broad knowledge, and fast for its size"),
    "siglip-b16": HubModel("google/siglip-base-patch16-224", "7fd15f0689c79d79e38b1c2e2e2370a7bf2761ed",
                           816, 203, "Apache-2.0", 224, "more accurate than clip-b32, and slower"),
    "siglip2-b16": HubModel("google/siglip2-base-patch16-224", "75de2d55ec2d0b4efc50b3e9ad70dba96a7b2fa2",
                            1535, 375, "Apache-2.0", 224, "the most accurate, and searches in many languages"),
}  # fmt: skip


def wanted(reference: str) -> HubModel | None:
    """What a name of the list or `hf-hub:OWNER/NAME[@REVISION]` means; None for any other text."""
    found = REFERENCE.fullmatch(reference)
    return HubModel(found[1], found[2]) if found else MODELS.get(reference)


def downloaded() -> dict[Path, HubModel]:
    """The models that are here, the newest first: `origin.json` is written when everything else is."""
    found = {}
    for file in (files.cache_folder() / "models").glob(f"*/{ORIGIN}"):
        with suppress(OSError, ValueError, msgspec.ValidationError):
            found[file.parent] = msgspec.convert(files.read_json(file), HubModel)
    return dict(sorted(found.items(), key=lambda each: each[0].stat().st_mtime, reverse=True))


def local(reference: str) -> Path | None:
    """The folder of a model that was downloaded, of any revision if none is named; None if there is none."""
    if (asked := wanted(reference)) is None:
        return None
    own = ((path, its) for path, its in downloaded().items() if its.repository == asked.repository)
    return next((path for path, its in own if asked.revision in (None, its.revision, its.commit)), None)


def must_fetch(reference: str) -> bool:
    """Whether this is a model of the hub that is not here; one of the list is fetched only by `models get`."""
    if reference in MODELS and not local(reference):
        raise UserError(f"`{reference}` has not been downloaded", hint=f"`lapclip models get {reference}`")
    if reference not in MODELS and (near := suggest(reference, MODELS, cutoff=0.8)):
        raise UserError(f"there is no model `{reference}`{near}", hint="`lapclip models` lists them")
    return reference.startswith(PREFIX) and not local(reference)


def fetch(reference: str) -> LongWork[Path]:
    """Downloads a model, and returns its folder; after an interruption only what is missing."""
    from huggingface_hub import HfApi

    if (asked := wanted(reference)) is None:
        what = f"there is no model `{shortened(reference)}`{suggest(reference, MODELS)}"
        raise UserError(what, hint=f"`lapclip models` lists some; others are `{PREFIX}OWNER/NAME[@REVISION]`")
    if folder := local(reference):
        return folder
    name = asked.repository
    with reaching(asked) as hub:
        about = HfApi(hub).model_info(name, revision=asked.revision, files_metadata=True, timeout=SECONDS)
        there = {file.rfilename: file for file in about.siblings or ()}
        weights = [file for file in WEIGHTS if file in there][:1]
        sizes = {file: int(there[file].size or 0) for file in [*sorted(there.keys() & OTHERS), *weights]}
        tags = [tag.removeprefix("license:") for tag in about.tags or () if tag.startswith("license:")]
        licence = asked.licence or "".join(tags[:1]) or "unknown"
        if not re.fullmatch("[0-9a-f]{40}", commit := about.sha or "") or min([0, *sizes.values()]) < 0:
            raise ValueError("it names no commit, or sizes that are not possible")
    if not weights or (total := sum(sizes.values())) > MAX_BYTES:
        what = f"`{name}` has no `{WEIGHTS[0]}` of up to {size(MAX_BYTES)}; pickle and several files are not loaded"
        raise UserError(what, hint="choose another model")
    folder = files.cache_folder() / "models" / f"{name.replace('/', '--')}@{commit[:12]}"
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    done, hashes = 0, {}
    for file, num_bytes in sizes.items():
        for have in download(asked, commit, folder / file, num_bytes):
            yield Progress(f"downloading {reference} (MB)", (done + have) // 10**6, max(1, total // 10**6))
        done += num_bytes
        with (folder / file).open("rb") as opened:
            hashes[file] = hashlib.file_digest(opened, "sha256").hexdigest()
        expected = lfs.sha256 if (lfs := there[file].lfs) else hashes[file]
        if (folder / file).stat().st_size != num_bytes or hashes[file] != expected:
            files.remove(folder / file)
            what = f"`{file}` of `{name}` did not arrive as the hub describes it"
            raise UserError(what, hint="run the same command again")
    its = replace(asked, commit=commit, licence=licence, megabytes=total // 10**6, sha256=hashes)
    files.write_atomically(folder / ORIGIN, msgspec.json.encode(its))
    return folder


def download(asked: HubModel, commit: str, path: Path, num_bytes: int) -> Iterator[int]:
    """Fetches what is missing of a file; yields how many of its bytes are here."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    yield (have := path.stat().st_size if path.exists() else 0)
    if path.exists() and have >= num_bytes:
        return
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with reaching(asked) as hub:
        url = f"{hub}/{asked.repository}/resolve/{commit}/{path.name}"
        with get_session().stream("GET", url, headers=headers, timeout=SECONDS) as answer:
            hf_raise_for_status(answer)
            have = have if answer.status_code == 206 else 0
            with files.writing(path), path.open("ab" if have else "wb") as out:
                for chunk in answer.iter_bytes():
                    have += out.write(chunk[: num_bytes + 1 - have])  # a byte too many is noticed
                    yield have


@contextmanager
def reaching(asked: HubModel) -> Iterator[str]:
    """The address of the hub; whatever goes wrong between here and there becomes a sentence."""
    from huggingface_hub import constants, errors

    hub, name = constants.ENDPOINT, asked.repository
    try:
        yield hub
        return
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        what, hint = f"`{hub}` answered with status {status}", "run the same command again later"
        if status == 403 or isinstance(error, errors.GatedRepoError):
            what, hint = f"`{name}` requires access", f"ask for it at {hub}/{name}, then `hf auth login`"
        elif status in (401, 404):
            what, hint = f"there is no public model `{name}` at `{hub}`", "check the name and the revision"
    except (errors.HTTPError, ConnectionError, ValueError, TypeError, LookupError, AttributeError) as error:
        what = f"cannot reach a hub at `{hub}`: {shortened(str(error) or type(error).__name__)}"
        hint = "check the network, and run the same command again: what was downloaded is kept"
    raise UserError(what, hint=hint)
