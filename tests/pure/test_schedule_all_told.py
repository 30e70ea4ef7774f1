"""Everything that is wrong with a schedule is told at once, each thing on its line."""

from __future__ import annotations

import pytest

from tests.pure.test_schedule_check import problems_of


def test_everything_that_is_wrong_is_told_at_once_each_on_its_line() -> None:
    problems = problems_of(
        "at_iteration: 5, to: {tp: 5}\nat_iteration: 6, to: {tp: 1, ep: 2}\n"
        "at_iteration: 7, to: {ep: 1, tp: 12, micro_batch_size: 48}",
        train_iters=7,
    )
    assert [problem.split(": ")[0] for problem in problems] == [
        "s.yaml:3 switches[0].to.tp",
        "s.yaml:4 switches[1].to.ep",
        "s.yaml:5 switches[2].to",
        "s.yaml:5 switches[2].at_iteration",
    ]


def test_every_size_that_a_layout_does_not_divide_is_told() -> None:
    problems = problems_of(
        "at_iteration: 5, to: {tp: 3, micro_batch_size: 4, ranks: [0, 1, 2, 3, 4, 99]}\n"
        "at_iteration: 9, to: {tp: 1, ranks: null}",
        num_query_groups=4,
        ffn_hidden_size=64,
        global_batch_size=27,
        eval_global_batch_size=36,
        train_iters=9,
    )
    expected = [
        ("launch flags global_batch_size", "the model doesn't fit"),
        ("s.yaml:3 switches[0].to.ranks", "the job has no ranks [99]"),
        ("s.yaml:3 switches[0].to.tp", "num_query_groups (at_iteration: 5)"),
        ("s.yaml:3 switches[0].to.tp", "ffn_hidden_size (at_iteration: 5)"),
        ("s.yaml:3 switches[0].to", "global_batch_size (at_iteration: 5)"),
        ("s.yaml:3 switches[0].to", "eval_global_batch_size (at_iteration: 5)"),
        ("s.yaml:4 switches[1].to.tp", "global_batch_size (at_iteration: 9)"),
        ("s.yaml:4 switches[1].to.tp", "eval_global_batch_size (at_iteration: 9)"),
        ("s.yaml:4 switches[1].at_iteration", "the switch never happens"),
    ]
    assert [problem.split(": ")[0] for problem in problems] == [place for place, _ in expected]
    assert all(words in problem for problem, (_, words) in zip(problems, expected, strict=True))


@pytest.mark.parametrize(
    ("switches", "places"),
    [
        # What can't be read, and a switch before it that doesn't fit; nothing of the switch after it.
        (
            "at_iteration: 5, to: {tp: 5}\nat_iteration: 6, to: {tq: 2}\nat_iteration: 7, to: {tp: 5}",
            ["s.yaml:3 switches[0].to.tp", "s.yaml:4 switches[1].to.tq"],
        ),
        (
            "at_iteration: 5, to: {tp: 5}\nat_iteration: 6, to: wide\nat_iteration: 7, to: {tp: 5}",
            ["s.yaml:3 switches[0].to.tp", "s.yaml:4 switches[1].to"],
        ),
        (
            "at_iteration: 5, to: {tp: 5}\nto: {tp: 1}\nat_samples: 1, to: {tp: 2, sp: true}",
            ["s.yaml:3 switches[0].to.tp", "s.yaml:5 switches[2].to.sp", "s.yaml:4 switches[1]"],
        ),
        # Out of order: told once, although form and times are looked at apart.
        (
            "at_iteration: 6, to: {tp: 5}\nat_iteration: 5, to: {tp: 2, micro_batch_size: 5}",
            ["s.yaml:3 switches[0].to.tp", "s.yaml:4 switches[1].at_iteration", "s.yaml:4 switches[1].to"],
        ),
        # Nothing is left to check.
        ("at_iteration: 5, to: {tq: 5}\nat_iteration: 6, to: {tp: 5}", ["s.yaml:3 switches[0].to.tq"]),
    ],
)
def test_what_can_not_be_read_is_told_with_what_does_not_fit(switches: str, places: list[str]) -> None:
    found = [problem.split(": ")[0] for problem in problems_of(switches)]
    assert sorted(found) == sorted(places)


def test_a_layout_that_can_not_be_read_ends_the_switches_that_are_checked() -> None:
    layouts = "layouts: {odd: {tp: two}, five: {tp: 5}}\n"
    switches = "at_iteration: 5, to: five\nat_iteration: 6, to: odd\nat_iteration: 7, to: five"
    found = [problem.split(": ")[0] for problem in problems_of(switches, layouts=layouts)]
    assert found == ["s.yaml:2 layouts.odd.tp", "s.yaml:2 layouts.five.tp"]
