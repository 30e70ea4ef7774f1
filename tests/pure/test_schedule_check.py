"""Every switch of a schedule is checked against the job before its first iteration."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.schedule.batches import parse_batches
from megatron_dynatrain.schedule.check import ModelSizes, check_schedule
from megatron_dynatrain.schedule.problems import ScheduleProblemsError
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.schema import parse_schedule

MODEL: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_query_groups": 12,
    "ffn_hidden_size": 96,
    "seq_length": 32,
    "global_batch_size": 24,
}


def check(
    switches: str, *, layouts: str = "", world_size: int = 12, launch: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Check the given switches; sizes of the model and limits of the training can be changed by name."""
    times = ("train_iters", "train_samples", "start_iteration", "start_samples", "check_times", "batches")
    limits = {name: changes.pop(name) for name in times if name in changes}
    lines = "".join(f"  - {{{switch}}}\n" for switch in switches.split("\n"))
    schedule = parse_schedule(f"version: 1\n{layouts}switches:\n{lines}", "s.yaml", partly=True)
    target = Target(None, ParallelLayout.for_world(world_size, **(launch or {})), 1, "launch flags")
    return check_schedule(schedule, ModelSizes(**(MODEL | changes)), target, world_size, **limits)


def problems_of(switches: str, **changes: Any) -> list[str]:
    with pytest.raises(ScheduleProblemsError) as caught:
        check(switches, **changes)
    return [problem.render() for problem in caught.value.problems]


def test_a_schedule_that_fits_comes_back_with_every_layout_in_full() -> None:
    planned: tuple[PlannedSwitch, ...] = check(
        "at_iteration: 5, to: {tp: 2}\nat_samples: 240, to: {pp: 3, micro_batch_size: 2}\n"
        "at_iteration: 19, to: {tp: 1}",
        train_iters=20,
    )
    assert [switch.target.layout.describe() for switch in planned] == ["tp2 dp6", "tp2 pp3 dp2", "pp3 dp4"]
    assert [switch.target.micro_batch_size for switch in planned] == [1, 2, 2]


MISFIT = "s.yaml:3 switches[0].to{key}: the model doesn't fit the layout {layout}: {size} (at_iteration: 5); {rest}"


@pytest.mark.parametrize(
    ("to", "changes", "key", "layout", "size", "rest"),
    [
        ("tp: 3", {"num_attention_heads": 8, "num_query_groups": 1}, "tp", "tp3 dp4", "num_attention_heads",
         "expected: a multiple of tp 3; got: 8"),
        ("tp: 6", {"num_query_groups": 4}, "tp", "tp6 dp2", "num_query_groups",
         "expected: a multiple or a divisor of tp 6; got: 4"),
        ("tp: 3", {"ffn_hidden_size": 64}, "tp", "tp3 dp4", "ffn_hidden_size", "expected: a multiple of tp 3; got: 64"),
        ("tp: 3", {"padded_vocab_size": 128}, "tp", "tp3 dp4", "padded_vocab_size",
         "expected: a multiple of tp 3; got: 128"),
        ("tp: 3, sequence_parallel: true", {}, "", "tp3 dp4 sp", "seq_length",
         "expected: a multiple of cp 1 x tp 3 = 3 for sequence parallelism; got: 32"),
        ("micro_batch_size: 3", {}, "micro_batch_size", "dp12", "global_batch_size",
         "expected: a multiple of micro batch 3 x dp 12 = 36; got: 24"),
    ],
)  # fmt: skip
def test_a_size_that_the_layout_does_not_divide_is_named(
    to: str, changes: dict[str, Any], key: str, layout: str, size: str, rest: str
) -> None:
    expected = MISFIT.format(key=f".{key}" if key else "", layout=layout, size=size, rest=rest)
    assert problems_of(f"at_iteration: 5, to: {{{to}}}", **changes) == [expected]


