"""Saving a checkpoint all or nothing: a failed save ends the job with one sentence and leaves nothing half-written.

Stock Megatron counts a checkpoint as saved only once its tracker file names it. But when a write fails it ends in a
traceback, with the files that were written left in place, and possibly with an empty tracker. Importing this module
does not import Megatron.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hp_plugin.megatron import reporting
from hp_plugin.megatron.checkpoints import saved_format

_FAILED = 1


def guard_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `save_checkpoint`, undone by rank 0 when it fails.

    Failures to write end the process with a sentence and exit status 1; any other exception is raised again.
    """

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        place = _Place.before_saving(iteration, kwargs) if _rank() == 0 else None
        try:
            with saved_format.announced(get_args()):
                return original(iteration, *args, **kwargs)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            outcome = place.clean_up() if place is not None else ""
            if not isinstance(error, (OSError, CheckpointException)):
                raise
            failures = error.failures if isinstance(error, CheckpointException) else {_rank(): error}
            # A failed write is made known to all ranks, and rank 0 tells it; other errors only the rank itself knows.
            lonely = isinstance(error, OSError)
            what = f"the checkpoint of iteration {iteration} could not be written ({_told(failures)})."
            reporting.stop(f"{what}{outcome}", status=_FAILED, every_rank=lonely)

    return save_checkpoint


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint goes, and what was there before; used on rank 0."""

    directory: Path
    existed: bool
    tracker: Path
    tracked: bytes | None

    @classmethod
    def before_saving(cls, iteration: int, options: dict[str, Any]) -> _Place:
        from megatron.training import checkpointing, get_args

        root = _save_root(get_args(), options)
        release = bool(options.get("release", False))
        directory = Path(checkpointing.get_checkpoint_name(root, iteration, release=release, return_base_dir=True))
        tracker = Path(checkpointing.get_checkpoint_tracker_filename(root))
        return cls(directory, directory.exists(), tracker, tracker.read_bytes() if tracker.is_file() else None)

    def clean_up(self) -> str:
        """Remove what the failed save left; returns sentences that say what is there now."""
        if self.existed:
            return f" {self.directory} existed before and may be incomplete now; remove it."
        shutil.rmtree(self.directory, ignore_errors=True)
        last = self._restore_tracker()
        return (
            f" The incomplete {self.directory} was removed, after which {_free(self.directory)} are free there, and "
            f"{last}. Make room or give --save another directory, then resume with --load."
        )

    def _restore_tracker(self) -> str:
        now = self.tracker.read_bytes() if self.tracker.is_file() else None
        if now != self.tracked:
            if self.tracked is None:
                self.tracker.unlink(missing_ok=True)
            else:
                fresh = self.tracker.with_name(self.tracker.name + ".hp_plugin")
                fresh.write_bytes(self.tracked)
                os.replace(fresh, self.tracker)
        if self.tracked is None:
            return "there is no earlier one"
        return f"the last complete checkpoint is that of iteration {self.tracked.decode(errors='replace').strip()}"


def _save_root(args: Any, options: dict[str, Any]) -> str:
    if not options.get("non_persistent_ckpt", False):
        return str(args.save)
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))


def _free(directory: Path) -> str:
    existing = next(parent for parent in directory.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB"


def _told(failures: dict[int, Any]) -> str:
    """Distinct causes with the ranks that had them, in a few words."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        error = failure[0] if isinstance(failure, tuple) else failure
        ranks.setdefault(" ".join(str(error).split()), []).append(rank)
    told = [f"on rank {', '.join(map(str, who))}: {cause}" for cause, who in ranks.items()]
    return "; ".join(told) or "a write failed on another rank"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
