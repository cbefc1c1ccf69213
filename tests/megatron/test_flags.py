"""The flags of the adapter: what is accepted, what is refused by name, and which source of a value wins."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron import flags, validation
from tests.support import run_ranks


def parsed(*words: str) -> argparse.Namespace:
    return flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)


def resolved(*words: str) -> flags.HyperFSDPOptions:
    return flags.resolve(parsed("--use-hyperfsdp", *words))


def config(directory: Path, text: str) -> str:
    path = directory / "hyperfsdp.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_are_those_of_the_schema() -> None:
    assert resolved() == flags.HyperFSDPOptions()


def test_every_flag_takes_a_value_that_is_available() -> None:
    options = resolved(
        "--hyperfsdp-supernode-size", "2", "--hyperfsdp-shard-size", "world",
        "--hyperfsdp-reshard-after-forward", "false",
        "--hyperfsdp-transport", "c10d", "--hyperfsdp-mode", "production", "--hyperfsdp-optimizer-sharding", "shard",
        "--hyperfsdp-reduce-dtype", "bf16", "--hyperfsdp-device", "cpu",
    )  # fmt: skip
    assert options.supernode_size == 2
    assert options.shard_size == "world"
    assert options.reshard_after_forward is False
    assert options.reduce_dtype == "bf16"
    assert options.device == "cpu"


def test_resolved_values_on_the_namespace_are_plain_and_read_back_equal() -> None:
    args = parsed("--use-hyperfsdp", "--hyperfsdp-supernode-size", "4")
    options = flags.resolve(args)
    values = [getattr(args, f"hyperfsdp_{name}") for name in flags.HyperFSDPOptions.model_fields]
    assert all(value is None or type(value) in (str, int, bool) for value in values)
    assert flags.HyperFSDPOptions.from_args(args) == options


def test_sizes_of_buckets_and_prefetch_reach_the_options() -> None:
    options = resolved(
        "--hyperfsdp-bucket-bytes", "1000",
        "--hyperfsdp-window", "3",
        "--hyperfsdp-prefetch", "0",
        "--hyperfsdp-reshard-after-forward", "2",
        "--hyperfsdp-transport", "shm",
        "--hyperfsdp-deterministic",
    )  # fmt: skip
    found = (options.bucket_bytes, options.window, options.prefetch, options.reshard_after_forward)
    assert found == (1000, 3, 0, 2)
    assert (options.transport, options.deterministic) == ("shm", True)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--hyperfsdp-transport", "symm_mem"], "--hyperfsdp-transport symm_mem"),
        (["--hyperfsdp-mode", "validation"], "--hyperfsdp-mode validation"),
        (["--hyperfsdp-optimizer-sharding", "shard_replicate"], "--hyperfsdp-optimizer-sharding shard_replicate"),
        (["--hyperfsdp-migrate", "observe"], "--hyperfsdp-migrate observe"),
    ],
)
def test_values_that_are_not_built_yet_are_refused_by_name(words: list[str], what: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        resolved(*words)
    assert str(refusal.value).startswith(what)
    assert "not available in this release" in str(refusal.value)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--hyperfsdp-supernode-size", "0"], "--hyperfsdp-supernode-size is '0'; expected auto or a positive"),
        (["--hyperfsdp-supernode-size", "two"], "--hyperfsdp-supernode-size is 'two'"),
        (["--hyperfsdp-shard-size", "-1"], "--hyperfsdp-shard-size is '-1'"),
        (["--hyperfsdp-transport", "tcp"], "--hyperfsdp-transport is 'tcp'; expected auto, c10d or shm"),
        (["--hyperfsdp-reduce-dtype", "fp16"], "--hyperfsdp-reduce-dtype is 'fp16'"),
        (["--hyperfsdp-reshard-after-forward", "maybe"], "--hyperfsdp-reshard-after-forward is 'maybe'"),
        (["--hyperfsdp-reshard-after-forward", "0"], "--hyperfsdp-reshard-after-forward is '0'"),
        (["--hyperfsdp-bucket-bytes", "0"], "--hyperfsdp-bucket-bytes is '0'; expected a positive number of bytes"),
        (["--hyperfsdp-window", "0"], "--hyperfsdp-window is '0'; expected a positive number of buckets"),
        (["--hyperfsdp-prefetch", "-1"], "--hyperfsdp-prefetch is '-1'; expected a number of bytes"),
        (["--hyperfsdp-prefetch", "true"], "--hyperfsdp-prefetch is 'true'; expected a number of bytes"),
    ],
)
def test_an_invalid_value_is_named_with_what_was_expected(words: list[str], what: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        resolved(*words)
    assert what in str(refusal.value)


def test_an_option_without_the_switch_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="--hyperfsdp-supernode-size has no effect without --use-hyperfsdp"):
        flags.resolve(parsed("--hyperfsdp-supernode-size", "2"))
    with pytest.raises(ConfigurationError, match="--hyperfsdp-config has no effect"):
        flags.resolve(parsed("--hyperfsdp-config", "x.yaml"))


def test_the_device_may_be_given_without_the_switch() -> None:
    assert flags.resolve(parsed("--hyperfsdp-device", "cpu")).device == "cpu"


def test_a_misspelt_flag_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ConfigurationError, match=r"--hyperfsdp-supernodesize .* did you mean --hyperfsdp-supernode-size"
    ):
        flags.check_spelling(["--lr", "1", "--hyperfsdp-supernodesize=2"])
    with pytest.raises(ConfigurationError, match=r"--hypermuon-momentun .* did you mean --hypermuon-momentum"):
        flags.check_spelling(["--hypermuon-momentun", "0.9"])
    flags.check_spelling(["--hyperfsdp-supernode-size=2", "--hyperfsdp-config", "a", "--unknown-to-us"])


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = config(tmp_path, "supernode_size: 8\nreshard-after-forward: false\nhyperfsdp_transport: c10d\n")
    options = resolved("--hyperfsdp-config", path, "--hyperfsdp-supernode-size", "2")
    assert options.supernode_size == 2
    assert options.reshard_after_forward is False
    assert options.transport == "c10d"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("supernodesize: 2", "unknown key 'supernodesize'; did you mean supernode_size?"),
        ("colour: red", "unknown key 'colour'; known are supernode_size"),
        ("supernode_size: two", "supernode_size is 'two'; expected auto or a positive number of ranks"),
        ("supernode_size: '2'", "supernode_size is '2'"),
        ("- 1", "holds a list; expected a mapping"),
        ("a: [", "is not valid YAML"),
        ("supernode_size: 2\nsupernode-size: 4", "supernode_size is given twice"),
    ],
)
def test_a_file_is_read_strictly(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        resolved("--hyperfsdp-config", config(tmp_path, text))
    assert what in str(refusal.value)
    assert "hyperfsdp.yaml" in str(refusal.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"--hyperfsdp-config nowhere.yaml cannot be read: No such file"):
        resolved("--hyperfsdp-config", "nowhere.yaml")


def test_unavailable_values_in_a_file_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--hyperfsdp-transport symm_mem is not available"):
        resolved("--hyperfsdp-config", config(tmp_path, "transport: symm_mem"))


class TestRequestedDevice:
    def test_nothing_asks_for_emulation_by_itself(self) -> None:
        assert flags.requested_device(["--lr", "1"], {}) == "auto"

    def test_flag_file_and_variable_ask_in_this_order(self, tmp_path: Path) -> None:
        path = config(tmp_path, "device: cpu")
        assert flags.requested_device(["--hyperfsdp-device", "cpu"], {}) == "cpu"
        assert (
            flags.requested_device(["--hyperfsdp-device=auto", "--hyperfsdp-config", path], {"HP_DEVICE": "cpu"})
            == "auto"
        )
        assert flags.requested_device(["--hyperfsdp-config", path], {}) == "cpu"
        assert flags.requested_device([], {"HP_DEVICE": "cpu"}) == "cpu"

    @pytest.mark.parametrize(
        ("argv", "variable"), [(["--hyperfsdp-device", "gpu"], ""), ([], "tpu"), (["--hyperfsdp-device"], "")]
    )
    def test_an_unknown_device_is_refused(self, argv: list[str], variable: str) -> None:
        with pytest.raises(ConfigurationError):
            flags.requested_device(argv, {"HP_DEVICE": variable})


def megatron_arguments(**changes: object) -> SimpleNamespace:
    """What the rules look at, with the values of a plain dense job."""
    plain = dict(
        use_distributed_optimizer=False, overlap_param_gather=False, optimizer="adam",
        expert_model_parallel_size=1, context_parallel_size=1, ckpt_format="torch_dist", fp8=None,
        cuda_graph_impl="none", num_distributed_optimizer_instances=1, ddp_bucket_size=None, yaml_cfg=None,
        gradient_accumulation_fusion=False, world_size=4, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        use_checkpoint_args=False, use_torch_fsdp2=False, use_megatron_fsdp=False,
        ddp_param_name_patterns_for_fp32_local_accumulation=[], fp8_param_gather=False,
    )  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


def attributes_of_megatron() -> set[str]:
    """Names on the namespace that the installed Megatron's parser fills."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {action.dest for action in parser._actions}


