"""Megatron's own flags beside `--use-hyperfsdp`: accepted, switched off, without effect, refused; and the topology."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron.arguments import flags, validation
from hp_plugin.megatron.checkpoints import saved_format
from tests.support import run_ranks


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
            ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
            ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
            ({"optimizer": "muon"}, "--optimizer muon"),
            ({"optimizer": "dist_muon"}, "--optimizer dist_muon"),
            ({"fp8_param_gather": True}, "--fp8-param-gather"),
            ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
            ({"ckpt_format": "torch"}, "--ckpt-format torch"),
            ({"exp_avg_dtype": "bf16"}, "--exp-avg-dtype bf16"),
            ({"check_weight_hash_across_dp_replicas_interval": 5}, "--check-weight-hash-across-dp-replicas-interval 5"),
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

    def test_the_distributed_optimizer_and_what_belongs_to_it_are_switched_off_and_told(self) -> None:
        args = megatron_arguments(
            use_distributed_optimizer=True, overlap_param_gather=True, overlap_param_gather_with_optimizer_step=True,
            num_distributed_optimizer_instances=2, dist_ckpt_optim_fully_reshardable=True,
            use_precision_aware_optimizer=True, exp_avg_dtype="fp32", main_params_dtype="fp32", nccl_ub=True,
            ddp_param_name_patterns_for_fp32_local_accumulation=["*norm*"], overlap_grad_reduce=True,
        )  # fmt: skip
        validation.check_megatron_arguments(args)
        told = validation.adjust_megatron_arguments(args)
        assert told[0].startswith("checkpoints have the distributed optimizer's format fully_reshardable")
        assert [line.split(" ")[0] for line in told[1:]] == [
            "--use-distributed-optimizer", "--overlap-param-gather", "--overlap-param-gather-with-optimizer-step",
            "--num-distributed-optimizer-instances", "--dist-ckpt-optim-fully-reshardable",
            "--use-precision-aware-optimizer", "--use-nccl-ub",
            "--ddp-param-name-patterns-for-fp32-local-accumulation",
        ]  # fmt: skip
        assert not args.use_distributed_optimizer and not args.overlap_param_gather and not args.nccl_ub
        assert args.num_distributed_optimizer_instances == 1
        assert args.ddp_param_name_patterns_for_fp32_local_accumulation == []
        assert args.overlap_grad_reduce
        assert validation.adjust_megatron_arguments(args) == [], "the adjusted namespace needs no further change"

    def test_gradients_in_low_precision_are_taken_as_what_does_the_same(self) -> None:
        args = megatron_arguments(
            main_grads_dtype="bf16", accumulate_allreduce_grads_in_fp32=True, grad_reduce_in_bf16=False,
            ddp_reduce_scatter_with_fp32_accumulation=True, hyperfsdp_deterministic=False,
        )  # fmt: skip
        validation.check_megatron_arguments(args)
        dtype, scatter = validation.adjust_megatron_arguments(args)
        assert dtype.startswith("--main-grads-dtype bf16 with --use-hyperfsdp: it is taken as --grad-reduce-in-bf16")
        assert scatter.startswith("--ddp-reduce-scatter-with-fp32-accumulation with --use-hyperfsdp: ")
        assert (args.main_grads_dtype, args.grad_reduce_in_bf16) == ("fp32", True)
        assert not args.accumulate_allreduce_grads_in_fp32 and not args.ddp_reduce_scatter_with_fp32_accumulation
        assert args.hyperfsdp_deterministic

    def test_a_checkpoint_is_announced_in_the_format_that_the_command_line_asks_for(self) -> None:
        args = megatron_arguments(use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=False)
        validation.adjust_megatron_arguments(args)
        with saved_format.announced(args):
            assert args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable
        assert not args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable

    @pytest.mark.parametrize("change", [{}, {"use_distributed_optimizer": True, "optimizer": "sgd"}])
    def test_other_checkpoints_are_announced_as_they_are(self, change: dict[str, object]) -> None:
        args = megatron_arguments(dist_ckpt_optim_fully_reshardable=False, **change)
        told = validation.adjust_megatron_arguments(args)
        assert [line.startswith("checkpoints have the format of a job without") for line in told[:1]] == [True] * bool(
            change
        )
        with saved_format.announced(args):
            assert not args.use_distributed_optimizer

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
        tables = (validation.CONFLICTS, validation.WITHOUT_EFFECT, validation.SWITCHED_OFF, validation.ADJUSTED)
        named = {conflict.attribute for table in tables for conflict in table}
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
            ({"context_parallel_size": 2}, {"supernode_size": 4, "shard_size": 4}),
            ({"expert_model_parallel_size": 2}, {"supernode_size": 2}),
            ({"expert_model_parallel_size": 2, "world_size": 8}, {"supernode_size": 4, "shard_size": 4}),
            ({"expert_model_parallel_size": 4}, {"supernode_size": 1}),
            (
                {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2},
                {"supernode_size": 4},
            ),
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
            (
                {"world_size": 12, "expert_model_parallel_size": 3},
                {"supernode_size": 4},
                "of the expert-data-parallel group 0, 3, 6, 9, the supernodes hold 2, 1, 1 ranks",
            ),
        ],
    )
    def test_sizes_that_do_not_divide_are_named(
        self, sizes: dict[str, int], options: dict[str, int | str], sentence: str
    ) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            validation.check_topology(megatron_arguments(**sizes), flags.HyperFSDPOptions(**options))
        assert sentence in str(refusal.value)