def test_c06_layers_that_the_stages_do_not_divide_are_named() -> None:
    (problem,) = problems_of("at_iteration: 5, to: {pp: 4}", num_layers=6)
    assert problem.startswith("s.yaml:3 switches[0].to.pp: ")
    assert "6" in problem
    assert "4" in problem
    check("at_iteration: 5, to: {pp: 4, first: 2, last: 2}", num_layers=6)


def test_a_layout_that_does_not_divide_the_world_is_refused() -> None:
    assert problems_of("at_iteration: 5, to: {tp: 5}") == [
        "s.yaml:3 switches[0].to.tp: tp 5 x cp 1 x pp 1 = 5 doesn't divide the world size 12 (at_iteration: 5);"
        " expected: a world size that is a multiple of 5; got: 12;"
        " hint: a schedule or request that doesn't name tp, cp or pp keeps its value: name it too"
    ]


def test_a_vocabulary_that_is_not_fixed_yet_fits_every_tp() -> None:
    check("at_iteration: 5, to: {tp: 3}\nat_iteration: 6, to: {tp: 4}")


def test_the_launch_layout_is_checked_too() -> None:
    (problem,) = problems_of("at_iteration: 5, to: {tp: 4}", launch={"tp": 3}, ffn_hidden_size=64)
    assert problem == (
        "launch flags ffn_hidden_size: the model doesn't fit the layout tp3 dp4; expected: a multiple of tp 3; got: 64"
    )


@pytest.mark.parametrize("trigger", ["at_iteration: 7", "at_iteration: 10", "at_samples: 240", "at_samples: 100"])
def test_a_switch_in_the_past_is_refused_with_what_to_do(trigger: str) -> None:
    kind, value = trigger.split(": ")
    start = {"at_iteration": 10, "at_samples": 240}[kind]
    (problem,) = problems_of(f"{trigger}, to: {{tp: 2}}", start_iteration=10)
    assert problem == (
        f"s.yaml:3 switches[0].{kind}: the switch is in the past; expected: more than {start}, where this run starts"
        f" (iteration 10); got: {value}; hint: delete the switches that have happened, and launch on the layout the"
        " job should go on with: later switches keep its value of every key that they don't name"
    )


def test_times_are_not_checked_before_the_start_is_known() -> None:
    switches = "at_iteration: 50, to: {tp: 2}\nat_samples: 1, to: {tp: 1}"
    assert len(problems_of(switches, train_iters=20)) == 1
    check(switches, train_iters=20, check_times=False)
    assert problems_of("at_iteration: 50, to: {tp: 5}", check_times=False)


def test_the_first_boundary_after_the_start_is_not_in_the_past() -> None:
    check("at_iteration: 11, to: {tp: 2}", start_iteration=10)
    check("at_samples: 241, to: {tp: 2}", start_iteration=10)
    check("at_samples: 241, to: {tp: 2}", start_iteration=100, start_samples=240)


@pytest.mark.parametrize(
    ("trigger", "limits", "expected"),
    [
        ("at_iteration: 20", {"train_iters": 20}, "at most 19 (the training ends with iteration 20); got: 20"),
        ("at_samples: 457", {"train_iters": 20}, "at most 456 (the training ends with iteration 20); got: 457"),
        ("at_iteration: 20", {"train_samples": 490}, "at most 19 (the training ends with iteration 20); got: 20"),
        ("at_samples: 480", {"train_samples": 480}, "at most 456 (the training ends with iteration 20); got: 480"),
    ],
)
def test_a_switch_with_no_iteration_left_after_it_is_refused(
    trigger: str, limits: dict[str, int], expected: str
) -> None:
    kind = trigger.split(":")[0]
    assert problems_of(f"{trigger}, to: {{tp: 2}}", **limits) == [
        f"s.yaml:3 switches[0].{kind}: the switch never happens: no iteration is left after it; expected: {expected}"
    ]


def test_a_switch_before_the_last_iteration_is_accepted() -> None:
    check("at_iteration: 19, to: {tp: 2}", train_iters=20)
    check("at_samples: 456, to: {tp: 2}", train_samples=480)


