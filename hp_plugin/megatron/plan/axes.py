"""The mesh axes of a plan in Megatron's process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_plugin.errors import UnsupportedError


@dataclass(frozen=True)
class Axes:
    """Numbers of ranks.

    Attributes:
        tensor: tensor-parallel.
        experts: over which experts are divided; None for a model without any.
    """

    tensor: int
    experts: int | None

    @classmethod
    def of_job(cls, config: Any) -> Axes:
        """What the job's process groups are, for a model of this `TransformerConfig`.

        Raises:
            UnsupportedError: pipeline stages, which have different layers under the same names; experts that are
                divided over other tensor-parallel groups than the rest, as the axes are then no axes of one mesh.
        """
        from megatron.core import parallel_state

        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if stages > 1:
            raise UnsupportedError(
                f"the job has {stages} pipeline stages, which call different layers alike; read the plan of a job with "
                "one stage, it is the same for every stage's layers."
            )
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        if not getattr(config, "num_moe_experts", None):
            return cls(tensor, None)
        inside = parallel_state.get_expert_tensor_parallel_world_size()
        if inside != tensor:
            raise UnsupportedError(
                f"experts are divided over {inside} tensor-parallel ranks and everything else over {tensor}, so that "
                "their axes are not those of one mesh; set --expert-tensor-parallel-size to "
                "--tensor-model-parallel-size to read the plan."
            )
        return cls(tensor, parallel_state.get_expert_model_parallel_world_size())

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> ranks, the innermost last."""
        return {"tp": self.tensor} if self.experts is None else {"ep": self.experts, "tp": self.tensor}

    @property
    def batch(self) -> tuple[str, ...]:
        """Each of the ranks that divide experts has data of its own."""
        return () if self.experts is None else ("ep",)
