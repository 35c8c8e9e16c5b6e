"""Signs in the gradients: far longer than usual, or next to nothing in one layer."""

from collections import deque
from collections.abc import Iterator
from statistics import fmean, median

from lapclip.config import Config
from lapclip.diagnose.finding import Finding
from lapclip.runs.events import Event, Inspected, Started, Step

BLOCK_STEPS = 50  # judged together: single long gradients are usual and are shortened
SOME_STEPS = 10  # of a block that must be far too long
FAR_LONGER = 10.0  # than usual; runs that learned, in batches of 8, had single ones 20 times as long
LOSS_ROSE = 1.1  # times its lowest: longer gradients while the loss falls are learning
MUCH_DECAY = 1.0  # of the weights; 0.1 is usual
NUM_INSPECTIONS = 5  # in a row, about half a minute
VANISHED = 1e-4  # of the longest in its tower; 0.02 in runs that learned, 0.002 at far too high a rate


class Exploding:
    """The gradient is far longer than it used to be, again and again, and the loss rises."""

    def __init__(self, config: Config):
        self.config = config
        self.begin_anew()

    def begin_anew(self) -> None:
        self.block: list[Step] = []
        self.usual = self.lowest_loss = float("inf")
        self.norms: dict[str, float] = {}  # of the layers, when last looked at

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.begin_anew()
        if isinstance(event, Inspected):
            self.norms = event.grad_norms
        if not isinstance(event, Step):
            return
        self.block.append(event)
        if len(self.block) < BLOCK_STEPS:
            return
        norms, loss = sorted(step.grad_norm for step in self.block), fmean(step.loss for step in self.block)
        often = norms[-SOME_STEPS]
        is_far = often >= FAR_LONGER * max(self.usual, self.config.train.clip_norm)
        if self.usual < float("inf") and is_far and loss >= LOSS_ROSE * self.lowest_loss:
            yield self.in_words(often, loss)
        self.usual, self.lowest_loss = min(self.usual, median(norms)), min(self.lowest_loss, loss)
        self.block = []

    def in_words(self, norm: float, loss: float) -> Finding:
        layers = {layer: length for layer, length in self.norms.items() if layer != "scale"}
        where = f", the longest in `{max(layers, key=lambda layer: layers[layer])}`" if layers else ""
        message = (
            f"gradients explode: again and again {norm:.3g} or longer, where {self.usual:.2g} was usual{where};"
            f" the loss has risen from {self.lowest_loss:.2f} to {loss:.2f}"
        )
        return Finding("exploding-gradients", message, f"start again with {calmer(self.config)}")


class Vanishing:
    """A layer's gradient is next to nothing beside the others of its tower: it does not learn."""

    def __init__(self, config: Config):
        self.config = config
        self.inspections: deque[Inspected] = deque(maxlen=NUM_INSPECTIONS)

    def look(self, event: Event) -> Iterator[Finding]:
        if isinstance(event, Started):
            self.inspections.clear()
        if not isinstance(event, Inspected) or not event.grad_norms:
            return
        self.inspections.append(event)
        if len(self.inspections) < NUM_INSPECTIONS:
            return
        each = [vanished(inspected.grad_norms) for inspected in self.inspections]
        always = [layer for layer in each[-1] if all(layer in layers for layers in each)]
        if always:
            yield self.in_words(always, event.grad_norms)

    def in_words(self, layers: list[str], norms: dict[str, float]) -> Finding:
        first = layers[0]
        among = {layer: norm for layer, norm in norms.items() if layer.split(".")[0] == first.split(".")[0]}
        longest = max(among, key=lambda layer: among[layer])
        who = f"`{first}` and {'another layer' if len(layers) == 2 else f'{len(layers) - 1} others'} hardly learn"
        message = (
            f"{who if len(layers) > 1 else f'`{first}` hardly learns'}: the gradient of `{first}` is"
            f" {norms[first]:.1e} long, that of `{longest}` {norms[longest]:.1e}"
        )
        return Finding("vanishing-gradients", message, f"start again with {calmer(self.config)}")


def vanished(norms: dict[str, float]) -> list[str]:
    """The layers whose gradient is nothing beside the longest one of their tower, which itself is not nothing."""
    found = []
    for tower in ("image", "text"):
        own = {layer: norm for layer, norm in norms.items() if layer.startswith(f"{tower}.")}
        longest = max(own.values(), default=0.0)
        found += [layer for layer, norm in own.items() if longest > 0 and norm < VANISHED * longest]
    return found


def calmer(config: Config) -> str:
    """The setting that most likely makes gradients what they should be."""
    if config.train.weight_decay >= MUCH_DECAY:
        return "less weight decay, which shrinks the weights: `--weight-decay 0.1`"
    return f"a lower learning rate: `--lr {(config.train.lr or 1e-3) / 3:.1g}`"
