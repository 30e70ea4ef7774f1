"""The README: its examples work and its tables say what the code says."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest
import typer

from megatron_dynatrain.cli import app
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.recipes import check_recipe
from megatron_dynatrain.schedule.recipe import build_recipe, is_recipe
from megatron_dynatrain.schedule.resolve import Target, resolve
from megatron_dynatrain.schedule.schema import parse_schedule
from megatron_dynatrain.schedule.source import parse_source
from megatron_dynatrain.training.arguments import add_dynamic_parallelism_args
from write_tables import with_tables

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
DOCUMENT = (ROOT / "docs" / "schedule.md").read_text(encoding="utf-8")
YAML = [text for language, text in BLOCKS if language == "yaml"]

# Those of others, which tests/ranks/test_arguments_of_megatron.py looks up in Megatron's parser.
FOREIGN = {"--nproc-per-node", "--use-distributed-optimizer"}


def commands() -> list[list[str]]:
    """Every command line of the README, as words."""
    texts = [text.replace("\\\n", " ") for language, text in BLOCKS if language in ("", "sh", "bash", "shell")]
    lines = [line for text in texts for line in text.splitlines()]
    known = ("make ", "pip ", "torchrun ", "dynatrain ", "python ")
    return [shlex.split(line, comments=True) for line in lines if line.startswith(known)]


def options_of(command: str) -> set[str]:
    """The options of a `dynatrain` command."""
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.opts}


def own_flags() -> list[str]:
    parser = ArgumentParser(add_help=False)
    return [option for action in add_dynamic_parallelism_args(parser)._actions for option in action.option_strings]


def test_there_are_examples() -> None:
    assert YAML
    assert {words[0] for words in commands()} >= {"make", "torchrun", "dynatrain"}


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE))
def test_every_example_of_the_documentation_fits(text: str) -> None:
    source = parse_source(text, "schedule.md")
    if is_recipe(source):
        assert len(check_recipe(build_recipe(source))) == 2
    else:
        assert parse_schedule(text).switches


@pytest.mark.parametrize("text", YAML)
def test_every_schedule_of_the_readme_loads_and_can_be_resolved(text: str) -> None:
    launch = Target(None, ParallelLayout.for_world(8), 1, "launch flags", 8)
    schedule = parse_schedule(text, "README.md")
    assert len(resolve(schedule, launch, 8)) == len(schedule.switches)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_of_the_readme_exists(words: list[str]) -> None:
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[0] == "dynatrain":
        assert given <= options_of(words[1])
        files = [word for word in words[2:] if word.endswith((".yaml", ".args"))]
        assert [name for name in files if not (ROOT / name).is_file()] == []
    else:
        assert given <= {*own_flags(), *FOREIGN}


def test_the_table_of_flags_has_each_flag_of_the_plugin_once() -> None:
    assert re.findall(r"^\| `(--dynamic-parallelism[a-z-]*)", README, re.MULTILINE) == own_flags()


def test_generated_tables_are_those_of_the_code() -> None:
    assert with_tables(README) == README, "run: python scripts/write_tables.py"
    with pytest.raises(ValueError, match="needs one place for the table of refused options"):
        with_tables("no table here")


def test_links_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
