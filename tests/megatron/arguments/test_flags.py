"""The flags of the adapter: what is accepted, what is refused by name, and which source of a value wins."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron.arguments import flags


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
        (["--hyperfsdp-optimizer-sharding", "shard_replicate"], "--hyperfsdp-optimizer-sharding shard_replicate"),
    ],
)
def test_values_that_are_not_built_yet_are_refused_by_name(words: list[str], what: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        resolved(*words)
    assert str(refusal.value).startswith(what)
    assert "not available in this release" in str(refusal.value)


def test_options_of_validation_are_refused_in_production() -> None:
    asked = ["--hyperfsdp-validation-steps", "3"]
    with pytest.raises(ConfigurationError, match="--hyperfsdp-validation-steps has no effect without"):
        resolved(*asked)
    assert resolved("--hyperfsdp-mode", "validation", *asked).validation_steps == 3


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


def test_observing_is_an_option_like_any_other() -> None:
    assert resolved("--hyperfsdp-migrate", "observe").migrate == "observe"
    with pytest.raises(ConfigurationError, match=r"--hyperfsdp-migrate is 'everything'; expected observe"):
        resolved("--hyperfsdp-migrate", "everything")


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
