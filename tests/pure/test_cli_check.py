"""`dynatrain check`: what it prints, its JSON and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_dynatrain.cli import app

SIZES = "--world-size 4 --num-layers 4 --hidden-size 64 --num-attention-heads 8 --global-batch-size 8"
GOOD = """\
version: 1
layouts:
  wide: {tp: 2}
switches:
  - {at_iteration: 5, to: wide}
  - {at_samples: 81, to: {pp: 2, micro_batch_size: 2}}
"""


def run(tmp_path: Path, text: str, options: str = "") -> Result:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    return CliRunner().invoke(app, ["check", str(file), *SIZES.split(), *options.split()])


def test_a_schedule_that_fits_is_shown_as_a_table(tmp_path: Path) -> None:
    result = run(tmp_path, GOOD, "--vocab-size 127")
    assert result.exit_code == 0
    assert "every switch fits" in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert rows == [
        ["", "launch", "", "dp4", "8", "1", "2"],
        ["5", "at_iteration: 5", "wide", "tp2 dp2", "8", "1", "4"],
        ["11", "at_samples: 81", "", "tp2 pp2", "8", "2", "4"],
    ]
    assert "vocabulary padded to 256 rows under every layout" in result.stdout


def test_json_has_every_layout_and_nothing_else_is_printed(tmp_path: Path) -> None:
    result = run(tmp_path, GOOD, "--json --vocab-size 127 --start-iteration 2")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert (data["ok"], data["padded_vocab_size"], data["problems"]) == (True, 256, [])
    assert [row["layout"] for row in data["layouts"]] == ["dp4", "tp2 dp2", "tp2 pp2"]
    assert [row["iteration"] for row in data["layouts"]] == [None, 5, 11]
    assert data["layouts"][2] == {
        "iteration": 11,
        "trigger": "at_samples: 81",
        "name": None,
        "layout": "tp2 pp2",
        "tp": 2,
        "cp": 1,
        "ep": 1,
        "etp": 2,
        "pp": 2,
        "vpp": None,
        "dp": 1,
        "sequence_parallel": False,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "micro_batches": 4,
        "where": f"{tmp_path}/s.yaml:6",
    }


def test_a_refused_schedule_exits_with_1_and_one_line_per_error(tmp_path: Path) -> None:
    result = run(tmp_path, GOOD.replace("tp: 2", "tp: 3"), "--train-iters 11")
    assert result.exit_code == 1
    assert result.stdout == ""
    file = tmp_path / "s.yaml"
    lines = result.stderr.splitlines()
    assert lines[0] == f"{file} is refused"
    assert lines[1].startswith(f"{file}:3 layouts.wide.tp: tp 3 x cp 1 x pp 1 = 3 doesn't divide the world size 4")
    assert [line.split(": ")[0] for line in lines[1:]] == [
        f"{file}:3 layouts.wide.tp",
        f"{file}:6 switches[1].to.pp",
        f"{file}:6 switches[1].at_samples",
    ]


def test_a_refused_schedule_as_json(tmp_path: Path) -> None:
    result = run(tmp_path, GOOD.replace("tp: 2", "tq: 2"), "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["ok"], data["layouts"]) == (False, [])
    (problem,) = data["problems"]
    assert (problem["line"], problem["key"], problem["got"]) == (3, "layouts.wide.tq", "'tq'")
    assert problem["hint"] == "did you mean 'tp'?"
    assert problem["text"].startswith(f"{tmp_path}/s.yaml:3 layouts.wide.tq: unknown key 'tq'")


def test_a_launch_layout_that_can_not_exist_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, GOOD, "--tp 3 --json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"][0]["expected"] == "a world size that is a multiple of 3"


@pytest.mark.parametrize("options", ["--tp 0", "--no-such-flag", "--train-iters 3 --train-samples 3"])
def test_wrong_usage_exits_with_2(tmp_path: Path, options: str) -> None:
    assert run(tmp_path, GOOD, options).exit_code == 2


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(tmp_path / "none.yaml"), *SIZES.split()])
    assert result.exit_code == 2


def test_a_schedule_without_the_sizes_of_its_job_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(GOOD)
    result = CliRunner().invoke(app, ["check", str(tmp_path / "s.yaml"), "--num-layers", "4"])
    assert result.exit_code == 2
    assert "--hidden-size" in result.stderr
    assert "--world-size" in result.stderr
    assert "--num-layers" not in result.stderr.split("give")[1]


def test_boundaries_follow_the_batch_size(tmp_path: Path) -> None:
    text = GOOD.replace("{tp: 2}", "{tp: 2, global_batch_size: 16}")
    rows = json.loads(run(tmp_path, text, "--json").stdout)["layouts"]
    assert [(row["iteration"], row["global_batch_size"], row["micro_batches"]) for row in rows] == [
        (None, 8, 2),
        (5, 16, 8),
        (8, 16, 8),  # 40 samples after 5, 88 after 8
    ]


def test_a_schedule_of_batch_sizes_is_followed(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(GOOD)
    sizes = SIZES.replace("--global-batch-size 8", "--seq-length 16 --step-batch-size-schedule 0:8,640:16")
    words = ["check", str(tmp_path / "s.yaml"), *sizes.split()]
    rows = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["layouts"]
    assert [(row["iteration"], row["global_batch_size"], row["micro_batches"]) for row in rows] == [
        (None, 8, 2),
        (5, 16, 8),
        (8, 16, 8),  # 40 samples after 5, 88 after 8
    ]
    refused = CliRunner().invoke(app, [*words, "--micro-batch-size", "4"])
    assert (refused.exit_code, "step 0:8 of --step-batch-size-schedule" in refused.stderr) == (1, True)
    wrong = CliRunner().invoke(app, [word.replace("0:8,", "0-8,") for word in words])
    assert (wrong.exit_code, "THRESHOLD:SIZE" in wrong.stderr) == (1, True)
    for usage in ([*words, "--global-batch-size", "8"], [word for word in words if word not in ("--seq-length", "16")]):
        assert CliRunner().invoke(app, usage).exit_code == 2


def test_sequence_parallel_at_launch_ends_with_tp(tmp_path: Path) -> None:
    text = "version: 1\nswitches:\n  - {at_iteration: 5, to: {tp: 1}}\n  - {at_iteration: 6, to: {tp: 2}}\n"
    result = run(tmp_path, text, "--tp 2 --sequence-parallel --json")
    assert [row["layout"] for row in json.loads(result.stdout)["layouts"]] == ["tp2 dp2 sp", "dp4", "tp2 dp2"]


UNCHANGED = "version: 1\nswitches:\n  - {at_iteration: 5, to: {micro_batch_size: 1}}\n"


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("--cp 2 --seq-length 32", "cp2 dp2"),
        ("--context-parallel-size 4", "cp4"),
        ("--ep 2 --num-experts 4", "ep2 dp4"),
        ("--tp 2 --sequence-parallel --ep 2 --etp 1 --num-experts 4", "tp2 ep2 etp1 dp2 sp"),
        ("--tp 2 --sequence-parallel --expert-model-parallel-size 2 --num-experts 4", "tp2 ep2 dp2 sp"),
        ("--pp 2 --vpp 2", "pp2 vpp2 dp2"),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 2", "pp2 vpp2 dp2"),
        ("--pp 2 --vpp 1", "pp2 dp2"),
    ],
)
def test_every_axis_can_be_given_at_launch_and_is_kept_by_a_switch(tmp_path: Path, options: str, layout: str) -> None:
    result = run(tmp_path, UNCHANGED, f"{options} --json")
    assert result.exit_code == 0, result.stdout
    assert [row["layout"] for row in json.loads(result.stdout)["layouts"]] == [layout] * 2


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        ("--cp 4 --seq-length 20", "seq_length", "a multiple of 2 x cp 4 = 8"),
        ("--ep 2", "num_experts", "experts to spread over ep 2"),
        ("--ep 2 --num-experts 3", "num_experts", "a multiple of ep 2"),
        ("--etp 4 --num-experts 4 --moe-ffn-hidden-size 6", "moe_ffn_hidden_size", "a multiple of etp 4"),
        ("--pp 2 --vpp 4", "num_layers", "a multiple of"),
        ("--pp 2 --mtp-num-layers 1", "mtp_num_layers", "pp 1 (--pipeline-model-parallel-size 1), or --untie"),
    ],
)
def test_a_launch_that_the_model_does_not_fit_is_refused(tmp_path: Path, options: str, key: str, expected: str) -> None:
    result = run(tmp_path, UNCHANGED, f"{options} --json")
    assert result.exit_code == 1
    found = {problem["key"]: problem for problem in json.loads(result.stdout)["problems"]}
    assert found[key]["expected"].startswith(expected)
    assert found[key]["file"] == "launch flags"


def test_untied_embeddings_let_multi_token_prediction_stand_on_another_stage(tmp_path: Path) -> None:
    options = "--pp 2 --mtp-num-layers 1 --untie-embeddings-and-output-weights"
    assert run(tmp_path, UNCHANGED, options).exit_code == 0


def test_what_can_not_be_read_is_told_with_what_does_not_fit(tmp_path: Path) -> None:
    text = GOOD.replace("tp: 2", "tp: 3").replace("pp: 2", "pq: 2")
    problems = json.loads(run(tmp_path, text, "--json").stdout)["problems"]
    assert [problem["key"] for problem in problems] == ["layouts.wide.tp", "switches[1].to.pq"]
