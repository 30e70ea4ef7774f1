"""The form of a schedule file: what is read, and what is refused with file, line, key, expected and got."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megatron_dynatrain.errors import ScheduleError
from megatron_dynatrain.schedule.problems import ScheduleProblemsError
from megatron_dynatrain.schedule.schema import load_schedule, parse_schedule
from megatron_dynatrain.schedule.triggers import Trigger

GOOD = """\
version: 1
layouts:
  wide: {tp: 2, pp: 1}
  deep: {tp: 1, pp: 2, vpp: 2, micro_batch_size: 2}
switches:
  - {at_iteration: 100, to: wide}
  - {at_samples: 4096, to: deep}
  - at_iteration: 300
    to: {tp: 2, cp: 2, sequence_parallel: true, vpp: null}
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(ScheduleProblemsError) as caught:
        parse_schedule(text, "s.yaml")
    return [problem.render() for problem in caught.value.problems]


def with_switch(switch: str, layouts: str = "{wide: {tp: 2}}") -> str:
    return f"version: 1\nlayouts: {layouts}\nswitches:\n  - {switch}\n"


def test_a_good_schedule_keeps_names_triggers_and_only_the_keys_it_names(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    schedule = load_schedule(file)
    assert [switch.trigger for switch in schedule.switches] == [
        Trigger("at_iteration", 100),
        Trigger("at_samples", 4096),
        Trigger("at_iteration", 300),
    ]
    assert [switch.name for switch in schedule.switches] == ["wide", "deep", None]
    assert schedule.switches[1].layout.named() == {"tp": 1, "pp": 2, "vpp": 2, "micro_batch_size": 2}
    assert schedule.switches[2].layout.named() == {"tp": 2, "cp": 2, "vpp": None, "sequence_parallel": True}
    assert schedule.source.line(("layouts", "deep", "vpp")) == 4
    assert schedule.source.line(("switches", 2)) == 8
    assert schedule.source.line(("switches", 2, "to")) == 9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "version: 1\nlayouts:\n  wide:\n    tp: 2\n    ppp: 2\nswitches:\n  - {at_iteration: 1, to: wide}\n",
            [
                "s.yaml:5 layouts.wide.ppp: unknown key 'ppp'; expected: one of tp, cp, ep, etp, pp, vpp,"
                " sequence_parallel, order, instances, first, last, account_for_embedding, account_for_loss, layout,"
                " ranks, micro_batch_size, global_batch_size; got: 'ppp'; hint: did you mean 'pp'?"
            ],
            id="unknown key of a layout, with the nearest",
        ),
        pytest.param(
            with_switch("{at_iter: 3, to: wide}"),
            [
                "s.yaml:4 switches[0].at_iter: unknown key 'at_iter'; expected: one of at_iteration, at_samples, to;"
                " got: 'at_iter'; hint: did you mean 'at_iteration'?"
            ],
            id="unknown key of a switch",
        ),
        pytest.param(
            GOOD.replace("switches:", "switches_:"),
            [
                "s.yaml:1 switches: missing key 'switches'; expected: switches: ...; got: nothing",
                "s.yaml:5 switches_: unknown key 'switches_'; expected: one of version, layouts, switches;"
                " got: 'switches_'; hint: did you mean 'switches'?",
            ],
            id="unknown key of the file",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {tp: two}}"),
            ["s.yaml:4 switches[0].to.tp: wrong value for 'tp'; expected: an integer; got: 'two' (a string)"],
            id="a word for a size",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {tp: 2.0}}"),
            ["s.yaml:4 switches[0].to.tp: wrong value for 'tp'; expected: an integer; got: 2.0 (a number)"],
            id="a fraction for a size",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {tp: true}}"),
            ["s.yaml:4 switches[0].to.tp: wrong value for 'tp'; expected: an integer; got: true (a boolean)"],
            id="a boolean for a size",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {pp: 0}}"),
            ["s.yaml:4 switches[0].to.pp: wrong value for 'pp'; expected: an integer, at least 1; got: 0 (an integer)"],
            id="size 0",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {tp: null}}"),
            ["s.yaml:4 switches[0].to.tp: wrong value for 'tp'; expected: an integer; got: nothing (null)"],
            id="null where nothing can be off",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {sequence_parallel: 1}}"),
            [
                "s.yaml:4 switches[0].to.sequence_parallel: wrong value for 'sequence_parallel';"
                " expected: true or false; got: 1 (an integer)"
            ],
            id="a number for a boolean",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {ranks: [0, x]}}"),
            [
                "s.yaml:4 switches[0].to.ranks[1]: wrong value for an item of the list; expected: an integer;"
                " got: 'x' (a string)"
            ],
            id="a word among ranks",
        ),
        pytest.param(
            with_switch("{at_iteration: 0, to: wide}"),
            [
                "s.yaml:4 switches[0].at_iteration: wrong value for 'at_iteration'; expected: an integer, at least 1;"
                " got: 0 (an integer)"
            ],
            id="before the first iteration",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, at_samples: 8, to: wide}"),
            [
                "s.yaml:4 switches[0]: a switch needs one trigger; expected: either at_iteration or at_samples;"
                " got: both"
            ],
            id="both triggers",
        ),
        pytest.param(
            with_switch("{to: wide}"),
            [
                "s.yaml:4 switches[0]: a switch needs one trigger; expected: either at_iteration or at_samples;"
                " got: neither"
            ],
            id="no trigger",
        ),
        pytest.param(
            with_switch("{at_iteration: 3}"),
            ["s.yaml:4 switches[0].to: missing key 'to'; expected: to: ...; got: nothing"],
            id="no layout",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: 2}"),
            [
                "s.yaml:4 switches[0].to: wrong value for 'to'; expected: the name of a layout, or a mapping with its"
                " sizes; got: 2 (an integer)"
            ],
            id="a number for a layout",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: wid}"),
            [
                "s.yaml:4 switches[0].to: unknown layout 'wid'; expected: one of wide; got: 'wid' (a string);"
                " hint: did you mean 'wide'?"
            ],
            id="unknown layout, with the nearest",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: wide}\n  - {at_iteration: 2, to: wide}"),
            [
                "s.yaml:5 switches[1].at_iteration: switches must be in the order in which they happen, each at its"
                " own boundary; expected: more than 3, of the switch on line 4; got: 2"
            ],
            id="out of order",
        ),
        pytest.param(
            with_switch("{at_samples: 3, to: wide}\n  - {at_iteration: 1, to: wide}\n  - {at_samples: 3, to: wide}"),
            [
                "s.yaml:6 switches[2].at_samples: switches must be in the order in which they happen, each at its own"
                " boundary; expected: more than 3, of the switch on line 4; got: 3"
            ],
            id="twice at the same samples",
        ),
        pytest.param(
            "version: 1\nlayouts:\n  a: {tp: 1}\n  a: {tp: 2}\nswitches:\n  - {at_iteration: 1, to: a}\n",
            ["s.yaml:4 layouts.a: duplicate layout name 'a'; expected: each once; got: also on line 3"],
            id="a layout name twice",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: {tp: 1, tp: 2}}"),
            ["s.yaml:4 switches[0].to.tp: duplicate key 'tp'; expected: each once; got: also on line 4"],
            id="a key twice",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: wide}", "{3: {tp: 2}, wide: {}}"),
            [
                "s.yaml:2 layouts: a key that is not a string; expected: a string; got: 3 (an integer);"
                " hint: quote the key"
            ],
            id="a number for a name",
        ),
        pytest.param(
            with_switch("{at_iteration: 3, to: wide}").replace("version: 1", "version: 2"),
            ["s.yaml:1 version: wrong value for 'version'; expected: 1; got: 2 (an integer)"],
            id="another version",
        ),
        pytest.param(
            "version: 1\nswitches: []\n",
            ["s.yaml:2 switches: wrong value for 'switches'; expected: a list of at least 1 item; got: [] (a list)"],
            id="no switches",
        ),
        pytest.param(
            "- version: 1\n",
            [
                "s.yaml:1: wrong value for the schedule; expected: a mapping; got: [{'version': 1}] (a list)",
            ],
            id="a list for a file",
        ),
        pytest.param(
            "# nothing\n",
            ["s.yaml:1: the schedule is empty; expected: a mapping with version: 1"],
            id="empty",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_line_key_expected_and_got(text: str, expected: list[str]) -> None:
    assert problems_of(text) == expected


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("dp", "hint: dp is what is left of the world after the other sizes: remove it"),
        ("tensor_model_parallel_size", "hint: did you mean 'tp'?"),
        ("pipeline-model-parallel-size", "hint: did you mean 'pp'?"),
        ("sequence_paralel", "hint: did you mean 'sequence_parallel'?"),
        ("micro_batch", "hint: did you mean 'micro_batch_size'?"),
    ],
)
def test_an_unknown_key_brings_the_key_that_was_meant(key: str, hint: str) -> None:
    (problem,) = problems_of(with_switch(f"{{at_iteration: 3, to: {{{key}: 2}}}}"))
    assert problem.endswith(f"got: '{key}'; {hint}")