@pytest.mark.parametrize(
    ("second", "got"),
    [
        ("at_samples: 120", "120, the boundary after iteration 5"),
        ("at_samples: 97", "97, the boundary after iteration 5"),
        ("at_samples: 1", "1, the boundary after iteration 1"),
    ],
)
def test_iterations_and_samples_are_compared_as_boundaries(second: str, got: str) -> None:
    assert problems_of(f"at_iteration: 5, to: {{tp: 2}}\n{second}, to: {{tp: 3}}") == [
        "s.yaml:4 switches[1].at_samples: switches must be in the order in which they happen, each at its own boundary;"
        f" expected: a boundary after iteration 5, of the switch on line 3; got: {got}"
    ]
    check("at_iteration: 5, to: {tp: 2}\nat_samples: 121, to: {tp: 3}")


def test_ranks_that_the_job_does_not_have_are_refused_and_some_of_those_it_has_are_not() -> None:
    assert problems_of("at_iteration: 5, to: {ranks: [0, 99, 1]}")[:1] == [
        "s.yaml:3 switches[0].to.ranks: the job has no ranks [99];"
        " expected: ranks of the launch layout, in any order; those left out wait outside; got: [0, 99, 1]"
    ]
    (switch,) = check("at_iteration: 5, to: {tp: 1, ranks: [3, 1]}")
    assert (switch.target.layout.ranks, switch.target.layout.dp) == ((3, 1), 2)


def test_batch_sizes_are_chained_and_those_of_the_launch_are_filled_in() -> None:
    planned = check(
        "at_iteration: 5, to: {tp: 2}\nat_iteration: 6, to: {global_batch_size: 48}\nat_iteration: 7, to: {tp: 1}"
    )
    assert [switch.target.global_batch_size for switch in planned] == [24, 48, 48]


def test_each_batch_size_is_divided_by_micro_batch_and_dp() -> None:
    assert problems_of("at_iteration: 5, to: {global_batch_size: 30}") == [
        "s.yaml:3 switches[0].to.global_batch_size: the model doesn't fit the layout dp12: global_batch_size"
        " (at_iteration: 5); expected: a multiple of micro batch 1 x dp 12 = 12; got: 30"
    ]
    (problem,) = problems_of("at_iteration: 5, to: {global_batch_size: 36}\nat_iteration: 6, to: {micro_batch_size: 2}")
    assert problem.startswith("s.yaml:4 switches[1].to.micro_batch_size: ")
    assert problem.endswith("expected: a multiple of micro batch 2 x dp 12 = 24; got: 36")


def test_the_batch_of_an_evaluation_stays_and_has_to_fit_every_layout() -> None:
    check("at_iteration: 5, to: {micro_batch_size: 4, global_batch_size: 96}")
    (problem,) = problems_of(
        "at_iteration: 5, to: {micro_batch_size: 4, global_batch_size: 96}", eval_global_batch_size=24
    )
    assert problem.startswith("s.yaml:3 switches[0].to.micro_batch_size: ")
    assert "eval_global_batch_size (at_iteration: 5); expected: a multiple of micro batch 4 x dp 12 = 48" in problem
    (problem,) = problems_of("at_iteration: 5, to: {tp: 2}", eval_global_batch_size=18)
    assert problem.startswith("launch flags eval_global_batch_size: ")


DOUBLED = "at_iteration: 5, to: {global_batch_size: 48}\n"  # 120 samples after 5, 168 after 6, 216 after 7


@pytest.mark.parametrize(
    ("second", "got"),
    [("at_samples: 120", "boundary after iteration 5"), ("at_samples: 96", "boundary after iteration 4")],
)
def test_boundaries_are_counted_with_the_batch_size_that_is_valid_there(second: str, got: str) -> None:
    check(f"{DOUBLED}at_samples: 168, to: {{tp: 2}}\nat_iteration: 7, to: {{tp: 1}}")
    (problem,) = problems_of(f"{DOUBLED}at_samples: 169, to: {{tp: 2}}\nat_iteration: 7, to: {{tp: 1}}")
    assert problem.startswith("s.yaml:5 switches[2].at_iteration: switches must be in the order")
    assert "expected: a boundary after iteration 7, of the switch on line 4" in problem
    (problem,) = problems_of(f"{DOUBLED}{second}, to: {{tp: 2}}")
    assert problem.endswith(got)


