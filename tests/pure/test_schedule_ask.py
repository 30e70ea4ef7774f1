"""A layout that is asked for while the job runs: the rules and the words of a schedule."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from megatron_dynatrain.errors import ScheduleError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.schedule.ask import check_asked, read_asked
from megatron_dynatrain.schedule.batches import parse_batches
from megatron_dynatrain.schedule.check import ModelSizes
from megatron_dynatrain.schedule.clock import Clock
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.schema import parse_schedule

SCHEDULE = parse_schedule(
    """\
version: 1
layouts:
  wide: {tp: 2}
  deep: {tp: 1, pp: 2, micro_batch_size: 2}
  odd: {tp: 3}
switches:
  - {at_iteration: 5, to: wide}
""",
    "s.yaml",
)
MODEL = ModelSizes(
    num_layers=4, hidden_size=64, num_attention_heads=4, global_batch_size=8, padded_vocab_size=130, seq_length=32
)
NOW = Target("wide", ParallelLayout.for_world(4, tp=2), 1, "launch flags", 16)


def ask(to: str | dict[str, Any], now: Target = NOW, schedule: Any = SCHEDULE) -> PlannedSwitch:
    return check_asked(read_asked(to, "r1", schedule), now, MODEL)


@pytest.mark.parametrize(
    ("to", "layout", "micro", "batch"),
    [
        ("deep", "pp2 dp2", 2, 16),
        ({"tp": 1}, "dp4", 1, 16),
        ({"pp": 2}, "tp2 pp2", 1, 16),
        ({"global_batch_size": 8}, "tp2 dp2", 1, 8),
        ({"sequence_parallel": True}, "tp2 dp2 sp", 1, 16),
    ],
)
def test_keys_that_are_not_named_keep_the_value_of_now(to: Any, layout: str, micro: int, batch: int) -> None:
    found = ask(to).target
    assert (found.layout.describe(), found.micro_batch_size, found.global_batch_size) == (layout, micro, batch)


def test_a_schedule_of_batch_sizes_is_looked_at_from_now_to_the_next_planned_switch() -> None:
    batches = parse_batches("0:2 8:8 40:12", None)
    model, now = replace(MODEL, global_batch_size=None), replace(NOW, global_batch_size=None)

    def ask_at(samples: int, until: int | None, to: str = "micro_batch_size", size: int = 4) -> PlannedSwitch:
        clock = Clock(iteration=3, samples=samples, batches=batches)
        return check_asked(read_asked({to: size}, "r1", SCHEDULE), now, model, clock, until)

    assert ask_at(8, 40).target.global_batch_size is None
    for samples, until, got in [
        (6, 40, "2 (step 0:2 of"),
        (8, 41, "12 (step 40:12 of"),
        (8, None, "12 (step 40:12 of"),
    ]:
        with pytest.raises(ScheduleError, match="a multiple of micro batch 4 x dp 2 = 8") as refused:
            ask_at(samples, until)
        assert f"got: {got}" in str(refused.value)
        assert "subject: --to micro_batch_size" in str(refused.value)
    with pytest.raises(ScheduleError, match="not both"):
        ask_at(8, 40, "global_batch_size", 8)


def test_its_trigger_is_the_request_also_after_a_journey() -> None:
    assert str(pickle.loads(pickle.dumps(ask("deep"))).trigger) == "request r1"


def test_without_a_schedule_keys_can_be_asked_for() -> None:
    assert ask({"pp": 2}, schedule=None).target.layout.describe() == "tp2 pp2"


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("dep", ["unknown layout 'dep'", "wide, deep, odd", "did you mean 'deep'?", "subject: --to;"]),
        ({"tpp": 2}, ["unknown key 'tpp'", "did you mean 'tp'?", "--to tpp"]),
        ({"tp": "two"}, ["an integer", "--to tp"]),
        ({"dp": 2}, ["dp is what is left"]),
        ({"tp": 8}, ["doesn't divide the world size 4", "--to tp", "request r1"]),
        ({"tp": 4}, ["padded_vocab_size"]),
        ({"pp": 2, "vpp": 3}, ["vpp"]),
        ({"micro_batch_size": 3}, ["a multiple of micro batch 3 x dp 2 = 6"]),
        ({"ranks": [0, 1]}, ["ranks"]),
        ("odd", ["s.yaml:5 layouts.odd.tp"]),
        ("wide", ["already so"]),
        ({"tp": 2, "pp": 1}, ["already so"]),
    ],
)
def test_what_can_not_be_done_is_refused_in_words_of_the_request(to: Any, words: list[str]) -> None:
    with pytest.raises(ScheduleError) as refused:
        ask(to)
    assert [word for word in words if word not in str(refused.value)] == []
    assert "switches" not in str(refused.value)
