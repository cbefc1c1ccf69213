"""Runs that several tests share: one multi-process job per mesh trains all variants asked of it.

Should that job fail, every variant is run in a job of its own, so that a test names the variant that fails.
"""

from __future__ import annotations

import functools
import warnings

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from tests.fsdp.comparison import Record
from tests.fsdp.training import train_single, train_variants
from tests.fsdp.variants import Variant
from tests.support import RanksFailedError, run_ranks

Mesh = tuple[int, int]
JOB_LIMIT_S = 30.0  # for the start; under heavy load a variant takes seconds
VARIANT_LIMIT_S = 10.0


class Runs:
    """Records of a fixed set of variants on one mesh, trained when the first one is asked for.

    Args:
        mesh: (dp_replicate, dp_shard).
        variants: what to train together.
        transport: how bytes move inside a supernode, for variants of this project.
    """

    def __init__(self, mesh: Mesh, variants: list[Variant], transport: str) -> None:
        self._mesh = mesh
        self._transport = transport
        self._variants = list(dict.fromkeys(variants))
        self._records: dict[Variant, list[Record]] | None = None

    def records(self, variant: Variant) -> list[Record]:
        """One record per replica. Raises RanksFailedError when training `variant` alone fails."""
        if variant not in self._variants:
            raise ValueError(f"{variant} is not among the variants of this run: add it where the run is defined.")
        if self._records is None:
            try:
                self._records = train_on_mesh(self._mesh, self._variants, self._transport)
            except RanksFailedError as error:
                reason = str(error).partition("\n")[0]
                warnings.warn(
                    f"training all variants in one job failed ({reason}); now each gets its own", stacklevel=2
                )
                self._records = {}
        if variant not in self._records:
            self._records.update(train_on_mesh(self._mesh, [variant], self._transport))
        return self._records[variant]


def train_on_mesh(mesh: Mesh, variants: list[Variant], transport: str) -> dict[Variant, list[Record]]:
    """Train `variants` one after another in one job; gives one record per replica for each."""
    replicate, shard = mesh
    by_rank = run_ranks(
        replicate * shard,
        train_variants,
        replicate=replicate,
        shard=shard,
        variants=variants,
        env={TRANSPORT_VARIABLE: transport},
        timeout=JOB_LIMIT_S + VARIANT_LIMIT_S * len(variants),
    )
    return {
        variant: [records[index] for records in by_rank if records[index] is not None]
        for index, variant in enumerate(variants)
    }


@functools.cache
def single_record(variant: Variant) -> Record:
    """The record of a one-process run."""
    return run_ranks(1, train_single, variants=[variant])[0][0]