class TestMegatronArguments:
    def test_a_plain_job_is_accepted(self) -> None:
        validation.check_megatron_arguments(megatron_arguments())

    def test_expert_and_context_parallelism_are_accepted(self) -> None:
        validation.check_megatron_arguments(megatron_arguments(expert_model_parallel_size=4, context_parallel_size=2))

    @pytest.mark.parametrize(
        ("change", "flag"),
        [
            ({"use_distributed_optimizer": True}, "--use-distributed-optimizer"),
            ({"overlap_param_gather": True}, "--overlap-param-gather"),
            ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
            ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
            ({"optimizer": "muon"}, "--optimizer muon"),
            ({"optimizer": "dist_muon"}, "--optimizer dist_muon"),
            ({"fp8_param_gather": True}, "--fp8-param-gather"),
            ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
            ({"ckpt_format": "torch"}, "--ckpt-format torch"),
            ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2"),
            ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ],
    )
    def test_what_does_not_work_is_refused_with_advice(self, change: dict[str, object], flag: str) -> None:
        with pytest.raises(UnsupportedError) as refusal:
            validation.check_megatron_arguments(megatron_arguments(**change))
        assert str(refusal.value).startswith(f"--use-hyperfsdp cannot be combined with {flag} (")

    def test_all_conflicts_are_told_at_once(self) -> None:
        with pytest.raises(UnsupportedError, match=r"--use-torch-fsdp2 .*--ckpt-format torch") as refusal:
            validation.check_megatron_arguments(megatron_arguments(use_torch_fsdp2=True, ckpt_format="torch"))
        assert "\n" not in str(refusal.value)

    def test_fused_accumulation_is_switched_off_and_told(self) -> None:
        args = megatron_arguments(gradient_accumulation_fusion=True)
        (line,) = validation.adjust_megatron_arguments(args)
        assert args.gradient_accumulation_fusion is False
        assert "--no-gradient-accumulation-fusion" in line
        assert validation.adjust_megatron_arguments(args) == []

    def test_what_tunes_ddp_is_accepted_and_told_to_do_nothing(self) -> None:
        args = megatron_arguments(ddp_bucket_size=100, ddp_average_in_collective=True)
        validation.check_megatron_arguments(args)
        bucket, average = validation.adjust_megatron_arguments(args)
        assert bucket.startswith("--ddp-bucket-size 100 has no effect with --use-hyperfsdp: ")
        assert average.startswith("--ddp-average-in-collective has no effect with --use-hyperfsdp: ")

    def test_every_refused_flag_exists_in_the_installed_megatron(self) -> None:
        (attributes,) = run_ranks(1, attributes_of_megatron, flavour="megatron", timeout=60)
        set_by_validation_or_older = {"use_custom_fsdp", "use_layer_wise_distributed_optimizer"}
        named = {conflict.attribute for conflict in (*validation.CONFLICTS, *validation.WITHOUT_EFFECT)}
        assert named - attributes == set_by_validation_or_older


