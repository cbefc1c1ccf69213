"""Commands of `hp-plugin`. Each gathers data in its own module and only prints here."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, NoReturn

import typer

from hp_plugin._version import __version__

app = typer.Typer(
    name="hp-plugin",
    help="Topology-aware FSDP for Megatron-LM, DeepSpeed and PyTorch jobs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Global options. A callback also keeps `doctor` a subcommand while it is the only one."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Say what was found: versions, devices, backends, kernels, topology, host frameworks and what would be rebound.

    Exits with 0 if everything installed is usable, with 1 if something is not. Under torchrun it shows the topology of
    the job; with HP_DEVICE=cpu it also lists what the CPU compatibility layer replaces.
    """
    from hp_plugin.cli.doctor import examine
    from hp_plugin.cli.report import render

    report = examine()
    if report.rank == 0:
        if as_json:
            print(json.dumps(dataclasses.asdict(report) | {"usable": report.usable}))
        else:
            render(report)
    raise typer.Exit(0 if report.usable else 1)


@app.command()
def check(
    file: Annotated[
        str,
        typer.Argument(help="A file with Megatron's arguments, the shell script of a job, or a DeepSpeed JSON."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Rewrite settings of a DeepSpeed JSON that have a counterpart.")
    ] = False,
) -> None:
    """Say what of a Megatron or DeepSpeed job works with HyperFSDP or HyperMuon, and what does not.

    The file is read, not run, and neither framework need be installed. Exits with 0 if a job with these settings
    starts, with 1 if one of them is refused or the file cannot be read.
    """
    if file.endswith(".json"):
        _check_deepspeed(file, as_json=as_json, fix=fix)
    if fix:
        typer.echo("hp-plugin: error: --fix rewrites DeepSpeed configurations (*.json) only.", err=True)
        raise typer.Exit(1)
    from hp_plugin.cli import check as checking
    from hp_plugin.cli.check_report import render as render_check
    from hp_plugin.errors import HyperParallelError

    try:
        report = checking.check(file)
    except HyperParallelError as error:
        typer.echo(f"hp-plugin: error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(checking.as_json(report)))
    else:
        render_check(report)
    raise typer.Exit(0 if report.usable else 1)


def _check_deepspeed(file: str, *, as_json: bool, fix: bool) -> NoReturn:
    from hp_plugin.cli import check_deepspeed
    from hp_plugin.errors import HyperParallelError

    try:
        report = check_deepspeed.check(file, fix=fix)
    except HyperParallelError as error:
        typer.echo(f"hp-plugin: error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(dataclasses.asdict(report) | {"usable": report.usable}))
    else:
        check_deepspeed.render(report)
    raise typer.Exit(0 if report.usable else 1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="The folder of one save, or one with a file that names the latest.")],
    destination: Annotated[str, typer.Argument(help="A folder for what is written.")],
    to: Annotated[str, typer.Option("--to", help="hyperfsdp, universal or safetensors.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of weights in safetensors: float32, bfloat16 or float16.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Of a file of safetensors.")] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read back what was written; compare names, counts and checksums.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Convert a checkpoint of DeepSpeed (ZeRO, universal), HyperFSDP, Megatron (torch_dist) or safetensors.

    The format of the source is detected. Runs in one process, without a job, in the memory of about one parameter, and
    needs neither DeepSpeed nor Megatron. Files of torch.save are pickles: convert checkpoints of your own only. Exits
    with 0 if all was written (and is what was read, with --verify), else with 1.
    """
    from hp_plugin.cli import convert as converting
    from hp_plugin.errors import HyperParallelError

    try:
        report = converting.run(source, destination, to=to, dtype=dtype, max_shard_size=max_shard_size, verify=verify)
    except HyperParallelError as error:
        typer.echo(f"hp-plugin: error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        converting.render(report)


@app.command()
def validate(
    config: Annotated[
        str | None, typer.Option("--config", help="YAML: model, parallelism, plan, batch; see docs/sharding-plan.md.")
    ] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="A sharding plan, YAML or JSON.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="module:function, or a folder with a config.json of transformers.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Of the batch of random tokens.")] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", min=1, help="Tokens of a row.")] = None,
    save_plan: Annotated[str | None, typer.Option("--save-plan", help="Write the plan to this file.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of weights and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Check a sharding plan against its model, and follow it through a training step on simulated ranks.

    Runs in one process, without a job. Exits with 0 if the plan computes what one process does, else with 1.
    """
    from hp_plugin.cli import validate as validating
    from hp_plugin.errors import HyperParallelError

    if not as_json:
        typer.echo("hp-plugin: following the plan; this takes a while for large models.", err=True)
    try:
        result = validating.run(
            config, plan=plan, model=model, rows=rows, sequence=sequence, save_plan=save_plan, seed=seed
        )
    except HyperParallelError as error:
        typer.echo(f"hp-plugin: error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        validating.render(result)
    raise typer.Exit(0 if result.is_equal else 1)
