"""The `dynatrain` command. Exit codes: 0 done, 1 refused or failed, 2 wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_dynatrain.errors import DynaTrainError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.schedule.check import ModelSizes, check_schedule, pinned_padded_vocab_size
from megatron_dynatrain.schedule.problems import ScheduleProblemsError
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.schema import load_schedule

REFUSED = 1
"""Exit code of a command that was understood and refused, or failed."""

app = typer.Typer(
    name="dynatrain",
    help="Change the parallel layout of a running Megatron pretraining job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.callback()
def _root() -> None:
    """Change the parallel layout of a running Megatron pretraining job."""


@app.command()
def check(
    schedule: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The schedule, a YAML file.")],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the job.")],
    num_layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")],
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the model.")],
    num_attention_heads: Annotated[int, typer.Option(min=1, help="Attention heads.")],
    global_batch_size: Annotated[int, typer.Option(min=1, help="Samples per iteration.")],
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Samples per micro-batch at launch.")] = 1,
    num_query_groups: Annotated[int | None, typer.Option(min=1, help="Key/value heads, with grouped queries.")] = None,
    ffn_hidden_size: Annotated[int | None, typer.Option(min=1, help="Width of the MLP; 4 x hidden.")] = None,
    seq_length: Annotated[int | None, typer.Option(min=1, help="Tokens per sample.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Tokens of the vocabulary, unpadded.")] = None,
    make_vocab_size_divisible_by: Annotated[int, typer.Option(min=1, help="As Megatron's flag.")] = 128,
    tp: Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", min=1, help="At launch.")] = 1,
    pp: Annotated[int, typer.Option("--pp", "--pipeline-model-parallel-size", min=1, help="At launch.")] = 1,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="On at launch.")] = False,
    train_iters: Annotated[int | None, typer.Option(min=1, help="Iterations of the whole training.")] = None,
    train_samples: Annotated[int | None, typer.Option(min=1, help="Samples of the whole training.")] = None,
    start_iteration: Annotated[int, typer.Option(min=0, help="Of the checkpoint the job resumes from.")] = 0,
    as_json: Json = False,
) -> None:
    """Check every switch of a schedule against a model and a world; the job itself does the same before it starts."""
    if train_iters is not None and train_samples is not None:
        raise typer.BadParameter("give either --train-iters or --train-samples")
    try:
        layout = ParallelLayout.for_world(world_size, tp=tp, pp=pp, sequence_parallel=sequence_parallel)
        launch = Target(None, layout, micro_batch_size, "launch flags")
        model = ModelSizes(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            num_query_groups=num_query_groups,
            ffn_hidden_size=ffn_hidden_size,
            seq_length=seq_length,
            global_batch_size=global_batch_size,
        )
        planned = check_schedule(
            load_schedule(schedule), model, launch, world_size, train_iters, train_samples, start_iteration
        )
    except DynaTrainError as error:
        _show_refusal(schedule, error, as_json)
        raise typer.Exit(REFUSED) from None
    rows = [_row(switch, global_batch_size, start_iteration) for switch in planned]
    rows.insert(0, _launch_row(launch, global_batch_size))
    padded = None
    if vocab_size is not None:
        tps = [tp, *(switch.target.layout.tp for switch in planned)]
        padded = pinned_padded_vocab_size(vocab_size, make_vocab_size_divisible_by, tps)
    if as_json:
        typer.echo(json.dumps({"ok": True, "padded_vocab_size": padded, "layouts": rows, "problems": []}, indent=2))
        return
    _show_rows(schedule, rows, padded)


def _launch_row(launch: Target, global_batch_size: int) -> dict[str, Any]:
    return {"iteration": None, "trigger": "launch", **_sizes(launch, global_batch_size)}


def _row(switch: PlannedSwitch, global_batch_size: int, start_iteration: int) -> dict[str, Any]:
    start_samples = start_iteration * global_batch_size
    iteration = switch.trigger.boundary(start_iteration, start_samples, global_batch_size)
    return {"iteration": iteration, "trigger": str(switch.trigger), **_sizes(switch.target, global_batch_size)}


def _sizes(target: Target, global_batch_size: int) -> dict[str, Any]:
    """Return what a reader wants to know of a layout, as JSON values."""
    layout = target.layout
    return {
        "name": target.name,
        "layout": layout.describe(),
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "sequence_parallel": layout.sequence_parallel,
        "micro_batch_size": target.micro_batch_size,
        "micro_batches": global_batch_size // (target.micro_batch_size * layout.dp),
        "where": target.where,
    }


def _show_rows(schedule: Path, rows: list[dict[str, Any]], padded: int | None) -> None:
    table = Table(title=Text(f"{schedule}: every switch fits"), title_justify="left")
    for heading in ("iteration", "trigger", "name", "layout", "micro-batch", "per step"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("trigger", "name", "layout") else "right")
    for row in rows:
        keys = ("iteration", "trigger", "name", "layout", "micro_batch_size", "micro_batches")
        table.add_row(*(Text("" if row[key] is None else str(row[key])) for key in keys))
    console = Console()
    console.print(table)
    if padded is not None:
        console.print(f"vocabulary padded to {padded} rows under every layout", highlight=False)


def _show_refusal(schedule: Path, error: DynaTrainError, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"ok": False, "layouts": [], "problems": _problems(error)}, indent=2))
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(f"{schedule} is refused", style="bold red"))
    for problem in _problems(error):
        console.print(Text(str(problem["text"])))


def _problems(error: DynaTrainError) -> list[dict[str, object]]:
    """Return each thing that is wrong as JSON values, with the line a reader sees as `text`."""
    if isinstance(error, ScheduleProblemsError):
        return [{**problem.as_json(), "text": problem.render()} for problem in error.problems]
    fields = {"message": error.message, "key": error.subject, "expected": error.expected, "got": error.got}
    return [{**{name: None if value is None else str(value) for name, value in fields.items()}, "text": error.render()}]


def main() -> None:
    """Run the command with the arguments of the process; the entry point of the installed script."""
    app()


if __name__ == "__main__":
    main()
