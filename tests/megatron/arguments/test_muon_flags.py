"""The options of HyperMuon in a Megatron job: where they may stand, what they default to, what is refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron.arguments import flags, muon_validation
from hp_plugin.megatron.arguments.muon_flags import HyperMuonOptions


def parsed(*words: str) -> argparse.Namespace:
    return flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)


def resolved(*words: str) -> HyperMuonOptions:
    args = parsed("--use-hypermuon", *words)
    flags.resolve(args)
    return HyperMuonOptions.from_args(args)


def config(directory: Path, text: str) -> str:
    path = directory / "options.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_are_those_of_the_schema_with_and_without_hyperfsdp() -> None:
    assert resolved() == resolved("--use-hyperfsdp") == HyperMuonOptions()


def test_every_flag_reaches_the_options_as_a_plain_value() -> None:
    args = parsed(
        "--use-hypermuon", "--hypermuon-lr", "0.02", "--hypermuon-min-lr", "1e-3", "--hypermuon-adam-lr", "3e-4",
        "--hypermuon-adam-min-lr", "0", "--hypermuon-momentum", "0.9", "--hypermuon-nesterov", "false",
        "--hypermuon-scale", "megatron:spectral", "--hypermuon-extra-scale", "0.2",
        "--hypermuon-coefficients", "polar_express8", "--hypermuon-ns-steps", "9", "--hypermuon-ns-dtype", "fp32",
        "--hypermuon-exchange", "gather", "--hypermuon-momentum-placement", "owner",
        "--hypermuon-tensor-parallel", "blockwise", "--hypermuon-split-qkv", "false", "--hypermuon-split-heads",
        "--hypermuon-split-gate-up", "false", "--hypermuon-include", "a.*,b", "--hypermuon-exclude", "c",
        "--hypermuon-start-from", "fresh", "--hypermuon-wave-bytes", "1000",
    )  # fmt: skip
    flags.resolve(args)
    options = HyperMuonOptions.from_args(args)
    for name in HyperMuonOptions.model_fields:
        assert getattr(options, name) != HyperMuonOptions.model_fields[name].default, name
        assert type(getattr(args, f"hypermuon_{name}")) in (str, int, float, bool)
    assert (options.lr, options.min_lr, options.adam_min_lr, options.ns_steps) == (0.02, 1e-3, 0, 9)
    assert (options.include, options.split_heads) == ("a.*,b", True)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--hypermuon-lr", "0"], "--hypermuon-lr is '0'; expected a positive number"),
        (["--hypermuon-lr", "fast"], "--hypermuon-lr is 'fast'"),
        (["--hypermuon-momentum", "1"], "--hypermuon-momentum is '1'; expected a number of at least 0 and below 1"),
        (["--hypermuon-nesterov", "maybe"], "--hypermuon-nesterov is 'maybe'; expected true or false"),
        (["--hypermuon-ns-steps", "2.5"], "--hypermuon-ns-steps is '2.5'"),
        (["--hypermuon-ns-dtype", "fp8"], "--hypermuon-ns-dtype is 'fp8'; expected bf16 or fp32"),
        (["--hypermuon-exchange", "pigeon"], "--hypermuon-exchange is 'pigeon'"),
        (["--hypermuon-tensor-parallel", "distributed"], "expected whole or blockwise"),
        (["--hypermuon-scale", "spectral"], "--hypermuon-scale: scale='spectral' is a library's name"),
        (
            ["--hypermuon-coefficients", "quintic5", "--hypermuon-ns-steps", "4"],
            "--hypermuon-coefficients: coefficient",
        ),
    ],
)
def test_an_invalid_value_is_named_with_what_was_expected(words: list[str], what: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        resolved(*words)
    assert what in str(refusal.value)


def test_an_option_without_its_switch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--hypermuon-lr has no effect without --use-hypermuon"):
        flags.resolve(parsed("--use-hyperfsdp", "--hypermuon-lr", "0.1"))
    path = config(tmp_path, "hypermuon:\n  lr: 0.1\n")
    with pytest.raises(ConfigurationError, match=r"the section hypermuon of .*options.yaml has no effect"):
        flags.resolve(parsed("--use-hyperfsdp", "--hyperfsdp-config", path))


def test_a_file_has_a_section_for_muon_and_the_command_line_wins(tmp_path: Path) -> None:
    text = "supernode_size: 4\nhypermuon:\n  lr: 0.02\n  ns-dtype: fp32\n  include: [a.*, b]\n"
    options = resolved("--use-hyperfsdp", "--hyperfsdp-config", config(tmp_path, text), "--hypermuon-lr", "0.03")
    assert (options.lr, options.ns_dtype, options.include) == (0.03, "fp32", "a.*,b")


def test_without_hyperfsdp_a_file_may_have_nothing_else(tmp_path: Path) -> None:
    assert resolved("--hyperfsdp-config", config(tmp_path, "hypermuon: {lr: 0.02}")).lr == 0.02
    path = config(tmp_path, "supernode_size: 4\nhypermuon: {lr: 0.02}")
    with pytest.raises(ConfigurationError, match="supernode_size of .* has no effect without --use-hyperfsdp"):
        resolved("--hyperfsdp-config", path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("hypermuon: {lrr: 1}", "hypermuon: unknown key 'lrr'; did you mean lr?"),
        ("hypermuon: {lr: fast}", "lr is 'fast'; expected a positive number"),
        ("hypermuon: {lr: 1, --hypermuon-lr: 2}", "lr is given twice"),
        ("hypermuon: 3", "hypermuon holds a int; expected a mapping"),
    ],
)
def test_the_section_is_read_strictly(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        resolved("--hyperfsdp-config", config(tmp_path, text))
    assert what in str(refusal.value)


def megatron(**changes: Any) -> Any:
    return SimpleNamespace(**{"use_hyperfsdp": False, "optimizer": "adam", **changes})


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"optimizer": "sgd"}, "--optimizer"),
        ({"optimizer": "muon", "use_hyperfsdp": True}, "--optimizer"),
        ({"use_mup": True}, "--use-mup"),
        ({"use_distributed_optimizer": True}, "--use-distributed-optimizer"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"qk_clip": True, "use_hyperfsdp": True}, "--qk-clip"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        muon_validation.check_megatron_arguments(megatron(**changes))
    assert str(refusal.value).startswith(f"--use-hypermuon cannot be combined with {flag} (")


def test_what_fits_one_back_end_only_is_accepted_there() -> None:
    muon_validation.check_megatron_arguments(megatron(qk_clip=True))
    muon_validation.check_megatron_arguments(megatron(use_hyperfsdp=True, use_distributed_optimizer=True))
