"""The machine itself: its facts, and how fast each device multiplies and copies."""

from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

from lapclip.autotune.cache import folder_for, is_of, load, store
from lapclip.bench.rates import about_torch, bandwidth_gbs, gemm_gflops
from lapclip.machine.device import present_devices
from lapclip.machine.hardware import read_machine


@dataclass(frozen=True)
class Overview:
    """What a person would say of a machine before training on it."""

    machine: dict[str, Any]
    rates: dict[str, dict[str, float]]  # by device: gemm_gflops and bandwidth_gbs


def look_over(*, fresh: bool) -> Generator[str, None, Overview]:
    """Reads the facts anew; rates come from the cache if they were measured before."""
    machine = read_machine()
    devices = list(present_devices())
    facts = asdict(machine) | {
        "torch": about_torch(),
        "devices": [{"name": device.name, "about": device.about()} for device in devices],
    }
    file = folder_for(machine, {"rates": [device.name for device in devices]}) / "rates.json"
    known = None if fresh else load(file)
    rates = rates_from(known, [device.name for device in devices])
    if not rates:
        for device in devices:
            yield f"multiplying and copying on {device.name}"
            rates[device.name] = {
                "gemm_gflops": gemm_gflops(device),
                "bandwidth_gbs": bandwidth_gbs(device),
            }
        store(file, {"rates": rates})
    return Overview(facts, rates)


def rates_from(stored: dict[str, Any] | None, names: list[str]) -> dict[str, dict[str, float]]:
    """The rates of all these devices, or nothing."""
    rates = (stored or {}).get("rates")
    if not isinstance(rates, dict) or set(rates) != set(names):
        return {}
    kinds = ("gemm_gflops", "bandwidth_gbs")
    is_whole = all(
        isinstance(rate, dict) and all(is_of(float, rate.get(kind)) and rate[kind] > 0 for kind in kinds)
        for rate in rates.values()
    )
    return rates if is_whole else {}


def in_words(overview: Overview) -> list[str]:
    """The facts as a few lines."""
    machine, torch = overview.machine, overview.machine["torch"]
    fast, slow = machine["num_performance_cores"], machine["num_efficiency_cores"]
    kinds = f" ({fast} performance, {slow or 0} efficiency)" if fast else ""
    caches = ", ".join(f"{name} {kilobytes(size)}" for name, size in machine["caches"].items())
    built = ", ".join(part for part in (torch["capability"], torch["blas"]) if part)
    lines = [
        f"{machine['chip']}, {machine['num_cores']} cores{kinds}, {machine['memory_bytes'] / 1e9:.0f} GB of memory,"
        f" {machine['available_bytes'] / 1e9:.0f} GB free",
        machine["system"],
        f"Python {machine['python']}, torch {torch['version']} ({built})",
    ]
    if caches:
        lines.append(f"caches: {caches}")
    for device in machine["devices"]:
        rate = overview.rates[device["name"]]
        lines.append(
            f"{device['name']} ({device['about']}): products {rate['gemm_gflops']:,.0f} GFLOP/s,"
            f" memory {rate['bandwidth_gbs']:.1f} GB/s"
        )
    return lines


def kilobytes(size: int) -> str:
    return f"{size / 2**20:.0f} MB" if size >= 2**20 else f"{size / 2**10:.0f} kB"
