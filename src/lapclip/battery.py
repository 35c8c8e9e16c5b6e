"""Whether the battery is so low that training should wait."""

from lapclip.amounts import parse_percent
from lapclip.events import Warned
from lapclip.sensors import read_battery

SECONDS_BETWEEN_LOOKS = 20.0  # at the battery, while training


def nothing_to_watch(pause_below: str | None, step: int) -> Warned | None:
    """For a machine that has no battery, or none that can be read."""
    if pause_below is None or read_battery() is not None:
        return None
    return Warned(
        step,
        message=f"no battery can be read here, so that training never waits for one to be above {pause_below}",
        hint="leave `--pause-below` away on this machine",
        kind="no-battery",
    )


def reason_to_wait(pause_below: str | None) -> str | None:
    """Why training should wait, in words; None when it should not, or when nobody knows."""
    if pause_below is None:
        return None
    battery = read_battery()
    if battery is None or battery.is_plugged or battery.percent >= parse_percent(pause_below):
        return None
    return (
        f"the battery is at {battery.percent:.0f}%, below {parse_percent(pause_below):g}%, and not plugged in"
    )
