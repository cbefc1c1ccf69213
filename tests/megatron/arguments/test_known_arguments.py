"""Every flag of the installed Megatron has been looked at: it is in the list, with what becomes of it."""

from __future__ import annotations

import argparse

from hp_plugin.megatron.arguments import rules
from hp_plugin.megatron.arguments.known_arguments import GROUPS, Argument, known_arguments
from tests.support import run_ranks

TABLES = {
    "refused": rules.CONFLICTS,
    "switched off": rules.SWITCHED_OFF,
    "replaced": rules.ADJUSTED,
    "without effect": rules.WITHOUT_EFFECT,
}
SET_BY_VALIDATION_OR_OLDER = {"use_custom_fsdp", "use_layer_wise_distributed_optimizer"}


def arguments_of_megatron() -> list[str]:
    """Lines of the list for what the installed Megatron's parser takes, without their groups."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    return [f"{','.join(action.option_strings)} {kind_of(action)} {action.dest}" for action in parser._actions]


def kind_of(action: argparse.Action) -> str:
    if isinstance(action, argparse._StoreTrueAction):
        return "on"
    if isinstance(action, argparse._StoreFalseAction):
        return "off"
    if isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    return {None: "value", "?": "optional"}.get(action.nargs, "values")  # type: ignore[arg-type]


def line_of(argument: Argument) -> str:
    return f"{','.join(argument.flags)} {argument.kind} {argument.attribute}"


def test_every_flag_of_the_installed_megatron_is_in_the_list() -> None:
    """A flag that fails here is new or has changed: decide what becomes of it, and put its line under that heading."""
    (lines,) = run_ranks(1, arguments_of_megatron, flavour="megatron", timeout=60)
    listed = {line_of(argument) for argument in known_arguments().values()}
    assert sorted(set(lines) - listed) == [], "not looked at yet"
    assert sorted(listed - set(lines)) == [], "no flags of this release"
    assert len(lines) > 700


def test_the_list_and_the_rules_agree() -> None:
    for group, table in TABLES.items():
        ruled = {rule.attribute for rule in table} - SET_BY_VALIDATION_OR_OLDER
        listed = {argument.attribute for argument in known_arguments().values() if argument.group == group}
        assert listed == ruled, group


def test_a_rule_names_a_flag_that_sets_its_attribute() -> None:
    known = known_arguments()
    for table in TABLES.values():
        for rule in table:
            if rule.attribute not in SET_BY_VALIDATION_OR_OLDER | {"gradient_accumulation_fusion"}:
                assert known[rule.flag].attribute == rule.attribute


def test_no_flag_has_two_rules() -> None:
    attributes = [rule.attribute for table in TABLES.values() for rule in table]
    assert len(attributes) == len(set(attributes))


def test_every_group_has_flags() -> None:
    assert {argument.group for argument in known_arguments().values()} == set(GROUPS)
