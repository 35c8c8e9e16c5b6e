"""Whether the battery is so low that training should wait."""

from lapclip.machine.sensors import read_battery
from lapclip.units import parse_percent

SECONDS_BETWEEN_LOOKS = 20.0  # at the battery, while training


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
