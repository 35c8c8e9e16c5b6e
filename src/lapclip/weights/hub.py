"""Pretrained models of the Hugging Face hub: a list for laptops, and how any of them is fetched.

A repository is untrusted: only files with known names are fetched, and none that could execute code when opened.
"""

import hashlib
import json
import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from lapclip import files
from lapclip.errors import UserError, shortened, suggest
from lapclip.units import Progress, size

PREFIX, ORIGIN = "hf-hub:", "origin.json"
WEIGHTS = ("model.safetensors", "open_clip_model.safetensors")  # the first of these that there is
OTHERS = {
    "config.json", "open_clip_config.json", "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "preprocessor_config.json", "processor_config.json",
}  # fmt: skip
MAX_BYTES = 16 * 10**9  # of a model: more is none for a laptop
WORD = r"[A-Za-z0-9](?:\w|[.-](?![.-]))*"  # neither `..` nor `--`
REFERENCE = re.compile(rf"{PREFIX}({WORD}/{WORD})(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?", re.ASCII)
SECONDS = 30  # to wait for an answer


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub; for a downloaded model, in `origin.json`, also where exactly its files come from."""

    repository: str
    revision: (
        str | None
    )  # a commit, branch or tag; in the list a commit, so that everybody gets the same files
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
    if not reference.startswith(PREFIX):
        return MODELS.get(reference)
    if found := REFERENCE.fullmatch(reference):
        return HubModel(found[1], found[2])
    what = f"`{shortened(reference)}` is not `{PREFIX}OWNER/NAME` or `{PREFIX}OWNER/NAME@REVISION`"
    raise UserError(what, hint=f"write it as in `{PREFIX}{MODELS['clip-b32'].repository}`")


def folders_of(repository: str = "*/*") -> list[Path]:
    """The folders of all revisions, also of those whose download is not complete; the newest first."""
    found = (files.cache_folder() / "models").glob(f"{repository.replace('/', '--')}@*")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def downloaded(repository: str = "*/*") -> dict[Path, HubModel]:
    """The models that are here: `origin.json` is written when everything else is."""
    found = {}
    for path in folders_of(repository):
        with suppress(OSError, ValueError, msgspec.ValidationError):
            found[path] = msgspec.convert(files.read_json(path / ORIGIN), HubModel)
    return found


def local(reference: str) -> Path | None:
    """The folder of a model that was downloaded, of any revision if none is named; None if there is none."""
    if asked := wanted(reference):
        for path, its in downloaded(asked.repository).items():
            if asked.revision in (None, its.revision, its.commit):
                return path
    return None


def must_fetch(reference: str) -> bool:
    """Whether this is a model of the hub that is not here; one of the list is fetched only by `models get`."""
    is_missing = wanted(reference) is not None and local(reference) is None
    if is_missing and reference in MODELS:
        hint = f"`lapclip models get {reference}`"
        raise UserError(f"`{reference}` has not been downloaded", hint=hint)
    return is_missing


def fetch(reference: str) -> Generator[Progress, None, Path]:
    """Downloads a model, and returns its folder; after an interruption only what is missing."""
    from huggingface_hub import HfApi

    if (asked := wanted(reference)) is None:
        near = suggest(reference, [*MODELS, PREFIX + reference])
        hint = f"`lapclip models` lists some; any other is `{PREFIX}OWNER/NAME`"
        raise UserError(f"there is no model `{shortened(reference)}`{near}", hint=hint)
    if folder := local(reference):
        return folder
    with reaching(asked) as hub:
        about = HfApi(hub).model_info(
            asked.repository, revision=asked.revision, files_metadata=True, timeout=SECONDS
        )
        there = {file.rfilename: file for file in about.siblings or ()}
        licences = [tag.removeprefix("license:") for tag in about.tags or () if tag.startswith("license:")]
        weights = [name for name in WEIGHTS if name in there][:1]
        sizes = {name: int(there[name].size or 0) for name in [*sorted(there.keys() & OTHERS), *weights]}
        total = sum(sizes.values())
        if not re.fullmatch("[0-9a-f]{40}", commit := about.sha or "") or min([0, *sizes.values()]) < 0:
            raise ValueError("it names no commit, or sizes that are not possible")
    if not weights or total > MAX_BYTES:
        what = f"`{asked.repository}` has no `{WEIGHTS[0]}`; weights as pickle or in several files are not loaded"
        what = (
            what
            if not weights
            else f"`{asked.repository}` has {size(total)}, and {size(MAX_BYTES)} is the limit"
        )
        raise UserError(what, hint="choose another model")
    folder = files.cache_folder() / "models" / f"{asked.repository.replace('/', '--')}@{commit[:12]}"
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    done, hashes = 0, {}
    for name, num_bytes in sizes.items():
        for have in download(asked, commit, folder / name, num_bytes):
            yield Progress(f"downloading {reference} (MB)", (done + have) // 10**6, max(1, total // 10**6))
        done += num_bytes
        with (folder / name).open("rb") as opened:
            hashes[name] = hashlib.file_digest(opened, "sha256").hexdigest()
        lfs = there[name].lfs
        if (folder / name).stat().st_size != num_bytes or (lfs and lfs.sha256 != hashes[name]):
            files.remove(folder / name)
            what = f"`{name}` of `{asked.repository}` did not arrive as the hub describes it"
            raise UserError(what, hint="run the same command again")
    licence = asked.licence or shortened((licences or ["unknown"])[0])
    its = replace(asked, commit=commit, licence=licence, megabytes=total // 10**6, sha256=hashes)
    files.write_atomically(folder / ORIGIN, json.dumps(asdict(its), indent=2))
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
                for chunk in answer.iter_bytes(2**20):
                    have += out.write(chunk)
                    yield have
                    if have > num_bytes:
                        return


@contextmanager
def reaching(asked: HubModel) -> Iterator[str]:
    """The address of the hub; whatever goes wrong between here and there becomes a sentence."""
    from huggingface_hub import constants, errors

    hub = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    name = f"`{asked.repository}{'@' if asked.revision else ''}{asked.revision or ''}`"
    try:
        yield hub
        return
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        what, hint = f"`{hub}` answered with status {status}", "run the same command again later"
        if status == 403 or isinstance(error, errors.GatedRepoError):
            what = f"{name} is not open to everybody"
            hint = f"ask for access at {hub}/{asked.repository}, then run `hf auth login`"
        elif status in (401, 404):
            what, hint = (
                f"there is no public model {name} at `{hub}`",
                "check the name, and the revision if there is one",
            )
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        what = f"cannot reach `{hub}`: {shortened(str(error) or type(error).__name__)}"
        hint = "check the network, and run the same command again: what was downloaded is kept"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what, hint = f"`{hub}` does not answer as a hub does: {shortened(str(error))}", "check HF_ENDPOINT"
    raise UserError(what, hint=hint)