@pytest.mark.parametrize(
    ("last", "limits", "expected"),
    [
        ("at_iteration: 8", {"train_samples": 300}, "at most 7 (the training ends with iteration 8)"),
        ("at_samples: 217", {"train_samples": 300}, "at most 216 (the training ends with iteration 8)"),
        ("at_samples: 217", {"train_iters": 8}, "at most 216 (the training ends with iteration 8)"),
    ],
)
def test_the_end_is_counted_with_the_batch_size_that_is_valid_there(
    last: str, limits: dict[str, int], expected: str
) -> None:
    (problem,) = problems_of(f"{DOUBLED}{last}, to: {{tp: 2}}", **limits)
    assert f"no iteration is left after it; expected: {expected}" in problem
    check(f"{DOUBLED}at_iteration: 7, to: {{tp: 2}}", **limits)


def test_a_batch_for_which_too_few_samples_are_left_is_refused() -> None:
    check("at_iteration: 5, to: {global_batch_size: 48}", train_samples=168)
    (problem,) = problems_of("at_iteration: 5, to: {global_batch_size: 48}", train_samples=167)
    assert "no iteration is left after it; expected: at most 4 " in problem


STEPS = {"global_batch_size": None, "batches": parse_batches("0:12 60:24 100:48", None)}
# Samples 0 12 24 36 48 60 84 108 156: steps after iterations 5 and 7.


def test_a_layout_has_to_divide_the_batch_sizes_that_it_meets_and_no_others() -> None:
    planned = check("at_iteration: 5, to: {micro_batch_size: 2}\nat_iteration: 7, to: {micro_batch_size: 4}", **STEPS)
    assert [switch.target.global_batch_size for switch in planned] == [None, None]
    (problem,) = problems_of("at_iteration: 4, to: {micro_batch_size: 2}", **STEPS)
    assert problem == (
        "s.yaml:3 switches[0].to.micro_batch_size: the model doesn't fit the layout dp12: global_batch_size"
        " (at_iteration: 4); expected: a multiple of micro batch 2 x dp 12 = 24; got: 12"
        " (step 0:12 of --step-batch-size-schedule, from 0 samples on)"
    )
    problems = problems_of("at_samples: 36, to: {micro_batch_size: 4}\nat_iteration: 7, to: {tp: 2}", **STEPS)
    assert [problem.split("got: ")[1] for problem in problems] == [
        "12 (step 0:12 of --step-batch-size-schedule, from 0 samples on)",
        "24 (step 60:24 of --step-batch-size-schedule, from 60 samples on)",
    ]
    (problem,) = problems_of("at_iteration: 5, to: {tp: 2}", world_size=24, **STEPS)
    assert problem.startswith("launch flags global_batch_size: the model doesn't fit the layout dp24; ")
    check("at_iteration: 5, to: {tp: 2, vpp: 2, pp: 2}", **STEPS)
    (problem,) = problems_of("at_iteration: 4, to: {vpp: 2, pp: 2, micro_batch_size: 2}", **STEPS)
    assert "got: 12 / (micro batch 2 x dp 6) = 1 micro-batches (step 0:12 of" in problem


def test_steps_after_the_end_are_not_met_and_those_before_the_start_neither() -> None:
    steps = STEPS | {"batches": parse_batches("0:12 60:24 100:30", None)}
    (problem,) = problems_of("at_iteration: 5, to: {tp: 1}", **steps)
    assert "got: 30 (step 100:30" in problem
    for limit in ({"train_iters": 7}, {"train_samples": 108}):
        check("at_iteration: 5, to: {tp: 1}", **limit, **steps)
    (problem,) = problems_of("at_iteration: 5, to: {tp: 1}", train_iters=8, **steps)
    twice = STEPS | {"batches": parse_batches("0:7 14:12", None)}
    assert len(problems_of("at_iteration: 5, to: {tp: 1}", **twice)) == 1
    check("at_iteration: 5, to: {tp: 1}", start_iteration=2, **twice)
    check("at_iteration: 5, to: {tp: 1}", check_times=False, **twice)  # nobody knows yet what it meets


