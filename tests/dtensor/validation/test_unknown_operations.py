"""Operations that no rule knows are propagated by value, and what is wrong inside of them is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dtensor.validation.operations import Block, followed, placements


class ScaledTanh(torch.autograd.Function):
    """tanh(x) * scale. On rank 1, `fault` spoils the value or the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, fault: str) -> torch.Tensor:
        y = x.tanh()
        ctx.save_for_backward(y, scale)
        ctx.fault = fault
        return y * scale + (1e-3 if fault == "value" else 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        y, scale = ctx.saved_tensors
        factor = 1.001 if ctx.fault == "gradient" else 1.0
        return grad * scale * (1 - y * y) * factor, (grad * y).flatten(0, -2).sum(0), None


@torch.library.custom_op("hp_plugin_tests::gated", mutates_args=())
def gated(x: torch.Tensor, scale: torch.Tensor, bias: float) -> torch.Tensor:
    """As a fused kernel of a third party: silu(x * scale) + bias."""
    return torch.nn.functional.silu(x * scale) + bias


def _gated_setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _gated_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, scale = ctx.saved_tensors
    s = torch.sigmoid(x * scale)
    inner = grad * s * (1 + x * scale * (1 - s))
    return inner * scale, (inner * x).flatten(0, -2).sum(0), None


gated.register_autograd(_gated_backward, setup_context=_gated_setup)


class Halves(torch.autograd.Function):
    """Two outputs: positive and negative part; the second is wrong where `fault` says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.clamp(min=0), x.clamp(max=0) * (1.01 if fault else 1.0)

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor, below: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, above, below), None


def tanh(fault: str, on: int = 1) -> Any:
    return lambda block, x: ScaledTanh.apply(x, block.scale, fault if block.rank == on else "")


def kernel(bias: float) -> Any:
    return lambda block, x: gated(x, block.scale, bias if block.rank == 1 else 0.0)


def halves(fault: bool) -> Any:
    def body(block: Block, x: torch.Tensor) -> torch.Tensor:
        above, below = Halves.apply(x, fault and block.rank == 1)
        return above - 0.5 * below

    return body


@pytest.mark.parametrize("ranks", [2, 4])
def test_placements_are_found_by_value(ranks: int) -> None:
    assert placements(followed(tanh(""), ranks=ranks), "ScaledTanh") == ("tp: shard(2)",)
    assert placements(followed(kernel(0.0), ranks=ranks), "hp_plugin_tests.gated") == ("tp: shard(2)",)
    assert placements(followed(halves(False), ranks=ranks), "Halves") == ("tp: shard(2)",) * 2


@pytest.mark.parametrize(
    ("body", "op", "tensor", "kind"),
    [
        (tanh("value"), "ScaledTanh", "output 0", "value"),
        (tanh("gradient"), "ScaledTanh", "gradient of input 0", "gradient"),
        (kernel(1e-3), "hp_plugin_tests.gated", "output 0", "value"),
        (halves(True), "Halves", "output 1", "value"),
        # The same code on all ranks, wrong because it takes a piece for the whole.
        (lambda block, x: torch.special.log_softmax(x, dim=-1), "special_log_softmax", "output 0", "value"),
        (lambda block, x: x - torch.std_mean(x, dim=-1)[1].unsqueeze(-1), "std_mean", "output 0", "value"),
        (lambda block, x: x / x.shape[-1], "div", "output 0", "value"),
    ],
    ids=["function", "backward", "kernel", "second_output", "softmax", "two_outputs", "size"],
)
def test_faults_inside_are_found(body: Any, op: str, tensor: str, kind: str) -> None:
    [finding] = followed(body).findings
    assert (finding.module, finding.op, finding.tensor, finding.kind) == ("block", op, tensor, kind)
    assert finding.index is not None
    assert finding.found == "none"


class SumOverRanks(torch.autograd.Function):
    """Adds up over a line of ranks; without one, as in one process, it gives what it gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: Any, back: bool) -> torch.Tensor:
        ctx.line, ctx.back = line, back
        out = x.clone()
        if line is not None:
            dist.all_reduce(out, group=line.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.clone()
        if ctx.line is not None and ctx.back:
            dist.all_reduce(grad, group=ctx.line.group)
        return grad, None, None


def normalised(back: bool) -> Any:
    """A norm over the divided dim, right only if gradients of the sum, used by each rank for its piece, are summed."""

    def body(block: Block, x: torch.Tensor) -> torch.Tensor:
        square = SumOverRanks.apply(x.square().sum(-1, keepdim=True), block.line, back)
        return x * torch.rsqrt(square + 1e-5) * block.scale

    return body


def test_functions_that_communicate_are_followed() -> None:
    report = followed(normalised(True))
    assert placements(report, "SumOverRanks") == ("tp: copy",)
    [finding] = followed(normalised(False)).findings
    assert (finding.op, finding.kind, finding.axis) == ("mul", "gradient", "tp")
    assert (finding.expected, finding.found) == ("tp: replicate", "tp: partial")


def direct(block: Block, x: torch.Tensor) -> torch.Tensor:
    total = x.detach().square().sum(-1, keepdim=True)
    if block.line is not None:
        dist.all_reduce(total, group=block.line.group)
    else:
        dist.all_reduce(total)  # one process: recorded as what it does among one rank
    return x / total.sqrt()


def test_collectives_called_in_a_module_do_nothing_in_one_process() -> None:
    assert placements(followed(direct), "all_reduce") == ("tp: replicate",)


def test_ranks_that_run_other_operations_are_found() -> None:
    [finding] = followed(lambda block, x: (x.sin() if block.rank else x.cos()) * 1.0).findings
    assert finding.kind == "structure"
    assert "operation sin" in finding.reason
    assert finding.rank == 1


def test_a_module_may_be_compared_at_its_borders_only() -> None:
    def body(block: Block, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., i : i + 1].sin() for i in range(x.shape[-1])], -1)

    [finding] = followed(body).findings
    assert (finding.op, finding.kind) == ("__getitem__", "value")
    report = followed(body, regions=["block"])
    report.raise_if_different()
    assert [o.how for o in report.operations if o.module == "block"] == ["region"]
