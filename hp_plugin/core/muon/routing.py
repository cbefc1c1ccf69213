"""Which parameter goes to Muon and which to AdamW.

Muon is for hidden matrices. Embeddings, output heads, norms, biases, vectors and routers go to AdamW, judged by the
type of the module that owns them and by ties, not by names alone (`roles.py`). Patterns of the caller come first. What
was decided, and why, is data: `Routing`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.roles import (
    Member,
    adamw_reason,
    convolution_groups,
    fuses_experts,
    heads_by_shape,
    holds_experts,
    members,
)
from hp_plugin.core.muon.splits import Convolution, Stack, Transposed, blocks_of
from hp_plugin.errors import ConfigurationError, HyperParallelError

Algorithm = Literal["muon", "adamw"]
Patterns = str | Sequence[str]

_FUSED = re.compile(r"qkv|c_attn|query_key_value|in_proj_weight|gate_up|linear_fc1")


class _Forced(NamedTuple):
    """What a pattern demands of a parameter."""

    algorithm: Algorithm
    pattern: str


@dataclass(frozen=True)
class Row:
    """Where one parameter went.

    Attributes:
        name: Its name in the model.
        aliases: Its other names, if it is tied.
        shape: Global shape.
        algorithm: "muon" or "adamw".
        reason: Why.
        split: How it is cut into logical matrices; None: not at all (Muon), or meaningless (AdamW).
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    algorithm: Algorithm
    reason: str
    split: Split | None = None


@dataclass(frozen=True, eq=False)
class Routing:
    """The decision for a whole model.

    Attributes:
        rows: One for each parameter that is trained, in the order of the model. Tied parameters have one.
        parameters: The parameter of each row.
        frozen: Names of parameters that do not require a gradient: in no group.
    """

    rows: tuple[Row, ...]
    parameters: tuple[nn.Parameter, ...]
    frozen: tuple[str, ...] = ()

    @property
    def splits(self) -> dict[torch.Tensor, Split]:
        """The split of each Muon parameter that has one; any other is one matrix."""
        pairs = zip(self.rows, self.parameters, strict=True)
        return {parameter: row.split for row, parameter in pairs if row.split is not None}

    @property
    def maybe_fused(self) -> tuple[str, ...]:
        """Muon parameters that are called like fused weights, but that no split cuts."""
        rows = (row for row in self.rows if row.algorithm == "muon" and row.split in (None, Stack(), Transposed()))
        return tuple(row.name for row in rows if _FUSED.search(row.name))

    def param_groups(
        self, *, muon: Mapping[str, Any] | None = None, adamw: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer that does both.

        Args:
            muon: Options of the group of Muon, as `{"lr": 0.02}`.
            adamw: Options of the group of AdamW.

        Returns:
            `{"params", "param_names", "algorithm", **options}` for each algorithm that has parameters, Muon first.
        """
        options: dict[Algorithm, Mapping[str, Any]] = {"muon": muon or {}, "adamw": adamw or {}}
        groups = []
        for algorithm, extra in options.items():
            pairs = [
                (row, parameter)
                for row, parameter in zip(self.rows, self.parameters, strict=True)
                if row.algorithm == algorithm
            ]
            if pairs:
                names, params = [row.name for row, _ in pairs], [parameter for _, parameter in pairs]
                groups.append({**extra, "params": params, "param_names": names, "algorithm": algorithm})
        return groups

    def table(self, *, full: bool = False) -> str:
        """The decision as text.

        Args:
            full: One line per parameter. Otherwise parameters that differ in the numbers of their names only, and went
                the same way, share a line.
        """
        counts: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            name = row.name if full else _numberless(row.name)
            shape = "x".join(map(str, row.shape)) or "scalar"
            split = "" if row.split is None else str(row.split)
            key = (name, shape, row.algorithm, row.reason, split)
            counts[key] = counts.get(key, 0) + 1
        heading = ("parameter", "count", "shape", "algorithm", "reason", "split")
        lines = [heading] + [(key[0], str(count), *key[1:]) for key, count in counts.items()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, self.summary()])

    def summary(self) -> str:
        """One or a few lines: how many parameters went where, which are frozen, which may be fused."""
        muon = [row for row in self.rows if row.algorithm == "muon"]
        lines = [f"{len(muon)} parameters to Muon, {len(self.rows) - len(muon)} to AdamW, {len(self.frozen)} frozen"]
        if self.maybe_fused:
            names = dict.fromkeys(map(_numberless, self.maybe_fused))
            lines.append(f"without a split, though they may be fused: {', '.join(names)}")
        return "\n".join(lines)


def route(
    model: nn.Module,
    *,
    muon: Patterns | None = None,
    adamw: Patterns | None = None,
    splits: Mapping[str, Split] | None = None,
    convolutions: Algorithm = "muon",
    marked: bool = False,
    require_muon: bool = True,
) -> Routing:
    """Decides for every parameter of a model whether Muon or AdamW trains it.

    Patterns are those of `fnmatch`, case-sensitive, on names as `named_parameters` gives them; a `*` also matches dots.
    A tied parameter is matched by any of its names. In order: the patterns; then what makes a parameter AdamW's
    (`roles.py`); then convolutions by option; then matrices, and stacks of experts, to Muon.

    A tensor of 3 dims is read as a stack of experts if its owner is called so (a class `...Experts`, a path component
    `experts`), as a 1-D convolution if its owner is one; otherwise a split must say what it is.

    Args:
        model: May be wrapped: `fully_shard`, DDP, `torch.compile`, activation checkpointing. A list of model chunks
            goes in as `nn.ModuleList(chunks)`.
        muon: Parameters to give to Muon whatever they are. They must have at least 2 dims.
        adamw: Parameters to give to AdamW whatever they are.
        splits: How fused weights are cut. A pattern may match biases too; it says nothing about them.
        convolutions: Where kernels of convolutions go. Transposed ones go to AdamW, grouped ones too unless a split
            or a pattern says otherwise.
        marked: The model's framework marks its output head, as Megatron does: it is not looked for by its shape, which
            on a pipeline stage that has no head would find another layer.
        require_muon: Whether a model without any parameter for Muon is an error; a pipeline stage may be one.

    Returns:
        The decision. No communication: every rank decides the same from the same model.

    Raises:
        ConfigurationError: No parameter goes to Muon; a pattern matches nothing, or two contradict each other; the
            output head cannot be told from other layers; a split does not fit.
        UnsupportedError: A tensor of 3 dims, or of more than 5, of which nothing says how to read it.
    """
    everyone = members(model)
    trained = [member for member in everyone if member.parameter.requires_grad]
    forced = _forced(trained, everyone, muon=_listed(muon), adamw=_listed(adamw))
    cuts = _cuts(trained, everyone, splits or {})
    reasons = _adamw_reasons(model, trained, everyone, forced, marked=marked)
    rows, problems = [], []
    for member in trained:
        reason = reasons.get(member.name)
        try:
            rows.append(_row(member, reason, forced.get(member.name), cuts.get(member.name), convolutions))
        except HyperParallelError as error:
            problems.append(error)
    if problems:
        raise type(problems[0])("\n".join(str(problem) for problem in problems))
    _check_cuts_used(rows, splits or {}, trained)
    frozen = tuple(member.name for member in everyone if not member.parameter.requires_grad)
    routing = Routing(tuple(rows), tuple(member.parameter for member in trained), frozen)
    if require_muon and not any(row.algorithm == "muon" for row in rows):
        raise ConfigurationError(
            "no parameter goes to Muon, so the optimizer would be plain AdamW. Name the parameters that Muon is to "
            f"train with patterns (muon=...).\n{routing.table()}"
        )
    return routing


def _numberless(name: str) -> str:
    """A name whose numbers of layers and experts are stars."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)|(?<=\.weight)\d+$", "*", name)


