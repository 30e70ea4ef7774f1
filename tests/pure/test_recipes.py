"""Recipes: those that are shipped fit, and a broken one is refused with its line."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megatron_dynatrain.cli import app
from megatron_dynatrain.recipes import CheckedPhase, check_recipe
from megatron_dynatrain.schedule.problems import ScheduleProblemsError
from megatron_dynatrain.schedule.recipe import build_recipe, is_recipe, load_recipe
from megatron_dynatrain.schedule.resolve import Target
from megatron_dynatrain.schedule.schema import load_schedule
from megatron_dynatrain.schedule.source import parse_source, read_source

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("gpt_dense", "moe")

GOOD = """\
version: 1
world_size: 8
flags:
  num-layers: 8
  hidden-size: 64
  num-attention-heads: 8
  seq-length: 32
  micro-batch-size: 1
  global-batch-size: 16
  use-distributed-optimizer: true
phases:
  - name: first
    flags: {train-iters: 10, eval-iters: 0}
    schedule:
      version: 1
      layouts:
        deep: {pp: 2}
      switches:
        - {at_iteration: 5, to: deep}
  - name: second
    flags: {load: x, global-batch-size: 32, num-layers-per-virtual-pipeline-stage: 2, pipeline-model-parallel-size: 2}
    schedule:
      version: 1
      switches:
        - {at_iteration: 15, to: {vpp: null}}
