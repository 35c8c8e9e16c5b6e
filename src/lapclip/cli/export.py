"""`lapclip export`: a model as a folder that other programs read, written, opened again and compared."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from lapclip.cli.flags import AsJson
from lapclip.cli.screen import print_json, say, working
from lapclip.units import size


def export(
    run: str,
    *,
    to: Literal["hf", "openclip"],
    output: Annotated[Path, Parameter(name=("--out", "--output"))],
    json: AsJson = False,
) -> int:
    """Write a model as a folder that other programs read; it is opened again and compared with the original.

    Args:
        run: a run, by name or path (its best checkpoint), or a folder or file with a model
        to: `hf` for transformers (the `vit-*` sizes and CLIP or SigLIP models), `openclip` for OpenCLIP (these CLIP
            models, `tiny` and other transformers); the default size `resnet-tiny` is for lapclip only
        output: the folder to write; it must not exist yet
    """
    from lapclip.runs.run import find_run
    from lapclip.search.index import path_of_model

    if path_of_model(run) is None:
        find_run(run)  # raises the error, before torch is imported
    with working("starting"):
        from lapclip.embedder import load
        from lapclip.export import folders

        embedder = load(run)
    with working("exporting"):
        done = folders.export(embedder, to, output.expanduser())
    if json:
        print_json({"path": str(done.path), "bytes": done.num_bytes, **done.measured, "notes": done.notes})
    for note in done.notes:
        say(note)
    lowest = f"the lowest cosine with the original is {done.measured['parity']['min_cosine']:.6f}"
    say(f"`{done.path}`, {size(done.num_bytes)}, for {folders.FORMATS[to]}; opened again, {lowest}")
    return 0