# ---------------------------------------------------------------------------------------------------------- decision


def _row(member: Member, reason: str | None, forced: _Forced | None, split: Split | None, convs: Algorithm) -> Row:
    names = tuple(place.name for place in member.places)
    if forced is not None and forced.algorithm == "adamw":
        return Row(names[0], names[1:], member.shape, "adamw", f"pattern {forced.pattern}")
    if forced is not None and len(member.shape) < 2:
        raise ConfigurationError(
            f"pattern {forced.pattern!r} gives {member.name} to Muon, but its shape is {member.shape} and Muon needs "
            "matrices. Narrow the pattern."
        )
    groups = convolution_groups(member)
    if forced is None:
        if reason == "grouped convolution" and split is not None:
            reason = None
        if reason is None and groups is not None and convs == "adamw":
            reason = "convolution"
        if reason is not None:
            return Row(names[0], names[1:], member.shape, "adamw", reason)
    if split is None:
        split = _default_split(member, groups)
    _, blocks = blocks_of(member.name, member.shape, split)
    if forced is not None and all(min(block.shape) == 1 for block in blocks):
        raise ConfigurationError(
            f"pattern {forced.pattern!r} gives {member.name} of shape {member.shape} to Muon, but its matrices have "
            "one row or column: they have nothing to be orthogonal to. Give it to AdamW."
        )
    why = f"pattern {forced.pattern}" if forced is not None else _muon_reason(member, groups)
    return Row(names[0], names[1:], member.shape, "muon", why, split)