"""


def checked(name: str) -> dict[str, CheckedPhase]:
    return {
        found.phase.name: found for found in check_recipe(load_recipe(ROOT / "configs" / "recipes" / f"{name}.yaml"))
    }


def check(text: str) -> tuple[CheckedPhase, ...]:
    return check_recipe(build_recipe(parse_source(text, "r.yaml")))


def problems_of(text: str) -> list[str]:
    with pytest.raises(ScheduleProblemsError) as caught:
        check(text)
    return [problem.render() for problem in caught.value.problems]


def pairs(phase: CheckedPhase) -> list[tuple[Target, Target]]:
    targets = [phase.launch, *(switch.target for switch in phase.switches)]
    return list(itertools.pairwise(targets))


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_are_accepted_and_have_the_switches_they_promise(name: str) -> None:
    phases = checked(name)
    short, long = (pairs(phases[phase]) for phase in ("short", "long"))
    layouts = [(one.layout, other.layout) for one, other in short]
    assert any(one.tp > other.tp and one.pp < other.pp for one, other in layouts)
    assert any(one.vpp is None and other.vpp for one, other in layouts)
    assert any(one.vpp and other.vpp is None for one, other in layouts)
    assert any(one.layout.cp < other.layout.cp for one, other in long)
    assert phases["long"].phase.flags["seq-length"] > phases["short"].phase.flags["seq-length"]  # type: ignore[operator]
    if name == "moe":
        assert any((one.ep, one.etp, other.ep, other.etp) == (4, 1, 2, 2) for one, other in layouts)


@pytest.mark.parametrize("name", RECIPES)
def test_every_switch_of_a_shipped_recipe_has_its_reason_above_it(name: str) -> None:
    lines = (ROOT / "configs" / "recipes" / f"{name}.yaml").read_text().splitlines()
    switches = [place for place, line in enumerate(lines) if line.strip().startswith("- {at_")]
    assert switches
    assert [lines[place] for place in switches if not lines[place - 1].strip().startswith("# ")] == []


def test_flags_of_a_phase_come_over_those_of_the_recipe() -> None:
    first, second = check(GOOD)
    assert (first.launch.layout.describe(), first.batches.size_at(0), first.starts_anew) == ("dp8", 16, True)
    assert (second.launch.layout.describe(), second.batches.size_at(0)) == ("pp2 vpp2 dp4", 32)
    assert not second.starts_anew  # it goes on where its checkpoint ends
    words = second.phase.words()
    assert "--use-distributed-optimizer" in words
    assert words[words.index("--global-batch-size") + 1] == "32"
    assert words.count("--global-batch-size") == 1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{pp: 2}", "{pp: 3}", "r.yaml:17 phases[0].schedule.layouts.deep.pp: tp 1 x cp 1 x pp 3 = 3 doesn't divide"),
        ("{pp: 2}", "{pq: 2}", "r.yaml:17 phases[0].schedule.layouts.deep.pq: unknown key 'pq'"),
        ("to: deep", "to: dep", "r.yaml:19 phases[0].schedule.switches[0].to: unknown layout 'dep'"),
        ("at_iteration: 5", "at_iteration: 10", "r.yaml:19 phases[0].schedule.switches[0].at_iteration: the switch"),
        ("  hidden-size", "  hidden-sise", "r.yaml:5 flags.hidden-sise: missing flag 'hidden-size'"),
        ("num-layers: 8", "num-layers: eight", "r.yaml:4 flags.num-layers: wrong value for 'num-layers'; expected: an"),
        ("num-layers: 8", "--num-layers: 8", "r.yaml:4 flags.--num-layers: a flag is written without --"),
        ("optimizer: true", "optimizer: false", "r.yaml:10 flags.use-distributed-optimizer: --use-dist"),
        ("micro-batch-size: 1", "micro-batch-size: 3", "r.yaml:12 launch flags global_batch_size: the model"),
        ("seq-length: 32", "tensor-model-parallel-size: 3\n  seq-length: 32",
         "r.yaml:13 phases[0]: tp 3 x cp 1 x pp 1 = 3 doesn't divide the world size 8"),
        ("world_size: 8", "world: 8", "r.yaml:1 world_size: missing key 'world_size'"),
        ("name: second", "name: first", "r.yaml:20 phases[1].name: two phases have one name"),
    ],
)  # fmt: skip
def test_a_broken_recipe_is_refused_with_its_line(old: str, new: str, expected: str) -> None:
    assert GOOD.count(old) == 1 or old == "micro-batch-size: 1"
    problems = problems_of(GOOD.replace(old, new, 1))
    assert problems[0].startswith(expected), problems


def test_a_schedule_of_batch_sizes_is_a_flag_of_a_recipe_too() -> None:
    steps = GOOD.replace("  global-batch-size: 16", "  step-batch-size-schedule: '0:16 1600:32'", 1)
    steps = steps.replace("global-batch-size: 32", "eval-global-batch-size: 32")
    first, second = check(steps)
    assert [first.batches.size_at(samples) for samples in (49, 50)] == [16, 32]  # 1600 tokens of 32 a sample
    assert (first.launch.global_batch_size, second.launch.global_batch_size) == (None, None)
    (problem,) = problems_of(steps.replace("0:16", "0:12"))
    assert problem.startswith("r.yaml:12 launch flags global_batch_size: the model doesn't fit the layout dp8")
    problems = problems_of(steps.replace("0:16", "0:16:1"))
    wrong = "r.yaml:9 flags.step-batch-size-schedule: the schedule of batch sizes can't be read (launch of phase "
    assert [problem[: len(wrong) + 3] for problem in problems] == [f"{wrong}'fi", f"{wrong}'se"]
    (problem,) = problems_of(steps.replace("load: x, ", "load: x, global-batch-size: 32, "))
    assert problem.startswith("r.yaml:9 flags.step-batch-size-schedule: two flags say the batch size")


def test_all_phases_are_checked_and_nothing_is_said_twice() -> None:
    (problem,) = problems_of(GOOD.replace("num-layers: 8", "num-layers: 8.5"))  # a flag of both phases
    assert problem.startswith("r.yaml:4 flags.num-layers: ")
    problems = problems_of(GOOD.replace("{pp: 2}", "{pp: 3}").replace("{vpp: null}", "{tp: 3}"))
    assert [problem.split()[0] for problem in problems] == ["r.yaml:17", "r.yaml:25"]


@pytest.mark.parametrize("name", RECIPES)
def test_dynatrain_check_takes_a_recipe_as_well_as_a_schedule(name: str) -> None:
    file = ROOT / "configs" / "recipes" / f"{name}.yaml"
    assert is_recipe(read_source(file))
    result = CliRunner().invoke(app, ["check", str(file), "--json"])
    assert result.exit_code == 0
    assert [phase["name"] for phase in json.loads(result.stdout)["phases"]] == ["short", "long"]
    shown = CliRunner().invoke(app, ["check", str(file)])
    assert shown.exit_code == 0
    assert shown.stdout.count("every switch fits") == 2
    sizes = CliRunner().invoke(app, ["check", str(file), "--world-size", "8"])
    assert sizes.exit_code == 2


def test_dynatrain_check_refuses_a_broken_recipe(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(GOOD.replace("{pp: 2}", "{pp: 3}"))
    result = CliRunner().invoke(app, ["check", str(file)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{file}:17 phases[0].schedule.layouts.deep.pp: " in result.stderr


def test_unpacked_phases_are_flags_and_schedules(tmp_path: Path) -> None:
    file, output = tmp_path / "r.yaml", tmp_path / "out"
    file.write_text(GOOD)
    assert CliRunner().invoke(app, ["unpack", str(file), "--output", str(output)]).exit_code == 0
    assert sorted(path.name for path in output.iterdir()) == ["first.args", "first.yaml", "second.args", "second.yaml"]
    words = shlex.split((output / "first.args").read_text())
    assert words[-3:] == ["--dynamic-parallelism", "--dynamic-parallelism-schedule", str(output / "first.yaml")]
    assert words[words.index("--train-iters") + 1] == "10"
    assert load_schedule(output / "first.yaml").switches[0].name == "deep"
    assert yaml.safe_load((output / "second.yaml").read_text())["switches"][0]["to"] == {"vpp": None}


@pytest.mark.parametrize(
    ("text", "recipe"),
    [("version: 1\nswitches: []", False), (GOOD, True), ("world_size: 4", True), ("- 1", False), ("version: 1", False)],
)
def test_a_recipe_is_told_from_a_schedule_by_its_keys(text: str, recipe: bool) -> None:
    assert is_recipe(parse_source(text, "f.yaml")) == recipe
