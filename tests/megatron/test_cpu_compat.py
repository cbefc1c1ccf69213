"""The CPU compatibility layer: what it answers, that it refuses where it must, and that it can be taken out."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import pytest
import torch

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron import cpu_compat
from hp_plugin.megatron.cpu_compat import factories
from hp_plugin.megatron.cpu_compat.patches import Ledger
from tests.support import run_ranks


def installed_layer() -> dict[str, Any]:
    """Install and restore in a process where Megatron was never imported."""
    names = [(torch, "zeros"), (torch.cuda, "current_device"), (torch.distributed, "new_group"), (torch.cuda, "Stream")]
    before = [getattr(owner, name) for owner, name in names]
    own_before = "to" in vars(torch.Tensor)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cpu_compat.install()
        cpu_compat.install()
    facts: dict[str, Any] = {
        "printed": output.getvalue(),
        "table": cpu_compat.table(),
        "changed": [getattr(owner, name) is not old for (owner, name), old in zip(names, before, strict=True)],
        "devices": [
            str(t.device)
            for t in (
                torch.zeros(2, device="cuda"),
                torch.ones(1, device=torch.device("cuda", 0)),
                torch.empty(1, device=0),
                torch.zeros(1).new_zeros(1, device="cuda:0"),
                torch.zeros(1).to("cuda"),
                torch.zeros(1).cuda(),
                torch.zeros(1).to(0),
                torch.nn.Linear(2, 2).to("cuda").weight,
                torch.nn.Linear(2, 2).cuda().weight,
                torch.arange(3, device=torch.cuda.current_device()),
            )
        ],
        "type": torch.zeros(1).type(),
        "converted": torch.zeros(1).type(torch.float64).dtype,
        "available": torch.cuda.is_available(),
        "capability": torch.cuda.get_device_capability(),
        "milliseconds": elapsed(),
        "memory": torch.cuda.max_memory_allocated(),
        "rng": rng_repeats(),
        "mark": sequence_parallel_marks(),
        "saved": saved_after_an_update(),
    }
    cpu_compat.restore()
    facts["restored"] = [getattr(owner, name) is old for (owner, name), old in zip(names, before, strict=True)]
    facts["restored inherited"] = ("to" in vars(torch.Tensor)) == own_before
    facts["type after"] = torch.zeros(1).type()
    facts["table after"] = cpu_compat.table()
    return facts


def elapsed() -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        end.record()
    torch.cuda.current_stream().wait_event(end)
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def rng_repeats() -> bool:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    return torch.equal(first, torch.rand(3, device="cuda"))


def sequence_parallel_marks() -> list[bool]:
    from types import SimpleNamespace

    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    made = []
    for wanted in (True, False):
        config = SimpleNamespace(
            sequence_parallel=wanted,
            layernorm_zero_centered_gamma=False,
            persist_layer_norm=False,
            memory_efficient_layer_norm=False,
            normalization="LayerNorm",
        )
        norm = WrappedTorchNorm(config, 8)
        assert config.sequence_parallel is wanted
        made.append(all(parameter.sequence_parallel for parameter in norm.parameters()))
    return made


def saved_after_an_update() -> float:
    """What a save that has begun writes of a tensor of ones that training has doubled since."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint import DefaultSavePlanner

    weight = torch.ones(4)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"weight": weight}, is_coordinator=True)
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriterAsync(folder)
        writer.set_up_storage_writer(is_coordinator=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, _ = planner.create_global_plan([plan])
        writer.prepare_write_data(writer.prepare_global_plan(plans)[0], planner)
        weight.mul_(2)
        ((_, _, (_, [(_, staged)])),) = writer.write_buckets
    return float(staged.sum()) / 4


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return run_ranks(1, installed_layer, flavour="core", timeout=120)[0]


def test_it_announces_itself_once_in_one_line(facts: dict[str, Any]) -> None:
    (line,) = facts["printed"].splitlines()
    assert line.startswith(f"hp_plugin: CPU compatibility layer is on: {len(facts['table'])} names")
    assert "not a measure of any accelerator" in line


def test_every_replacement_is_in_the_table(facts: dict[str, Any]) -> None:
    names = {entry["name"] for entry in facts["table"]}
    assert {
        "torch.zeros",
        "torch.cuda.current_device",
        "torch.Tensor.to",
        "torch.distributed.new_group",
        "megatron.training.training.initialize_megatron",
    } <= names
    assert len(names) == len(facts["table"])
    assert all(facts["changed"])


def test_cuda_devices_mean_the_cpu(facts: dict[str, Any]) -> None:
    assert set(facts["devices"]) == {"cpu"}
    assert facts["available"] is False


def test_type_names_are_those_that_megatrons_optimizers_sort_by(facts: dict[str, Any]) -> None:
    assert facts["type"] == "torch.cuda.FloatTensor"
    assert facts["converted"] == torch.float64


def test_streams_events_and_memory_counters_answer(facts: dict[str, Any]) -> None:
    assert facts["milliseconds"] >= 0
    assert facts["memory"] == 0
    assert facts["capability"] == (8, 0)


def test_the_cuda_generator_governs_draws(facts: dict[str, Any]) -> None:
    assert facts["rng"] is True


def test_norm_parameters_carry_the_mark_of_sequence_parallelism(facts: dict[str, Any]) -> None:
    assert facts["mark"] == [True, False]


def test_a_save_writes_what_the_tensors_held_when_it_began(facts: dict[str, Any]) -> None:
    assert facts["saved"] == 1.0


def test_restore_puts_everything_back(facts: dict[str, Any]) -> None:
    assert all(facts["restored"])
    assert facts["restored inherited"]
    assert facts["type after"] == "torch.FloatTensor"
    assert facts["table after"] == []


def test_it_refuses_where_an_accelerator_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match=r"real accelerator \(CUDA\), which it would hide"):
        cpu_compat.install()
    assert not cpu_compat.is_installed()


