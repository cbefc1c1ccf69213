"""A training script as a user writes it, with the public names only; started by torchrun.

Usage: plain_pytorch.py OUTPUT. Rank 0 writes the losses of three steps, as JSON, to OUTPUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import hp_plugin
from tests.fsdp.models import loss_of, make_model, micro_batch
from tests.fsdp.training import MAX_NORM, OPTIMIZER


def main(output: str) -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    topology = hp_plugin.Topology.from_supernode_size(size, size // 2)
    mesh = hp_plugin.build_mesh(data_parallel_replicate_degree=2, topology=topology, device_type="cpu")
    mesh = mesh["dp_replicate", "dp_shard"]

    model = make_model("transformer")
    for block in model.blocks:
        hp_plugin.fully_shard(block, mesh=mesh)
    hp_plugin.fully_shard(model, mesh=mesh)
    optimizer = hp_plugin.HyperAdamW(model.parameters(), **OPTIMIZER)

    losses = []
    for step in range(3):
        inputs, targets = micro_batch("transformer", step=step, index=0, count=1, share=dist.get_rank(), shares=size)
        loss = loss_of("transformer", model(inputs), targets)
        loss.backward()
        hp_plugin.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
