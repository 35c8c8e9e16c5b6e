"""Where the server is reached: which address it binds, by which names it may be meant, what is printed."""

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from lapclip.errors import UserError
from lapclip.serve.http import bracketed, own_hosts, resolve


def is_local(host: str) -> bool:
    """Whether only this machine can reach that address."""
    return ipaddress.ip_address(resolve(host)[1].partition("%")[0]).is_loopback


def machine_addresses() -> list[str]:
    """This machine's addresses in its networks, IPv4 first."""
    found = [
        (address.family, address.address)
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]
    return [
        address
        for _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET)
        if not ipaddress.ip_address(address).is_loopback
    ]


def names_of(host: str) -> list[str]:
    """The names and addresses that mean this server, the one to print first."""
    number = resolve(host)[1]
    if not ipaddress.ip_address(number.partition("%")[0]).is_unspecified:
        return list(dict.fromkeys([host, number]))
    name = socket.gethostname().lower()
    local = [name, name if name.endswith(".local") else f"{name}.local"]
    return [*machine_addresses(), *local]


def hosts_of(names: Sequence[str], port: int, allowed: Sequence[str]) -> frozenset[str]:
    """What the `Host` header may say; a name that was allowed may be behind another port, a proxy's."""
    hosts = {f"{bracketed(name.lower())}:{port}" for name in names} | own_hosts(port)
    for name in allowed:
        if not name or any(sign in name for sign in "/@ *,"):
            raise UserError(f"`{name}` is no name of a machine", hint="write it as `photos.example.org`")
        hosts |= {name.lower(), f"{name.lower()}:{port}"}
    return frozenset(hosts | ({host.removesuffix(":80") for host in hosts} if port == 80 else set()))
