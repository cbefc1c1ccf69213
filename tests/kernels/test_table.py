"""The table of device kernels: what is chosen, what is off and why, and what of other packages is looked for."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hp_plugin.core.kernels import availability, choices, symmetric, table
from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.kernel_choices import newton_schulz_choices
from hp_plugin.core.muon.newton_schulz import NewtonSchulz, orthogonalize_reference
from hp_plugin.errors import ConfigurationError

ALL = frozenset(availability.SETS)


def test_everything_is_off_until_it_is_switched_on() -> None:
    chosen = table.Kernels(availability.switched_on(""), {})
    for row in table.KERNEL_TABLE:
        for device_type in row.devices:
            assert chosen.choose(row.operation, device_type, row.dtypes[0], 1 << 20) == "torch"
    assert "HP_KERNELS=triton switches it on" in str(chosen.missing("triton"))


def test_the_cpu_has_no_rows() -> None:
    chosen = table.Kernels(ALL, {})
    assert {chosen.choose(row.operation, "cpu", row.dtypes[0], 1 << 20) for row in table.KERNEL_TABLE} == {"torch"}


def test_the_first_row_that_fits_and_is_present_is_taken() -> None:
    everything = table.Kernels(ALL, {})
    assert everything.choose("adamw_", "cuda", torch.float32) == "apex"
    assert everything.choose("adamw_", "cuda", torch.bfloat16) == "triton"
    assert everything.choose("adamw_", "npu", torch.float32) == "npu"
    assert everything.choose("symmetric_product", "npu", torch.float16, 256) == "triton"
    assert everything.choose("symmetric_product", "npu", torch.float16, 255) == "torch"
    assert everything.choose("symmetric_product", "cuda", torch.float32, 2048) == "blocks"
    without = table.Kernels(ALL, {"apex": "NVIDIA's apex is not installed."})
    assert without.choose("adamw_", "cuda", torch.float32) == "triton"
    assert without.missing("apex") == "NVIDIA's apex is not installed."


def test_the_switch_takes_names_and_refuses_others() -> None:
    assert availability.switched_on(" Triton, blocks ") == {"triton", "blocks"}
    assert availability.switched_on("all") == ALL
    with pytest.raises(ConfigurationError, match="'cutlass'; it takes triton, blocks, apex, npu"):
        availability.switched_on("triton,cutlass")


def test_the_doctor_is_told_of_a_wrong_switch() -> None:
    program = "from hp_plugin.core.kernels import chosen_kernels\nchosen_kernels()"
    environment = {**os.environ, "HP_KERNELS": "everything"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode != 0
    assert "HP_KERNELS=everything names 'everything'" in result.stderr


def test_the_listing_says_what_serves_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        table, "kernels", lambda: table.Kernels(frozenset({"triton", "apex"}), {"npu": "No torch_npu."})
    )
    listed = [choice for choice in choices.chosen_kernels() if choice.device_type in table.DEVICE_TYPES]
    assert len(listed) == sum(len(row.devices) for row in table.KERNEL_TABLE)
    copies = {c.reason: c.implementation for c in listed if c.operation == "scale_copy_" and c.device_type == "cuda"}
    assert copies == {
        "one pass instead of a cast and a product.": "triton",
        "apex: Serves only what triton does not.": "torch",
    }
    (norm,) = [choice for choice in listed if choice.operation == "rms_norm"]
    assert (norm.implementation, norm.reason) == ("torch", "npu: No torch_npu.")
    products = [c for c in listed if c.operation == "symmetric_product" and c.device_type == "cuda"]
    assert products[0].applies_to == "bfloat16/float16, 256 rows or more"


def test_orthogonalization_is_listed_by_device_dtype_and_aspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "kernels", lambda: table.Kernels(ALL, {}))
    found = {(c["device_type"], c["dtype"], c["matrices"]): c for c in newton_schulz_choices()}
    wide = found["npu", "float16", "8 of 4096 x 16384"]
    assert (wide["kernel"], wide["symmetric_products"]) == ("gram", "triton")
    assert found["cuda", "bfloat16", "8 of 4096 x 4096"]["kernel"] == "batched"
    assert found["cuda", "float32", "8 of 4096 x 4096"]["symmetric_products"] == "blocks"
    assert {c["symmetric_products"] for c in found.values() if c["device_type"] == "cpu"} == {"torch"}


@pytest.mark.parametrize("shape", [(1, 5), (37, 20), (2, 64, 30), (3, 67, 67)])
@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_block_recursion_equals_the_whole_product(shape: tuple[int, ...], levels: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    add = torch.randn((*shape[:-1], shape[-2]), generator=generator, dtype=torch.float64)
    add = add + add.mT
    found, expected = torch.full_like(add, 9.0), torch.empty_like(add)
    options = {"add": add, "alpha": 0.5, "beta": -2.0, "shift": 3.0}
    symmetric.block_symmetric_product(x, x, **options, out=found, levels=levels)  # type: ignore[arg-type]
    symmetric.symmetric_product_reference(x, x, **options, out=expected)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    exact = 0.5 * x @ x.mT - 2 * add + 3 * torch.eye(shape[-2], dtype=torch.float64)
    torch.testing.assert_close(expected, exact, rtol=1e-13, atol=1e-13)
    assert torch.equal(found, found.mT)


def test_two_levels_compute_five_eighths(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = []
    product = symmetric._product

    def counted(left: torch.Tensor, right: torch.Tensor, **options: object) -> None:
        elements.append(left.shape[-2] * right.shape[-2])
        product(left, right, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(symmetric, "_product", counted)
    x = torch.randn(64, 8)
    symmetric.symmetric_product(x, x, implementation="blocks")
    assert (len(elements), sum(elements)) == (7, 64 * 64 * 5 // 8)


@pytest.mark.parametrize("kernel", ["gram", "batched", "loop"])
def test_orthogonalization_by_blocks(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    chosen = table.Kernels(frozenset({"blocks"}), {}, {"cpu": "cuda"})
    monkeypatch.setattr(table, "kernels", lambda: chosen)
    row = table.KernelRow("symmetric_product", "blocks", ("cuda",), (torch.float16,), "test", min_rows=16)
    monkeypatch.setattr(table, "KERNEL_TABLE", (row,))
    steps = resolve_coefficients("quintic5", None)
    stack = torch.randn(2, 57, 130, generator=torch.Generator().manual_seed(1))
    found = NewtonSchulz(steps, dtype=torch.float16, kernel=kernel)(stack)  # type: ignore[arg-type]
    for mine, matrix in zip(found, stack):
        exact = orthogonalize_reference(matrix, steps)
        assert float((mine.double() - exact).norm() / exact.norm()) < 1e-2


def test_a_package_named_apex_that_is_another_project_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert availability.foreign_apex() is None  # none is installed with the tests
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    information = tmp_path / "apex-0.9.10.dev0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("apex") == "0.9.10.dev0"
    sentence = availability.foreign_apex()
    assert sentence is not None
    assert "(0.9.10.dev0) is not NVIDIA's" in sentence
    assert availability.absent_sets()["apex"] == sentence
    (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    assert availability.foreign_apex() is None
    assert "without its CUDA extensions" in availability.absent_sets()["apex"]
