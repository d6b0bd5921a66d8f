"""Addresses and interfaces of this host, without asking a name server more than needed. IPv4."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

from launch.errors import UsageError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
_SIOCGIFCONF = 0x8912  # all IPv4 addresses of this host, by interface
_RECORD = 40  # bytes of its struct ifreq: 16 of name, then a sockaddr_in


@dataclass(frozen=True)
class Endpoint:
    """Where the hosts of a job meet."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        host, colon, port = text.rpartition(":")
        example = "it is HOST:PORT, for example 10.0.0.1:29500"
        if not colon or not host or not port.isdecimal() or " " in host:
            raise UsageError(f"--rdzv-endpoint is '{text}'; {example}")
        if not 1 <= int(port) <= 65535:
            raise UsageError(f"--rdzv-endpoint is '{text}', whose port is {port}; a port is 1 to 65535: {example}")
        return cls(host, int(port))

    @property
    def names_loopback(self) -> bool:
        """Whether the user wrote a loopback address, as tests with two 'nodes' on one machine do."""
        return self.host == "localhost" or is_loopback(self.host)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Link:
    """The interface that this host's workers use, and its address."""

    interface: str
    address: str


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def resolve(host: str) -> str:
    """The IPv4 address of a name.

    Raises:
        UsageError: there is none.
    """
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--rdzv-endpoint names host '{host}', which has no IPv4 address here ({error}): give its address, or add it to /etc/hosts"
        ) from None


def own_addresses() -> dict[str, str]:
    """Address -> interface, for every IPv4 address of this host."""
    records = array.array("B", bytes(256 * _RECORD))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(records), records.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    raw = records.tobytes()[:size]
    table = {}
    for at in range(0, size, _RECORD):
        name = raw[at : at + 16].split(b"\0", 1)[0].decode()
        table[socket.inet_ntoa(raw[at + 20 : at + 24])] = name.split(":")[0]  # "eth0:1" is a second address of eth0
    return table


def route_address(address: str, port: int) -> str:
    """Our own address on the route to another host: connecting a UDP socket sends nothing, but chooses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise UsageError(
                f"no route leads to the rendezvous host {address} ({error.strerror}): check the address and the network"
            ) from None
        return str(probe.getsockname()[0])


def choose_link(endpoint: Endpoint, address: str, wanted: str | None, *, listens: bool, nodes: int) -> Link:
    """The interface of this host for the job: the one asked for, or the one that reaches (or is) the rendezvous host.

    Args:
        address: of the rendezvous host, resolved.
        wanted: --interface.
        listens: whether this is node 0, which owns the endpoint.

    Raises:
        UsageError: there is no such interface, or a job of several hosts would run on the loopback.
    """
    own = own_addresses()
    shown = ", ".join(f"{interface} {ip}" for ip, interface in own.items())
    if wanted is not None:
        ips = [ip for ip, interface in own.items() if interface == wanted]
        if not ips:
            raise UsageError(f"--interface is '{wanted}', which has no IPv4 address on this host: choose among {shown}")
        link = Link(wanted, address if address in ips else ips[0])
    elif is_loopback(address):
        link = Link(LOOPBACK_INTERFACE, address)
    else:
        ip = address if listens else route_address(address, endpoint.port)
        if ip not in own:
            raise UsageError(f"{address} of --rdzv-endpoint is no address of this host, and node 0 listens there: this host has {shown}")
        link = Link(own[ip], ip)
    if nodes > 1 and is_loopback(link.address) and not endpoint.names_loopback:
        raise UsageError(
            f"the job would use {link.interface} ({link.address}), the loopback, which no other host reaches "
            f"('{endpoint.host}' is {address} here): give --interface, or the network address in --rdzv-endpoint; this host has {shown}"
        )
    return link
