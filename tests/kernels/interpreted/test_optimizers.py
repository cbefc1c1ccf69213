"""Optimizers and clipping on the kernels that the table gives a device: they are taken, and the result stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.triton_kernels import launch
from hp_plugin.core.muon import HyperMuon
from hp_plugin.core.optim import HyperAdamW, clip_grad_norm_

ON_CPU = table.Kernels(frozenset(), {})


class Calls:
    """Counts the launches by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for name in ("scale_", "decay_update_", "adamw_", "sums_of_squares", "symmetric_product"):
            monkeypatch.setattr(launch, name, self._counting(name, getattr(launch, name)))

    def _counting(self, name: str, run: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            return run(*arguments, **options)

        return counted


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 260))


def trained(make: Any, steps: int = 3) -> tuple[list[Tensor], list[float]]:
    """Weights after a few steps with clipping, and the norms."""
    net = model()
    optimizer = make(net)
    norms = []
    for step in range(steps):
        torch.manual_seed(step)
        net(torch.randn(8, 12)).square().mean().backward()
        norms.append(float(clip_grad_norm_(net.parameters(), 0.01)))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()], norms


def test_adamw_and_clipping(as_cuda: table.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    found, norms = trained(lambda net: HyperAdamW(net.parameters(), lr=1e-2))
    assert calls.names.count("adamw_") == 3 * 6
    assert calls.names.count("sums_of_squares") == 3
    monkeypatch.setattr(table, "kernels", lambda: ON_CPU)
    expected, theirs = trained(lambda net: HyperAdamW(net.parameters(), lr=1e-2))
    assert len(calls.names) == 3 * 7
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert norms == pytest.approx(theirs, rel=1e-6)


def test_a_choice_of_the_caller_stands(as_cuda: table.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    trained(lambda net: HyperAdamW(net.parameters(), foreach=True), steps=1)
    assert "adamw_" not in calls.names


def test_muon(as_cuda: table.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    found, _ = trained(lambda net: HyperMuon(net, ns_dtype=torch.float32))
    assert calls.names.count("decay_update_") == 3 * 2
    monkeypatch.setattr(table, "kernels", lambda: ON_CPU)
    expected, _ = trained(lambda net: HyperMuon(net, ns_dtype=torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_exact_muon_keeps_to_the_operations_of_torch(as_cuda: table.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    found, _ = trained(lambda net: HyperMuon(net, exact=True))
    assert "decay_update_" not in calls.names
    assert "symmetric_product" not in calls.names
    assert found
