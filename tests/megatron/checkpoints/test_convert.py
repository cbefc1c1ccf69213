"""Weights of Megatron's checkpoints as safetensors: read without Megatron, equal to what Megatron reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_plugin.convert import convert, format_of
from hp_plugin.errors import UnsupportedError
from tests.megatron import training
from tests.megatron.cases import tiny_job
from tests.support import init_gloo, run_ranks


def read_by_megatron(*, directory: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint that is no optimizer state, as Megatron itself puts it together."""
    from megatron.core import dist_checkpointing

    init_gloo()
    found: dict[str, Any] = dist_checkpointing.load_plain_tensors(directory)
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saver", ["", "--use-hyperfsdp --hyperfsdp-supernode-size 2"])
def test_weights_of_torch_dist_become_safetensors_by_megatrons_names(
    corpus: list[str], tmp_path: Path, saver: str
) -> None:
    library = pytest.importorskip("safetensors.torch")
    save = [*saver.split(), "--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    argv = [*tiny_job("--train-iters", "2"), *corpus, *save]
    run_ranks(2, training.train, flavour="megatron", timeout=200, argv=argv, keep_weights=False)
    without = "import sys; sys.modules['megatron'] = None; from hp_plugin.cli.main import app; app()"
    command = ["convert", tmp_path / "ckpt", tmp_path / "model", "--to", "safetensors", "--verify", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", without, *command], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    report, folder = json.loads(done.stdout), tmp_path / "ckpt" / "iter_0000002"
    assert report["source"] == str(folder) and report["source_format"] == "Megatron torch_dist"
    assert report["verified"] == report["weights"]
    assert format_of(folder) == "torch_dist"
    expected = run_ranks(1, read_by_megatron, flavour="megatron", timeout=100, directory=str(folder))[0]
    found = library.load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys() and len(found) > 5
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for to in ("hyperfsdp", "universal"):
        with pytest.raises(UnsupportedError, match="--to safetensors"):
            convert(tmp_path / "ckpt", tmp_path / to, to=to)
