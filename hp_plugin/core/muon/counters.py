"""What one Muon step did on this rank, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hp_plugin.core.topology import Topology

if TYPE_CHECKING:
    from hp_plugin.core.muon.messages import Leg
    from hp_plugin.core.muon.plan import Wave


@dataclass
class MuonCounters:
    """Work and messages of one step on this rank. Sums over ranks are the job's.

    Attributes:
        topology: Which ranks share a supernode. None: the ranks of one replica count as one.
        newton_schulz_calls: Matrices that this rank orthogonalized.
        flops: Of those orthogonalizations, by the formula of the kernel.
        collectives: Issued, set-up not included.
        received_bytes_intra: Received from ranks of this supernode.
        received_bytes_inter: Received from ranks of other supernodes.
        flag_bytes: Of the bytes received, those that say who had a gradient.
    """

    topology: Topology | None = None
    newton_schulz_calls: int = 0
    flops: int = 0
    collectives: int = 0
    received_bytes_intra: int = 0
    received_bytes_inter: int = 0
    flag_bytes: int = 0

    @property
    def received_bytes(self) -> int:
        """Received from other ranks."""
        return self.received_bytes_intra + self.received_bytes_inter

    def count_messages(self, legs: Sequence[Leg], rank: int, wave: Wave) -> None:
        """Counts the collectives of a wave and what this rank receives in them."""
        itemsize = wave.newton_schulz.dtype.itemsize
        for leg in legs:
            self.collectives += 1
            for peer, items in zip(leg.communicator.ranks, leg.receives, strict=True):
                if peer == rank:
                    continue
                nbytes = sum(item.piece.numel + 1 for item in items) * itemsize
                self.flag_bytes += len(items) * itemsize
                if self._is_near(rank, peer, wave):
                    self.received_bytes_intra += nbytes
                else:
                    self.received_bytes_inter += nbytes

    def _is_near(self, rank: int, peer: int, wave: Wave) -> bool:
        if self.topology is not None:
            return self.topology.is_within_supernode((rank, peer))
        return wave.places[rank][0] == wave.places[peer][0]

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for logs."""
        numbers = asdict(self)
        del numbers["topology"]
        return {**numbers, "received_bytes": self.received_bytes}
