"""The table of refused options against Megatron's own parser: every name in it is one that Megatron has."""

from __future__ import annotations

import warnings
from argparse import ArgumentParser

import pytest

from megatron_dynatrain.training.arguments import add_dynamic_parallelism_args, refuse_unsupported
from megatron_dynatrain.training.refusals import REFUSALS


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(allow_abbrev=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some options of it are declared in an old way
        add_megatron_arguments(parser)
    return add_dynamic_parallelism_args(parser)


def test_every_refused_option_is_one_of_megatron_under_that_name(parser: ArgumentParser) -> None:
    dests = {option: action.dest for action in parser._actions for option in action.option_strings}
    # Computed by validate_args from several options.
    computed = {"--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size"}
    assert {row.flag: row.dest for row in REFUSALS} == {
        row.flag: computed.get(row.flag, dests.get(row.flag)) for row in REFUSALS
    }


def test_the_defaults_of_megatron_are_refused_only_for_the_missing_distributed_optimizer(
    parser: ArgumentParser,
) -> None:
    args = parser.parse_args(["--use-distributed-optimizer"])
    refuse_unsupported(args)
    args = parser.parse_args([])
    assert [row.flag for row in REFUSALS if row.refused(args)] == ["--use-distributed-optimizer"]