def _default_split(member: Member, groups: int | None) -> Split | None:
    if groups is not None:
        return Convolution(groups)
    if len(member.shape) == 2 and any(type(place.module).__name__ == "Conv1D" for place in member.places):
        return Transposed()  # Hugging Face's linear layer of GPT-2
    if len(member.shape) == 3 and any(holds_experts(place) for place in member.places):
        return Stack()
    if len(member.shape) == 2 and any(fuses_experts(place) for place in member.places):
        raise ConfigurationError(
            f"parameter {member.name} of shape {member.shape} belongs to a module of class "
            f"{type(member.places[0].module).__name__}, so it holds several experts. Say how with a split, as "
            "GroupedRows(num_experts=...), or Whole() if it is one matrix, or give it to AdamW."
        )
    return None


def _muon_reason(member: Member, groups: int | None) -> str:
    if groups is not None:
        return "convolution"
    return "experts" if any(holds_experts(place) for place in member.places) else "hidden matrix"


def _adamw_reasons(
    model: nn.Module,
    trained: Sequence[Member],
    everyone: Sequence[Member],
    forced: Mapping[str, _Forced],
    *,
    marked: bool,
) -> dict[str, str]:
    """By name: why a parameter is AdamW's."""
    reasons = {}
    for member in trained:
        reason = adamw_reason(member)
        if reason is not None:
            tied = len(member.places) > 1 and reason.startswith(("embedding", "output head"))
            reasons[member.name] = f"{reason}, tied" if tied else reason
    if marked:
        return reasons
    heads = heads_by_shape(model, [member for member in trained if member.name not in reasons], everyone)
    demands = {forced[head.name].algorithm for head in heads if head.name in forced}
    if "adamw" in demands:
        return reasons  # the caller has named the head
    heads = [head for head in heads if head.name not in forced]
    if len(heads) > 1:
        raise ConfigurationError(
            f"{len(heads)} layers have the shape of the embedding, {heads[0].shape}, and any of them may be the output "
            f"head: {', '.join(head.name for head in heads)}. Name the head with adamw=[...], or all of them with "
            "muon=[...] if the model has none."
        )
    return {**reasons, **{head.name: "output head by shape" for head in heads}}


# ---------------------------------------------------------------------------------------------------------- patterns


def _listed(patterns: Patterns | None) -> tuple[str, ...]:
    return () if patterns is None else (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matches(member: Member, pattern: str) -> bool:
    names = {name for place in member.places for name in (place.name, ".".join(place.path))}
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _matched(pattern: str, trained: Sequence[Member], everyone: Iterable[Member], what: str) -> list[Member]:
    found = [member for member in trained if _matches(member, pattern)]
    if not found:
        frozen = any(_matches(member, pattern) for member in everyone)
        seen = "frozen parameters only" if frozen else "no parameter"
        some = ", ".join(member.name for member in trained[:5])
        raise ConfigurationError(f"the pattern {pattern!r} of {what} matches {seen}. Names are like {some}.")
    return found


def _forced(
    trained: Sequence[Member], everyone: Sequence[Member], *, muon: Sequence[str], adamw: Sequence[str]
) -> dict[str, _Forced]:
    """By name: the algorithm that a pattern demands, and the pattern."""
    forced: dict[str, _Forced] = {}
    for pattern in muon:
        for member in _matched(pattern, trained, everyone, "muon"):
            forced[member.name] = _Forced("muon", pattern)
    for pattern in adamw:
        for member in _matched(pattern, trained, everyone, "adamw"):
            algorithm, other = forced.get(member.name, _Forced("adamw", pattern))
            if algorithm == "muon":
                raise ConfigurationError(
                    f"{member.name} is given to Muon by the pattern {other!r} and to AdamW by {pattern!r}. Narrow one."
                )
            forced[member.name] = _Forced("adamw", pattern)
    return forced


def _cuts(trained: Sequence[Member], everyone: Sequence[Member], splits: Mapping[str, Split]) -> dict[str, Split]:
    """By name: the split that a pattern gives."""
    cuts: dict[str, Split] = {}
    for pattern, split in splits.items():
        for member in _matched(pattern, trained, everyone, "splits"):
            if cuts.setdefault(member.name, split) != split:
                raise ConfigurationError(
                    f"two patterns of splits match {member.name} and say different things: {cuts[member.name]} and "
                    f"{split} (pattern {pattern!r}). Narrow one."
                )
    return cuts


def _check_cuts_used(rows: Sequence[Row], splits: Mapping[str, Split], trained: Sequence[Member]) -> None:
    algorithms = {row.name: row.algorithm for row in rows}
    for pattern in splits:
        if not any(algorithms[member.name] == "muon" for member in trained if _matches(member, pattern)):
            raise ConfigurationError(
                f"the pattern {pattern!r} of splits matches parameters of AdamW only, which are not cut. Remove it, or "
                "give them to Muon with muon=[...]."
            )
