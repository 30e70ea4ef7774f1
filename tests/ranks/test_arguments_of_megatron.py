"""The table of refused options against Megatron's own parser: every name in it is one that Megatron has."""

from __future__ import annotations

import re
import shlex
import warnings
from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron_dynatrain.schedule.recipe import load_recipe
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


ROOT = Path(__file__).resolve().parents[2]


def written_flags() -> dict[str, list[str]]:
    """The flags of every shipped file of flags, recipe and example of the README."""
    found = {
        path.name: shlex.split(path.read_text(), comments=True) for path in (ROOT / "configs/models").glob("*.args")
    }
    for path in (ROOT / "configs" / "recipes").glob("*.yaml"):
        for phase in load_recipe(path).phases:
            found[f"{path.name} {phase.name}"] = phase.words()
    blocks = re.findall(r"^torchrun .*?[^\\]\n", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    found["README.md"] = [word for block in blocks for word in block.split("-m megatron_dynatrain.run")[1].split()]
    return found


@pytest.mark.parametrize("where", written_flags())
def test_every_flag_that_is_written_somewhere_is_one_of_megatron(where: str, parser: ArgumentParser) -> None:
    known = {option for action in parser._actions for option in action.option_strings}
    flags = [word for word in written_flags()[where] if word.startswith("--")]
    assert flags
    assert [flag for flag in flags if flag not in known] == []
    if where != "README.md":
        parser.parse_args(written_flags()[where])
