"""Which ranks share a supernode and, from that, device meshes whose shard axis stays on the fast links."""

from __future__ import annotations

from hp_plugin.core.topology.adopt import mesh_from_group, shard_groups
from hp_plugin.core.topology.link import Link, measure_link
from hp_plugin.core.topology.mesh import AXES, build_mesh
from hp_plugin.core.topology.topology import Topology
from hp_plugin.core.topology.traffic import Traffic, TrafficRecorder

__all__ = [
    "AXES",
    "Link",
    "Topology",
    "Traffic",
    "TrafficRecorder",
    "build_mesh",
    "measure_link",
    "mesh_from_group",
    "shard_groups",
]
