"""Converters on small checkpoints that are made here, in one process: names, values, refusals, memory."""

from __future__ import annotations

import json
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

from hp_plugin.cli.convert import bytes_of
from hp_plugin.cli.main import app
from hp_plugin.convert import (
    Contents,
    convert,
    converting,
    format_of,
    hyperfsdp,
    open_checkpoint,
    safetensors,
    universal,
)
from hp_plugin.convert.contents import Stored, of_tensor
from hp_plugin.errors import ConfigurationError, HyperParallelError, UnsupportedError

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (3, 7)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def contents(optimizer: str = "adam") -> Contents:
    """Three parameters, one of which has a second name, a frozen one and a buffer."""
    found = Contents("made here", {name: of_tensor(tensor) for name, tensor in tensors().items()})
    found.tied, found.optimizer, found.optimizer_class = {"c.weight": "b.weight"}, optimizer, "HyperAdamW"
    for name, tensor in tensors().items():
        moments = {"exp_avg": of_tensor(tensor + 1), "exp_avg_sq": of_tensor(tensor.square())}
        found.state[name] = {**moments, "step": 4.0}
    found.weights["f.weight"] = of_tensor(torch.arange(4.0))
    found.frozen = {"f.weight"}
    found.buffers = {"table": of_tensor(torch.arange(6, dtype=torch.int64))}
    found.groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(SHAPES)}]
    found.counters = {"global_steps": 4, "global_samples": 16, "skipped_steps": 0}
    found.scheduler, found.client = {"last_batch_iteration": 3}, {"epoch": 2}
    return found


class Scaler:
    """As DeepSpeed's own class: the state of fp16's loss scale, with its rules beside it."""

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 1024.0, 9, 5, 1
        self.scale_window = 1000