def test_an_unknown_key_that_is_like_no_other_brings_no_guess() -> None:
    (problem,) = problems_of(with_switch("{at_iteration: 3, to: {zzz: 2}}"))
    assert problem.endswith("got: 'zzz'")


def test_all_errors_are_listed_in_file_order_each_on_its_own_line() -> None:
    text = "version: 1\nlayouts:\n  a: {tq: 1}\nswitches:\n  - {at_iteration: x, to: a}\n  - {to: {pp: -1}}\n"
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text, "s.yaml")
    lines = str(caught.value).split("\n")
    assert lines[0] == "[phase check] 3 errors in the schedule s.yaml:"
    assert [line.split(":")[1].split(" ")[0] for line in lines[1:]] == ["3", "5", "6"]


def test_one_error_fills_the_fields_of_the_error() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(with_switch("{at_iteration: 3, to: wid}"), "s.yaml")
    error = caught.value
    assert (error.phase, error.subject) == ("check", "s.yaml:4 switches[0].to")
    assert (error.expected, error.got, error.hint) == ("one of wide", "'wid' (a string)", "did you mean 'wide'?")


def test_the_error_travels_to_other_ranks_whole() -> None:
    with pytest.raises(ScheduleProblemsError) as caught:
        parse_schedule(with_switch("{at_iteration: 0, to: 3}"), "s.yaml")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


def test_text_that_is_no_yaml_is_named_with_its_line() -> None:
    (problem,) = problems_of("version: 1\nlayouts: {wide: [}\n")
    assert problem.startswith("s.yaml:2: the file is not YAML; expected: YAML; got: ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as caught:
        load_schedule(tmp_path / "none.yaml")
    assert caught.value.subject == str(tmp_path / "none.yaml")
    assert caught.value.got == "No such file or directory"


def test_an_alias_that_holds_itself_is_refused() -> None:
    found = problems_of("version: 1\nlayouts: &a {wide: *a}\nswitches:\n  - {at_iteration: 3, to: wide}\n")
    assert "the schedule is nested too deep" in found[0]


def test_an_alias_is_read_like_the_text_it_stands_for() -> None:
    text = "version: 1\nlayouts:\n  a: &sizes {tp: 2}\n  b: *sizes\nswitches:\n  - {at_iteration: 3, to: b}\n"
    assert parse_schedule(text).switches[0].layout.named() == {"tp": 2}
