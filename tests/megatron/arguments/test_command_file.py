"""Arguments are read from a file as a shell would pass them to the job, without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.arguments.command_file import read_arguments


def texts(directory: Path, text: str) -> list[str]:
    path = directory / "job.sh"
    path.write_text(text)
    return [given.text for given in read_arguments(str(path))]


def test_a_list_of_arguments_is_read_with_one_or_many_to_a_line(tmp_path: Path) -> None:
    text = "--num-layers 4 --swiglu\n--lr=1e-3  # a comment\n--data-path 0.5 a 0.5 b\n--bf16\n"
    expected = ["--num-layers 4", "--swiglu", "--lr 1e-3", "--data-path 0.5 a 0.5 b", "--bf16"]
    assert texts(tmp_path, text) == expected


def test_a_script_is_read_with_its_arrays_strings_and_variables(tmp_path: Path) -> None:
    text = """\
#!/bin/bash
#SBATCH --nodes=2
export TP=2
MODEL=(
    --num-layers 4   # not many
    --hidden-size "64"
)
MODEL+=(--swiglu)
DATA="--split 90,5,5 --mock-data"
torchrun --nproc-per-node 4 pretrain_gpt.py ${MODEL[@]} $DATA \\
    --tensor-model-parallel-size $TP --save ${OUT:-/tmp/x} --global-batch-size $1 && echo --bf16 > log
"""
    assert texts(tmp_path, text) == [
        "--num-layers 4",
        "--hidden-size 64",
        "--swiglu",
        "--split 90,5,5",
        "--mock-data",
        "--nproc-per-node 4",
        "--tensor-model-parallel-size 2",
        "--save /tmp/x",
        "--global-batch-size $1",
        "--bf16",
    ]


def test_values_are_those_of_megatrons_parser(tmp_path: Path) -> None:
    path = tmp_path / "args.txt"
    path.write_text("--swiglu --no-gradient-accumulation-fusion --num-layers 4 --lr 1e-3 --split 1,2 --data-path 1 a")
    values = {given.flag: given.value for given in read_arguments(str(path))}
    assert values == {
        "--swiglu": True,
        "--no-gradient-accumulation-fusion": False,
        "--num-layers": 4,
        "--lr": 1e-3,
        "--split": "1,2",
        "--data-path": [1, "a"],
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no flag"),
        ("echo hello", "has no flag"),
        ('--save "x', "cannot be split into words as a shell would"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        texts(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere cannot be read: No such file"):
        read_arguments(str(tmp_path / "nowhere"))