class TestTopology:
    @pytest.mark.parametrize(
        ("sizes", "options"),
        [
            ({}, {"supernode_size": 1}),
            ({}, {"supernode_size": 4, "shard_size": 2}),
            ({"tensor_model_parallel_size": 2}, {"supernode_size": 2}),
            ({"tensor_model_parallel_size": 2}, {"supernode_size": 4}),
            ({"tensor_model_parallel_size": 2, "world_size": 12}, {"supernode_size": 4}),
            ({"pipeline_model_parallel_size": 2}, {"supernode_size": 2}),
            ({}, {"supernode_size": "auto"}),
        ],
    )
    def test_sizes_that_divide_are_accepted(self, sizes: dict[str, int], options: dict[str, int | str]) -> None:
        validation.check_topology(megatron_arguments(**sizes), flags.HyperFSDPOptions(**options))

    @pytest.mark.parametrize(
        ("sizes", "options", "sentence"),
        [
            (
                {},
                {"supernode_size": 3},
                "--hyperfsdp-supernode-size 3 does not divide the 4 ranks of this job; choose one of 1, 2, 4",
            ),
            ({}, {"shard_size": 3}, "--hyperfsdp-shard-size 3 does not divide the data-parallel size 4"),
            ({}, {"supernode_size": 2, "shard_size": 4}, "--hyperfsdp-shard-size 4 does not divide the 2 ranks"),
            (
                {},
                {"shard_size": 4, "reshard_after_forward": 3},
                "--hyperfsdp-reshard-after-forward 3 does not divide --hyperfsdp-shard-size 4; choose one of 1, 2, 4",
            ),
            (
                {"world_size": 6, "pipeline_model_parallel_size": 2},
                {"supernode_size": 2},
                "--hyperfsdp-supernode-size 2 does not divide the data-parallel size 3: of the data-parallel group",
            ),
        ],
    )
    def test_sizes_that_do_not_divide_are_named(
        self, sizes: dict[str, int], options: dict[str, int | str], sentence: str
    ) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            validation.check_topology(megatron_arguments(**sizes), flags.HyperFSDPOptions(**options))
        assert sentence in str(refusal.value)