def test_it_refuses_once_megatron_has_been_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "megatron.core", object())
    with pytest.raises(ConfigurationError, match="before Megatron is imported"):
        cpu_compat.install()
    assert not cpu_compat.is_installed()


def uneven_gather_and_exchange() -> tuple[list[list[float]], list[float]]:
    """All-gather of uneven tensors, and an all-to-all with split sizes that are tensors."""
    import os

    import torch.distributed as dist

    dist.init_process_group("nccl", init_method="env://", device_id=torch.device("cuda", 0))
    rank = int(os.environ["RANK"])
    outputs = [torch.zeros(1), torch.zeros(2)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank + 1)))
    received = torch.zeros(2)
    ones = torch.tensor([1, 1])
    dist.all_to_all_single(received, torch.tensor([10.0 * rank, 10.0 * rank + 1]), ones, ones)
    group = dist.new_group([0, 1], backend="nccl", pg_options=dist.ProcessGroupNCCL.Options())
    assert dist.get_backend(group) == "gloo"
    dist.destroy_process_group()
    return [output.tolist() for output in outputs], received.tolist()


def send_and_deallocate() -> float:
    """Rank 0 sends ones and lets go of them, as Megatron's pipeline does; rank 1 asks late and gets the sum."""
    size = 1 << 20
    torch.distributed.init_process_group("nccl")
    group = torch.distributed.new_group(backend="nccl")
    ones = torch.ones(size)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        work = torch.distributed.isend(ones, 1, group)
        ones.data = torch.empty(1)
        others = [torch.full((size,), 9.0) for _ in range(8)]
        torch.distributed.barrier()
        work.wait()
        del others
    else:
        torch.distributed.barrier()
        torch.distributed.irecv(ones.zero_(), 0, group).wait()
    requests = torch.distributed.batch_isend_irecv(
        [torch.distributed.P2POp(operation, torch.ones(2), 1 - torch.distributed.get_rank(), group)
         for operation in (torch.distributed.isend, torch.distributed.irecv)]
    )  # fmt: skip
    for request in requests:
        request.wait()
    return float(ones.sum())


def test_what_is_sent_is_kept_until_it_has_been_sent() -> None:
    assert run_ranks(2, send_and_deallocate, flavour="megatron", timeout=60)[1] == 1 << 20


def test_nccl_groups_become_gloo_and_take_what_nccl_takes() -> None:
    first, second = run_ranks(2, uneven_gather_and_exchange, flavour="megatron", timeout=60)
    assert first == ([[1.0], [2.0, 2.0]], [0.0, 10.0])
    assert second == ([[1.0], [2.0, 2.0]], [1.0, 11.0])


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", True), ("cuda:1", True), (0, True), (torch.device("cuda"), True), ("cpu", False), (None, False),
     (True, False), (torch.float32, False), (torch.device("meta"), False)],
)  # fmt: skip
def test_what_counts_as_a_cuda_device(device: object, expected: bool) -> None:
    assert factories.is_cuda(device) is expected


class TestLedger:
    class Base:
        inherited = 1

    class Owner(Base):
        own = 2

        @staticmethod
        def static() -> int:
            return 3

    def test_undo_restores_own_inherited_and_absent_attributes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import os

        monkeypatch.delenv("HP_TEST_VARIABLE", raising=False)
        ledger, owner = Ledger(), self.Owner
        raw = vars(owner)["static"]
        for name in ("own", "inherited", "absent", "static", "own"):
            ledger.replace(owner, name, "new", area="test")
        ledger.set_variable("HP_TEST_VARIABLE", "1")
        assert (owner.own, owner.inherited, owner.absent) == ("new", "new", "new")  # type: ignore[attr-defined]
        ledger.undo()
        assert (owner.own, owner.inherited, owner.static()) == (2, 1, 3)
        assert vars(owner)["static"] is raw
        assert "inherited" not in vars(owner)
        assert not hasattr(owner, "absent")
        assert "HP_TEST_VARIABLE" not in os.environ
