"""What the keys a layout doesn't name mean, and layouts that can't exist on the world."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout, PipelineSplit
from megatron_dynatrain.schedule.problems import ScheduleProblemsError
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target, resolve
from megatron_dynatrain.schedule.schema import parse_schedule


def launch_at(world_size: int, micro_batch_size: int = 1, **sizes: Any) -> Target:
    return Target(None, ParallelLayout.for_world(world_size, **sizes), micro_batch_size, "launch flags")


def plan(launch: Target, *layouts: str) -> tuple[PlannedSwitch, ...]:
    switches = "".join(f"  - {{at_iteration: {10 * (i + 1)}, to: {{{layout}}}}}\n" for i, layout in enumerate(layouts))
    schedule = parse_schedule(f"version: 1\nswitches:\n{switches}", "s.yaml")
    return resolve(schedule, launch, launch.layout.world_size)


def layouts_of(launch: Target, *layouts: str) -> list[ParallelLayout]:
    return [switch.target.layout for switch in plan(launch, *layouts)]


def test_unnamed_keys_keep_the_value_the_job_has_just_before() -> None:
    launch = launch_at(8, 2, tp=2, pp=1, sequence_parallel=True)
    first, second, third = plan(launch, "pp: 2", "micro_batch_size: 4", "tp: 4")
    assert first.target.layout == ParallelLayout.for_world(8, tp=2, pp=2, sequence_parallel=True)
    assert (second.target.layout, second.target.micro_batch_size) == (first.target.layout, 4)
    assert third.target.layout == ParallelLayout.for_world(8, tp=4, pp=2, sequence_parallel=True)
    assert third.target.micro_batch_size == 4
    assert [switch.target.layout.dp for switch in (first, second, third)] == [2, 2, 1]


def test_a_named_layout_means_what_it_names_on_top_of_the_layout_before() -> None:
    schedule = parse_schedule(
        "version: 1\nlayouts:\n  deep: {pp: 2}\nswitches:\n  - {at_iteration: 1, to: {tp: 2}}\n"
        "  - {at_iteration: 2, to: deep}\n",
        "s.yaml",
    )
    switch = resolve(schedule, launch_at(4), 4)[1]
    assert switch.target == Target("deep", ParallelLayout.for_world(4, tp=2, pp=2), 1, "s.yaml:3")
    assert (switch.where, switch.index, str(switch.trigger)) == ("s.yaml:6", 1, "at_iteration: 2")
    assert switch.target.describe() == "deep: tp2 pp2"


def test_sequence_parallel_ends_where_tp_becomes_1_and_does_not_come_back_by_itself() -> None:
    launch = launch_at(4, tp=2, sequence_parallel=True)
    found = layouts_of(launch, "tp: 1", "tp: 2", "sequence_parallel: true")
    assert [layout.sequence_parallel for layout in found] == [False, False, True]


def test_virtual_stages_and_split_are_dropped_with_the_pipeline_they_were_chosen_for() -> None:
    launch = launch_at(8, pp=2, vpp=2, split=PipelineSplit(first=1))
    kept, dropped, named = layouts_of(launch, "tp: 2", "pp: 4", "pp: 2, vpp: 4, last: 1")
    assert (kept.vpp, kept.split) == (2, PipelineSplit(first=1))
    assert (dropped.vpp, dropped.split) == (None, PipelineSplit())
    assert (named.vpp, named.split) == (4, PipelineSplit(last=1))


def test_counting_the_loss_as_a_layer_is_kept_in_every_pipeline() -> None:
    launch = launch_at(8, pp=2, split=PipelineSplit(account_for_loss=True))
    assert [layout.split for layout in layouts_of(launch, "pp: 4", "pp: 2")] == [launch.layout.split] * 2


def test_naming_one_way_of_splitting_turns_the_others_off() -> None:
    launch = launch_at(8, pp=2, split=PipelineSplit(account_for_loss=True))
    found = layouts_of(launch, "first: 1", "last: 2", "layout: Ett|ttL", "account_for_embedding: true", "first: null")
    assert [layout.split for layout in found] == [
        PipelineSplit(first=1),
        PipelineSplit(first=1, last=2),
        PipelineSplit(layout="Ett|ttL"),
        PipelineSplit(account_for_embedding=True),
        PipelineSplit(account_for_embedding=True),
    ]


def test_a_written_pipeline_layout_is_dropped_where_the_number_of_chunks_changes() -> None:
    launch = launch_at(2, pp=2, split=PipelineSplit(layout="Ett|ttL"))
    kept, one_chunk, dropped = layouts_of(launch, "micro_batch_size: 2", "vpp: 1", "vpp: 2")
    assert kept.split.layout == one_chunk.split.layout == "Ett|ttL"
    assert (dropped.vpp, dropped.split.layout) == (2, None)


def test_null_turns_a_key_off() -> None:
    launch = launch_at(4, pp=2, vpp=2, split=PipelineSplit(first=1))
    (layout,) = layouts_of(launch, "vpp: null, first: null")
    assert (layout.vpp, layout.split) == (None, PipelineSplit())


def test_etp_follows_tp_until_a_layout_names_it() -> None:
    found = layouts_of(launch_at(8, ep=2), "tp: 2", "etp: 1", "tp: 4", "etp: null")
    assert [(layout.tp, layout.etp) for layout in found] == [(2, 2), (2, 1), (4, 1), (4, 4)]


def test_etp_given_at_launch_is_kept() -> None:
    (layout,) = layouts_of(launch_at(8, tp=2, ep=2, etp=1), "tp: 4")
    assert (layout.tp, layout.etp) == (4, 1)


def test_every_layout_that_does_not_divide_the_world_is_named_with_the_whole_product() -> None:
    with pytest.raises(ScheduleProblemsError) as caught:
        plan(launch_at(4), "tp: 3", "tp: 2", "tp: 4, pp: 2")
    hint = "hint: a schedule or request that doesn't name tp, cp or pp keeps its value: name it too"
    assert [problem.render() for problem in caught.value.problems] == [
        "s.yaml:3 switches[0].to.tp: tp 3 x cp 1 x pp 1 = 3 doesn't divide the world size 4 (at_iteration: 10);"
        " expected: a world size that is a multiple of 3; got: 4; " + hint,
        "s.yaml:5 switches[2].to: tp 4 x cp 1 x pp 2 = 8 doesn't divide the world size 4 (at_iteration: 30);"
        " expected: a world size that is a multiple of 8; got: 4; " + hint,
    ]


def test_a_named_layout_that_can_not_exist_is_blamed_where_the_key_is_written() -> None:
    text = "version: 1\nlayouts:\n  wide:\n    tp: 3\nswitches:\n  - {at_iteration: 1, to: wide}\n"
    with pytest.raises(ScheduleProblemsError) as caught:
        resolve(parse_schedule(text, "s.yaml"), launch_at(4), 4)
    assert caught.value.subject == "s.yaml:4 layouts.wide.tp"
    assert "(at_iteration: 1, layout 'wide' of line 3)" in caught.value.message


@pytest.mark.parametrize(
    ("layout", "subject", "message"),
    [
        ("vpp: 2", "s.yaml:3 switches[0].to.vpp", "a virtual pipeline needs pp > 1"),
        ("order: tp-dp", "s.yaml:3 switches[0].to.order", "the order of the axes names each axis once"),
        ("sequence_parallel: true", "s.yaml:3 switches[0].to.sequence_parallel", "needs tensor parallelism"),
        ("instances: 3", "s.yaml:3 switches[0].to.instances", "3 distributed optimizer instances don't divide"),
        ("ranks: [0, 0, 1, 2]", "s.yaml:3 switches[0].to.ranks", "ranks must be unique"),
        ("layout: x|y, pp: 2", "s.yaml:3 switches[0].to.layout", "the written pipeline layout can't be read"),
        ("pp: 2, layout: E|t|L", "s.yaml:3 switches[0].to.layout", "another number of stages"),
    ],
)
def test_a_layout_that_can_not_exist_is_blamed_on_its_key(layout: str, subject: str, message: str) -> None:
    with pytest.raises(ScheduleProblemsError) as caught:
        plan(launch_at(4), layout)
    assert caught.value.subject == subject
    assert message in caught.value.message