def stage_1_files(folder: Path, ranks: int = 2) -> None:
    """A checkpoint as ZeRO-1 writes it, with one flat group."""
    folder.mkdir(parents=True)
    flat = torch.cat([tensor.flatten() for tensor in tensors().values()])
    part = -(-flat.numel() // ranks)
    model = {
        "module": {name: tensor.bfloat16() for name, tensor in tensors().items()},
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 4,
        "epoch": 2,
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        piece = flat[rank * part : (rank + 1) * part].clone()
        state = {"step": torch.tensor(4.0), "exp_avg": piece + 1, "exp_avg_sq": piece * piece}
        optimizer = {
            "zero_stage": 1,
            "partition_count": [ranks],
            "loss_scaler": Scaler(),
            "dynamic_loss_scale": True,
            "single_partition_of_fp32_groups": [piece],
            "param_slice_mappings": [_mapping(rank * part, piece.numel())],
            "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)


class Address:
    """As DeepSpeed's own class: where a fragment begins in the flat piece of a rank."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


def _mapping(first: int, numel: int) -> dict[str, Address]:
    found, offset = {}, 0
    for name, tensor in tensors().items():
        begin, end = max(offset, first), min(offset + tensor.numel(), first + numel)
        if begin < end:
            found[name] = Address(end - begin, begin - first)
        offset += tensor.numel()
    return found


def assert_same(found: Contents, expected: Contents, *, state: bool = True) -> None:
    assert {**found.weights, **found.buffers}.keys() == {**expected.weights, **expected.buffers}.keys()
    for name, stored in {**expected.weights, **expected.buffers}.items():
        other = {**found.weights, **found.buffers}[name]
        assert other.shape == stored.shape and torch.equal(other.read(), stored.read())
    assert found.tied == expected.tied
    if state:
        for name, values in expected.state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                mine, theirs = values[key], found.state[name][key]
                assert isinstance(mine, Stored) and isinstance(theirs, Stored)
                assert torch.equal(theirs.read(), mine.read())
        assert found.counters == expected.counters and found.client == expected.client
        assert found.scheduler == expected.scheduler and found.frozen == expected.frozen


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parameters_are_put_together_from_the_pieces_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    stage_1_files(tmp_path / "tag", ranks)
    found = open_checkpoint(tmp_path / "tag")
    assert found.format == f"ZeRO-1 of {ranks} ranks" and found.optimizer == "adam"
    for name, tensor in tensors().items():
        assert torch.equal(found.weights[name].read(), tensor)
        moment = found.state[name]["exp_avg"]
        assert isinstance(moment, Stored) and torch.equal(moment.read(), tensor + 1)
        assert found.state[name]["step"] == 4.0
    assert found.loss_scale == {"cur_scale": 1024.0, "cur_iter": 9, "last_overflow_iter": 5, "cur_hysteresis": 1}
    assert found.client == {"epoch": 2} and found.groups == [{"lr": 0.1, "params": list(SHAPES)}]


def test_objects_of_deepspeed_are_read_without_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = types.ModuleType("deepspeed.fragments")
    with monkeypatch.context() as inside:  # only there while the files are written
        inside.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        inside.setitem(sys.modules, places.__name__, places)
        for one in (Address, Scaler):
            inside.setattr(one, "__module__", places.__name__)
            setattr(places, one.__name__, one)
        stage_1_files(tmp_path / "tag", 2)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    found = open_checkpoint(tmp_path / "tag")
    assert torch.equal(found.weights["b.weight"].read(), tensors()["b.weight"])
    assert found.loss_scale is not None and found.loss_scale["cur_scale"] == 1024.0


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    tag = tmp_path / "tag"
    stage_1_files(tag, 3)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigurationError, match=r"lacks the optim_states.pt files of the ranks \[1\]"):
        open_checkpoint(tag)
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigurationError, match="saved by 3 ranks but holds optimizer files of 1"):
        open_checkpoint(tag)
    (tag / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(UnsupportedError, match="tensor parallelism over 2 ranks"):
        open_checkpoint(tag)
    (tag / "mp_rank_01_model_states.pt").unlink()
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="cannot be read as a file of torch.save"):
        open_checkpoint(tag)


@pytest.mark.parametrize("to", ["hyperfsdp", "universal"])
def test_all_that_a_job_needs_survives(tmp_path: Path, to: str) -> None:
    hyperfsdp.write(contents(), tmp_path / "source" / "global_step4")
    report = convert(tmp_path / "source" / "global_step4", tmp_path / "new", to=to, verify=True)
    assert report.source_format.startswith("HyperFSDP") and report.verified == 11
    assert (report.weights, report.buffers, report.states) == (4, 1, 6)
    latest = {"hyperfsdp": "latest", "universal": "latest_universal"}[to]
    assert (tmp_path / "new" / latest).read_text() == "global_step4"
    assert format_of(tmp_path / "new" / "global_step4") == to
    assert_same(open_checkpoint(tmp_path / "new" / "global_step4"), contents())


def test_safetensors_has_files_of_the_asked_size_and_an_index(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    hyperfsdp.write(contents(), tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "new", to="safetensors", max_bytes=100, verify=True)
    assert any("optimizer state" in note for note in report.notes)
    files = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) == 3
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    # Read by the library, whose format it is.
    read: dict[str, torch.Tensor] = {}
    for file in files:
        own = library.load_file(tmp_path / "new" / file)
        assert all(index["weight_map"][name] == file for name in own)
        read |= own
    assert index["weight_map"].keys() == read.keys() == {*SHAPES, "f.weight", "table"}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in read.values())
    for name, tensor in tensors().items():
        assert torch.equal(read[name], tensor)
    assert read["table"].dtype == torch.int64


def test_safetensors_of_the_library_become_a_checkpoint_of_weights(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    (tmp_path / "model").mkdir()
    library.save_file({n: t.bfloat16() for n, t in tensors().items()}, tmp_path / "model" / "model.safetensors")
    convert(tmp_path / "model", tmp_path / "new", to="hyperfsdp", verify=True)
    found = open_checkpoint(tmp_path / "new" / "model")
    assert found.optimizer is None and not found.state
    for name, tensor in tensors().items():
        assert torch.equal(found.weights[name].read(), tensor.bfloat16().float())
    with pytest.raises(UnsupportedError, match="no optimizer state"):
        convert(tmp_path / "model", tmp_path / "back", to="universal")


def test_dtypes_are_those_that_were_asked_for(tmp_path: Path) -> None:
    hyperfsdp.write(contents(), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "new", to="safetensors", dtype=torch.bfloat16, verify=True)
    found = open_checkpoint(tmp_path / "new")
    assert found.weights["a.weight"].dtype == torch.bfloat16 and found.weights["table"].dtype == torch.int64
    assert found.tied == {"c.weight": "b.weight"}
    with pytest.raises(ConfigurationError, match="masters in fp32"):
        convert(tmp_path / "source", tmp_path / "other", to="hyperfsdp", dtype=torch.bfloat16)


def test_what_a_format_cannot_hold_is_refused_with_what_can(tmp_path: Path) -> None:
    muon = contents("muon")
    for values in muon.state.values():
        values["momentum_buffer"] = values.pop("exp_avg")
    muon.optimizer_class = "HyperMuon"
    hyperfsdp.write(muon, tmp_path / "source")
    with pytest.raises(UnsupportedError, match=r"state of HyperMuon.*--to safetensors"):
        convert(tmp_path / "source", tmp_path / "new", to="universal")
    assert not (tmp_path / "new" / "source").exists()


def test_verification_finds_a_changed_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hyperfsdp.write(contents(), tmp_path / "source")
    write = converting.safetensors.write

    def spoil(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        path = tmp_path / "new" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))

    monkeypatch.setattr(converting.safetensors, "write", spoil)
    with pytest.raises(HyperParallelError, match="is not what was written"):
        convert(tmp_path / "source", tmp_path / "new", to="safetensors", verify=True)


@pytest.mark.parametrize("to", ["hyperfsdp", "universal", "safetensors"])
def test_no_more_than_a_few_tensors_are_in_memory(tmp_path: Path, to: str) -> None:
    count, size = 40, 100_000
    alive: list[int] = []
    reads = 0

    def read(value: float) -> torch.Tensor:
        nonlocal reads
        reads += 1
        memory = numpy.full(size, value, dtype=numpy.float32)  # lives as long as any view of the tensor
        alive.append(1)
        weakref.finalize(memory, alive.pop)
        peaks.append(len(alive))
        return torch.from_numpy(memory)

    peaks: list[int] = []
    many = contents()
    many.weights = {f"w{i}": Stored((size,), torch.float32, lambda i=i: read(float(i))) for i in range(count)}
    many.state = {
        name: {
            "exp_avg": Stored((size,), torch.float32, lambda: read(1.0)),
            "exp_avg_sq": Stored((size,), torch.float32, lambda: read(2.0)),
            "step": 1.0,
        }
        for name in many.weights
    }
    many.tied, many.frozen, many.groups = {}, set(), [{"params": list(many.weights)}]
    if to == "hyperfsdp":
        hyperfsdp.write(many, tmp_path / "new")
    elif to == "universal":
        universal.write(many, tmp_path / "new")
    else:
        safetensors.write(many, tmp_path / "new", max_bytes=10 * size * 4)
    assert reads == count * (1 if to == "safetensors" else 3)
    assert max(peaks) <= 2


def test_the_command_names_the_format_and_what_was_compared(tmp_path: Path) -> None:
    stage_1_files(tmp_path / "job" / "global_step4")
    (tmp_path / "job" / "latest").write_text("global_step4")
    arguments = ["convert", str(tmp_path / "job"), str(tmp_path / "new"), "--to", "hyperfsdp", "--verify"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "ZeRO-1 of 2 ranks" in done.output and "verified 9 tensors" in done.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1 and "exists already" in again.output
    done = CliRunner().invoke(app, [*arguments[:2], str(tmp_path / "safe"), "--to", "safetensors", "--json"])
    assert json.loads(done.stdout)["source_format"] == "ZeRO-1 of 2 ranks"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--to", "zero"], "use --to universal"),
        (["--to", "torch_dist"], "load and save with Megatron"),
        (["--to", "onnx"], "choose one of"),
        (["--to", "safetensors", "--dtype", "fp8"], "choose one of"),
        (["--to", "safetensors", "--max-shard-size", "much"], "such as 5GB"),
        (["--to", "safetensors"], "holds no checkpoint that is known"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(tmp_path: Path, options: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["convert", str(tmp_path), str(tmp_path / "new"), *options])
    assert done.exit_code == 1 and told in done.output


def test_sizes_are_decimal_or_binary() -> None:
    assert [bytes_of(text) for text in ("5GB", "2GiB", "500MB", "10KB", "1000")] == [
        5 * 10**9, 2**31, 500 * 10**6, 10**4, 1000,
    ]  # fmt: skip