def test_a_batch_that_shrinks_under_a_layout_is_refused_as_megatron_stops_there() -> None:
    shrinking = STEPS | {"batches": parse_batches("0:24 48:12", None)}
    check("at_iteration: 2, to: {tp: 2}", **shrinking)
    (problem,) = problems_of("at_iteration: 3, to: {tp: 2}", **shrinking)
    assert problem == (
        "launch flags --step-batch-size-schedule: Megatron stops where an iteration has fewer micro-batches than the"
        " one before; expected: at least 24; got: 12 (step 48:12 of --step-batch-size-schedule, from 48 samples on)"
    )
    (problem,) = problems_of("at_iteration: 1, to: {tp: 2}", **shrinking)
    assert problem.startswith("s.yaml:3 switches[0].to: Megatron stops where")


def test_a_batch_size_beside_a_schedule_of_them_is_refused() -> None:
    assert problems_of("at_iteration: 5, to: {tp: 2, global_batch_size: 31}", **STEPS) == [
        "s.yaml:3 switches[0].to.global_batch_size: there are two batch sizes (at_iteration: 5); expected:"
        " global_batch_size in layouts or --step-batch-size-schedule, not both;"
        " got: 31 beside --step-batch-size-schedule"
    ]


def test_times_are_counted_with_a_schedule_of_batch_sizes() -> None:
    check("at_samples: 84, to: {tp: 2}\nat_iteration: 7, to: {tp: 1}", train_samples=109, **STEPS)
    (problem,) = problems_of("at_samples: 85, to: {tp: 2}\nat_iteration: 7, to: {tp: 1}", **STEPS)
    assert "expected: a boundary after iteration 7" in problem
    (problem,) = problems_of("at_samples: 85, to: {tp: 2}", train_samples=108, **STEPS)
    assert "no iteration is left after it; expected: at most 84 (the training ends with iteration 7)" in problem
    (problem,) = problems_of("at_samples: 84, to: {tp: 2}", start_iteration=6, **STEPS)
    assert "expected: more than 84, where this run starts (iteration 6)" in problem


def test_such_keys_are_accepted_where_they_change_nothing() -> None:
    check("at_iteration: 5, to: {cp: 1, ep: 1, etp: 1, vpp: 1, instances: 1, global_batch_size: 24}")
    check("at_iteration: 5, to: {vpp: null, ranks: [0, 1, 2, 3]}", world_size=4)


def test_a_stage_of_multi_token_prediction_without_its_tied_embedding_is_refused() -> None:
    switches = "at_iteration: 5, to: {pp: 2}\nat_iteration: 6, to: {pp: 1, tp: 2}"
    prediction = {"mtp_num_layers": 1, "tied_embeddings": True}
    assert problems_of(switches, **prediction) == [
        "s.yaml:3 switches[0].to.pp: multi-token prediction with tied embeddings can't be on another stage than the"
        " embedding: mtp_num_layers (at_iteration: 5); expected: pp 1 (--pipeline-model-parallel-size 1), or"
        " --untie-embeddings-and-output-weights; got: pp 2 with --mtp-num-layers 1 and tied embeddings;"
        " hint: launch with --untie-embeddings-and-output-weights, or keep to layouts with pp 1"
    ]
    (problem,) = problems_of("at_iteration: 5, to: {pp: 1}", launch={"pp": 2}, **prediction)
    assert problem.startswith("launch flags mtp_num_layers: multi-token prediction with tied embeddings")
    check(switches, **(prediction | {"tied_embeddings": False}))
    check(switches, **(prediction | {"mtp_num_layers": None}))
