"""The namespaces, links and shapes of one testbed, as calls of `ip` and `tc`.

Two supernodes are the two ends of one veth pair. More hang on a bridge in a namespace of its own, each by a veth pair.
Both ends of a pair are shaped, so every supernode sends and receives at no more than the rate. One supernode has no
link.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.testbed.commands import ip, ip_json, tc

DEVICE = "hplink"
_SUBNET = "10.77.0"
# tbf forwards up to `burst` bytes at once. A kernel packet on veth has up to 64 KiB, and the timer that refills the
# bucket runs about every millisecond, so the bucket must hold either.
_SMALLEST_BURST = 80_000
_BURST_S = 2.1e-3
_QUEUE_S = 50e-3


@dataclass(frozen=True)
class LinkBytes:
    """What crossed the link of one supernode so far, from the kernel's counters: bytes, protocol headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: LinkBytes) -> LinkBytes:
        return LinkBytes(self.sent - earlier.sent, self.received - earlier.received)


def address(supernode: int) -> str:
    """The address of a supernode on the link."""
    return f"{_SUBNET}.{supernode + 1}"


def add_namespace(name: str) -> None:
    """Make an empty namespace with its loopback up."""
    ip("netns", "add", name)
    ip("link", "set", "lo", "up", namespace=name)


def connect(names: list[str], switch: str) -> None:
    """Link the namespaces `names`, each by a device `DEVICE`; `switch` names the namespace of the bridge, if any."""
    if len(names) == 2:
        _add_pair(names[0], DEVICE, names[1], DEVICE)
    else:
        add_namespace(switch)
        ip("link", "add", "hpbridge", "type", "bridge", namespace=switch)
        ip("link", "set", "hpbridge", "up", namespace=switch)
        for index, name in enumerate(names):
            port = f"hpport{index}"
            _add_pair(name, DEVICE, switch, port)
            ip("link", "set", port, "master", "hpbridge", "up", namespace=switch)
    for index, name in enumerate(names):
        set_up(name, index)


def set_up(name: str, supernode: int) -> None:
    """Give the link device of a supernode its address and switch it on."""
    ip("address", "add", f"{address(supernode)}/24", "dev", DEVICE, namespace=name)
    ip("link", "set", DEVICE, "up", namespace=name)


def shape(names: list[str], switch: str, rate_mbit: float) -> None:
    """Limit both directions of the link of every supernode to `rate_mbit`."""
    ends = [(name, DEVICE) for name in names]
    if len(names) > 2:
        ends += [(switch, f"hpport{index}") for index in range(len(names))]
    burst = max(_SMALLEST_BURST, round(rate_mbit * 1e6 / 8 * _BURST_S))
    queue = max(2 * burst, round(rate_mbit * 1e6 / 8 * _QUEUE_S))
    for namespace, device in ends:
        limits = ("rate", f"{round(rate_mbit * 1e6)}bit", "burst", f"{burst}b", "limit", f"{queue}b")
        tc("qdisc", "replace", "dev", device, "root", "tbf", *limits, namespace=namespace)


def read_link_bytes(name: str) -> LinkBytes:
    """The counters of the link device of one supernode."""
    counters = ip_json("link", "show", DEVICE, namespace=name)[0]["stats64"]
    return LinkBytes(sent=counters["tx"]["bytes"], received=counters["rx"]["bytes"])


def _add_pair(namespace: str, device: str, other_namespace: str, other_device: str) -> None:
    end = ("type", "veth", "peer", "name", other_device, "netns", other_namespace)
    ip("link", "add", device, "netns", namespace, *end)
