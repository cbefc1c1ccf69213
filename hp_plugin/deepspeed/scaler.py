"""The loss scale of fp16: by DeepSpeed's rules, decided by all ranks together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hp_plugin.core.layout import local_tensor
from hp_plugin.deepspeed import reporting
from hp_plugin.errors import HyperParallelError

_FACTOR = 2.0
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class LossScale:
    """A loss scale and the rules by which it changes; names of values that change are those of DeepSpeed's scaler.

    All ranks see the same overflows, so their scales stay alike without a message.

    Attributes:
        cur_scale: What losses are multiplied by.
        is_dynamic: Whether it changes. A static scale only skips steps.
        window: It doubles after so many steps in a row without an overflow.
        hysteresis: It halves at the n-th overflow; the ones before only skip their step.
        consecutive_hysteresis: A step without overflow starts that count again, not only a doubling.
        minimum: It is never smaller; an overflow at this scale ends the job.
        cur_iter: Steps so far, skipped ones included.
        last_overflow_iter: The step of the last overflow; -1 before there is one.
        cur_hysteresis: How many overflows are left until it halves, the halving one included.
    """

    cur_scale: float
    is_dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 0

    def __post_init__(self) -> None:
        if not self.cur_hysteresis:
            self.cur_hysteresis = self.hysteresis

    @classmethod
    def of(cls, block: Any) -> LossScale:
        """As DeepSpeed's `fp16` block, validated by it, asks for."""
        if block.loss_scale:
            return cls(float(block.loss_scale), is_dynamic=False)
        return cls(
            float(2**block.initial_scale_power),
            window=block.loss_scale_window,
            hysteresis=block.hysteresis,
            consecutive_hysteresis=block.consecutive_hysteresis,
            minimum=float(block.min_loss_scale),
        )

    def update(self, overflow: bool) -> None:
        """One step has been made or, with an overflow, skipped. Every rank must call with the same value.

        Raises:
            HyperParallelError: An overflow at the smallest scale.
        """
        if not self.is_dynamic:
            return
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.hysteresis
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.window == 0:
                self.cur_hysteresis = self.hysteresis
                self.cur_scale *= _FACTOR
        self.cur_iter += 1

    def _shrink(self) -> None:
        if self.hysteresis != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            reporting.say(
                f"gradients overflowed at the loss scale {self.cur_scale:g}; the step is skipped, and the scale halves "
                f"after {self.cur_hysteresis} more"
            )
            return
        if self.cur_scale == self.minimum:
            raise HyperParallelError(
                f"gradients are not finite at the smallest loss scale, {self.minimum:g}, so no step can be made. Look "
                'for a loss that is not finite, lower the learning rate, or use "bf16" instead of "fp16".'
            )
        smaller = max(self.cur_scale / _FACTOR, self.minimum)
        reporting.say(
            f"gradients overflowed at the loss scale {self.cur_scale:g}; the step is skipped and the scale is "
            f"{smaller:g} now"
        )
        self.cur_scale = smaller

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {key: getattr(self, key) for key in _STATE}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues where `state` was taken. A static scale stays what the configuration says."""
        if self.is_dynamic:
            for key in _STATE:
                setattr(self, key, state[key])


class EngineScaler:
    """What the engine asks to scale losses: has the methods of `torch.amp.GradScaler` that DeepSpeed calls.

    It stands where DeepSpeed keeps a scaler for stage 0, so that `engine.backward`, `engine.scale` and the check
    against a bare `loss.backward()` are DeepSpeed's own. Unscaling and skipping happen in our engine before DeepSpeed
    steps.

    Args:
        scale: The scale and its rules.
        optimizer: Whose attributes `loss_scale` and `cur_scale` show the scale; a job may also write either of them.
    """

    def __init__(self, scale: LossScale, optimizer: Any) -> None:
        self.loss_scale = scale
        self._optimizer = optimizer
        self._applied: float | None = None
        optimizer.loss_scaler, optimizer.dynamic_loss_scale = scale, scale.is_dynamic
        optimizer.override_loss_scale = self.set
        self._publish()

    def _publish(self) -> None:
        self._shown = self.loss_scale.cur_scale
        self._optimizer.loss_scale = self._optimizer.cur_scale = self._shown

    def set(self, value: float) -> None:
        """Sets the scale, from the first backward of the next step on."""
        self._optimizer.loss_scale = float(value)

    def _adopt(self) -> None:
        """Takes over what the job has written on the optimizer or the scaler."""
        for value in (self._optimizer.loss_scale, self._optimizer.cur_scale):
            if value != self._shown:
                self.loss_scale.cur_scale = float(value)
                break
        self._publish()

    @property
    def applied(self) -> float:
        """The scale of the gradients that exist now."""
        return self.loss_scale.cur_scale if self._applied is None else self._applied

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled, in fp32. All micro-batches of a step have the scale of its first."""
        if self._applied is None:
            self._adopt()
            self._applied = self.loss_scale.cur_scale
        return loss.float() * self._applied

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divides the gradients that exist by the scale, in place. No communication."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                local = local_tensor(parameter.grad)
                by_device.setdefault(local.device, []).append(local)
        for gradients in by_device.values():
            torch._foreach_mul_(gradients, 1.0 / self.applied)

    def finish_step(self, overflow: bool) -> None:
        """Ends a step: the scale follows the overflow. Every rank must call with the same value."""
        if self._applied is not None:  # else the job may have written a scale since
            self._applied = None
        try:
            self.loss_scale.update(overflow)
        finally:
            self._publish()

    def load(self, state: dict[str, float] | None) -> None:
        """Continues a scale that a checkpoint holds; one of a job without fp16 holds none."""
        if state is not None:
            self.loss_scale.load_state_dict(state)
        self._applied = None
        self._publish()

    def unscale_(self, optimizer: Any) -> None:
        """Nothing: gradients are unscaled by then."""

    def step(self, optimizer: Any) -> None:
        """Steps; the engine has put a step that does nothing in its place where there was an overflow."""
        optimizer.step()

    def update(self) -> None:
        """Nothing: the scale has been updated by then."""
