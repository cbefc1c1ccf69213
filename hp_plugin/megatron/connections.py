"""`CUDA_DEVICE_MAX_CONNECTIONS`: tensor parallelism asks for 1, overlap of collectives with computation for more.

With one connection the kernels of all streams of a GPU start in the order in which the host queued them. Megatron
relies on that before Blackwell to start a tensor-parallel collective ahead of the matrix product that runs beside it,
and insists on 1 where the tensor- or context-parallel size is above 1 (`validate_args` in
`megatron/training/arguments.py`). For FSDP the same order makes a gather wait for computation that was queued before
it. Of this nothing was run: there was no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def connections_line(args: argparse.Namespace, environment: Mapping[str, str], *, device: str) -> str | None:
    """What to tell the user about the variable, or None where there is nothing to tell.

    Args:
        args: Megatron's arguments.
        environment: That of the process.
        device: "cuda", "npu" or "cpu"; the variable is CUDA's.
    """
    if device != "cuda" or environment.get(VARIABLE) != "1":
        return None
    needs = [
        flag
        for flag, attribute in (
            ("--tensor-model-parallel-size", "tensor_model_parallel_size"),
            ("--context-parallel-size", "context_parallel_size"),
        )
        if getattr(args, attribute, 1) > 1
    ]
    if needs:
        return (
            f"{VARIABLE} is 1, as {' and '.join(needs)} needs before Blackwell. HyperFSDP's gathers and reductions "
            "then start in the order in which the host queued them, behind computation: compare with a layout "
            "that has no tensor parallelism, and a higher value."
        )
    return (
        f"{VARIABLE} is 1: HyperFSDP's gathers and reductions then start in the order in which the host queued them, "
        "behind computation. No flag of this job needs 1; unset the variable."
    )
