"""The source patches: they apply to what pip ships and to a checkout, and a patched Megatron needs no launcher."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_plugin.megatron import installation, source_patch
from hp_plugin.megatron.releases.targets import TABLES
from tests.megatron.cases import tiny_job
from tests.megatron.releases import checkout, patched_job
from tests.megatron.releases.signatures import series_of

REPOSITORY = Path(__file__).resolve().parents[3]
PATCHES = {
    (0, 17): REPOSITORY / "patches" / "megatron-0.17.patch",
    (0, 19): REPOSITORY / "patches" / "megatron-0.19.patch",
}
TIME_LIMIT_S = 600


def roots() -> list[Path]:
    """Folders with the sources of a release that has a patch: what pip has installed, and the checkout."""
    spec = importlib.util.find_spec("megatron")
    found = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec is not None else []
    if os.environ.get(checkout.VARIABLE):
        found.append(checkout.folder())
    whole = [root for root in dict.fromkeys(found) if (root / "megatron" / "training" / "training.py").is_file()]
    return [root for root in whole if series_of(root) in PATCHES]


def patched_files(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)


def git_apply(patch: Path, folder: Path, *options: str) -> None:
    """`git apply` in a folder, whether or not it lies in a repository."""
    done = subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=folder,
        env={**os.environ, "GIT_DIR": str(folder / "no-repository")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_patches_apply_to_the_sources_on_this_machine(tmp_path: Path) -> None:
    if not roots():
        pytest.skip("no sources of a release with a patch are on this machine")
    for number, root in enumerate(roots()):
        series = series_of(root)
        patch, copy = PATCHES[series], tmp_path / str(number)
        for name in patched_files(patch):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy / name)
        git_apply(patch, copy, "--check")
        git_apply(patch, copy)
        marked = set()
        for name in patched_files(patch):
            text = (copy / name).read_text()
            ast.parse(text)
            marked |= set(re.findall(r"@hyperfsdp\.routed\ndef (\w+)\(|@hyperfsdp\.(parse_args)\n", text))
            marked |= {("DDP", "")} if "hyperfsdp.data_parallel_class(" in text else set()
        attributes = {target.attribute for target in TABLES[series]} - {"DistributedDataParallel"}
        assert {first or second for first, second in marked} == attributes


def test_every_patch_touches_every_place_that_chooses_a_data_parallel_class() -> None:
    places = {series: patch.read_text().count("hyperfsdp.data_parallel_class(") for series, patch in PATCHES.items()}
    assert places == {
        series: sum(target.attribute in ("DDP", "DistributedDataParallel") for target in TABLES[series])
        for series in PATCHES
    }


@pytest.fixture
def routes() -> Iterator[source_patch.Routes]:
    before = installation.installed()
    made = source_patch.Routes("0.19.2")
    installation.use(made)
    yield made
    installation._installed = before


class TestRoutes:
    def test_a_function_is_megatrons_until_its_stage_is_active(
        self, routes: source_patch.Routes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(source_patch.rebind, "load", lambda spec: lambda original: lambda: f"ours of {original()}")

        @source_patch.routed
        def train_step() -> str:
            return "stock"

        assert train_step() == "stock"
        routes.activate("optimizer")
        assert train_step() == "stock"
        routes.activate("active")
        assert train_step() == "ours of stock"
        routes.deactivate("active")
        assert train_step() == "stock"

    def test_a_function_that_no_target_names_stays(self, routes: source_patch.Routes) -> None:
        routes.activate("active")

        @source_patch.routed
        def something_else() -> str:
            return "stock"

        assert something_else() == "stock"

    def test_without_the_flag_the_class_is_megatrons(self, routes: source_patch.Routes) -> None:
        assert source_patch.data_parallel_class(SimpleNamespace) is SimpleNamespace

    def test_the_table_says_what_is_taken_over(self, routes: source_patch.Routes) -> None:
        assert not any(routes.is_rebound(target) for target in routes.targets if target.stage == "active")
        routes.activate("active")
        assert all(routes.is_rebound(target) for target in routes.targets if target.stage == "active")


def test_the_launcher_takes_precedence_over_patched_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_installed", source_patch.rebind.Rebinder("0.19.2", ()))
    seen: list[Any] = []
    assert source_patch.parse_args(lambda provider=None: seen.append(provider) or "parsed")("theirs") == "parsed"
    assert seen == ["theirs"]
    assert source_patch.routed(test_every_patch_touches_every_place_that_chooses_a_data_parallel_class)() is None


def losses(output: str) -> list[str]:
    return re.findall(r"lm loss: (\S+) .* grad norm: (\S+) ", output)


@pytest.mark.full
@pytest.mark.timeout(2700)
def test_a_patched_megatron_trains_without_the_launcher_as_with_it(corpus: list[str], tmp_path: Path) -> None:
    if not roots():
        pytest.skip("no sources of a release with a patch are on this machine")
    root = roots()[-1]
    patched = tmp_path / "patched"
    for name in ("core", "training"):
        shutil.copytree(root / "megatron" / name, patched / "megatron" / name, ignore=shutil.ignore_patterns("*.pyc"))
    if (root / "megatron" / "legacy").is_dir():
        shutil.copytree(root / "megatron" / "legacy", patched / "megatron" / "legacy")
    git_apply(PATCHES[series_of(root)], patched)
    script = root / "pretrain_gpt.py"
    if not script.is_file():
        script = REPOSITORY / "examples" / "pretrain_gpt.py"
    job = tiny_job("--train-iters", "6", *corpus)

    def run(first: list[str], sources: Path, *flags: str) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *first]
        done = subprocess.run(
            [*command, str(script), *job, *flags],
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{sources}", "OMP_NUM_THREADS": "1", "HP_DEVICE": "cpu",
                 "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    without, launcher = [str(Path(patched_job.__file__))], ["-m", "hp_plugin.megatron"]
    saving = ("--save", str(tmp_path / "ckpt"), "--save-interval", "6")
    ours = run(without, patched, "--use-hyperfsdp", "--hyperfsdp-supernode-size", "2", *saving)
    assert "taken over by Routes" in ours
    assert "hyperfsdp iteration 6" in ours
    stock = run(without, patched)
    assert "hyperfsdp iteration" not in stock
    rebound = run(launcher, root, "--use-hyperfsdp", "--hyperfsdp-supernode-size", "2")
    assert losses(ours) == losses(rebound)
    assert len(losses(ours)) == 6
    assert losses(stock)[-1][0] == losses(ours)[-1][0]
    # The launcher on patched sources adds its flags once.
    assert losses(run(launcher, patched, "--use-hyperfsdp", "--hyperfsdp-supernode-size", "2")) == losses(ours)
