"""The `dynatrain` command. Exit codes: 0 done, 1 refused or failed, 2 wrong usage."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_dynatrain.cli_live import REFUSED, Json, request, status
from megatron_dynatrain.errors import DynaTrainError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.recipes import CheckedPhase, check_recipe
from megatron_dynatrain.schedule.batches import FLAG, BatchSchedule, parse_batches
from megatron_dynatrain.schedule.check import ModelSizes, check_schedule, pinned_padded_vocab_size
from megatron_dynatrain.schedule.clock import Clock, walk
from megatron_dynatrain.schedule.problems import ScheduleProblemsError
from megatron_dynatrain.schedule.recipe import build_recipe, is_recipe, load_recipe
from megatron_dynatrain.schedule.resolve import PlannedSwitch, Target
from megatron_dynatrain.schedule.schema import build_schedule
from megatron_dynatrain.schedule.source import read_source

app = typer.Typer(
    name="dynatrain",
    help="Change the parallel layout of a running Megatron pretraining job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(request)
app.command()(status)


@app.callback()
def _root() -> None:
    """Change the parallel layout of a running Megatron pretraining job."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A schedule or a recipe, a YAML file.")],
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks of the job.")] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Transformer layers.")] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="Width of the model.")] = None,
    num_attention_heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per iteration at launch.")] = None,
    step_batch_size_schedule: Annotated[str | None, typer.Option(help="As Megatron's flag, instead.")] = None,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Samples per micro-batch at launch.")] = 1,
    num_query_groups: Annotated[int | None, typer.Option(min=1, help="Key/value heads, with grouped queries.")] = None,
    ffn_hidden_size: Annotated[int | None, typer.Option(min=1, help="Width of the MLP; 4 x hidden.")] = None,
    num_experts: Annotated[int | None, typer.Option(min=1, help="Routed experts of a layer, of a MoE.")] = None,
    moe_ffn_hidden_size: Annotated[int | None, typer.Option(min=1, help="Width of an expert; that of the MLP.")] = None,
    mtp_num_layers: Annotated[int | None, typer.Option(min=1, help="Layers of multi-token prediction.")] = None,
    untie: Annotated[bool, typer.Option("--untie-embeddings-and-output-weights", help="As Megatron's flag.")] = False,
    seq_length: Annotated[int | None, typer.Option(min=1, help="Tokens per sample.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Tokens of the vocabulary, unpadded.")] = None,
    make_vocab_size_divisible_by: Annotated[int, typer.Option(min=1, help="As Megatron's flag.")] = 128,
    tp: Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", min=1, help="At launch.")] = 1,
    cp: Annotated[int, typer.Option("--cp", "--context-parallel-size", min=1, help="At launch.")] = 1,
    ep: Annotated[int, typer.Option("--ep", "--expert-model-parallel-size", min=1, help="At launch.")] = 1,
    etp: Annotated[
        int | None, typer.Option("--etp", "--expert-tensor-parallel-size", min=1, help="At launch; that of tp.")
    ] = None,
    pp: Annotated[int, typer.Option("--pp", "--pipeline-model-parallel-size", min=1, help="At launch.")] = 1,
    vpp: Annotated[
        int | None,
        typer.Option("--vpp", "--num-virtual-stages-per-pipeline-rank", min=1, help="Chunks per rank at launch."),
    ] = None,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="On at launch.")] = False,
    train_iters: Annotated[int | None, typer.Option(min=1, help="Iterations of the whole training.")] = None,
    train_samples: Annotated[int | None, typer.Option(min=1, help="Samples of the whole training.")] = None,
    start_iteration: Annotated[int, typer.Option(min=0, help="Of the checkpoint the job resumes from.")] = 0,
    as_json: Json = False,
) -> None:
    """Check every switch against a model and a world; the job itself does the same before it starts.

    The sizes of a schedule's job are given here, those of a recipe are among its flags.
    """
    if train_iters is not None and train_samples is not None:
        raise typer.BadParameter("give either --train-iters or --train-samples")
    needed = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
    }
    if step_batch_size_schedule is None:
        needed["global_batch_size"] = global_batch_size
    elif global_batch_size is not None:
        raise typer.BadParameter(f"give either --global-batch-size or {FLAG}")
    elif seq_length is None:
        raise typer.BadParameter(f"{FLAG} counts in tokens: give --seq-length")
    sizes = {
        "num_query_groups": num_query_groups,
        "ffn_hidden_size": ffn_hidden_size,
        "num_experts": num_experts,
        "moe_ffn_hidden_size": moe_ffn_hidden_size,
        "seq_length": seq_length,
        "mtp_num_layers": mtp_num_layers,
    }
    axes = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "pp": pp, "vpp": vpp}
    times = (train_iters, train_samples, start_iteration)
    with _refusals(file, as_json):
        source = read_source(file)
        if is_recipe(source):
            _only_a_file(world_size=world_size, **needed)
            _show_recipe(file, check_recipe(build_recipe(source)), as_json)
            return
        world, known = _all_given(world_size=world_size, **needed)
        launch = _launch(world, axes, micro_batch_size, known.get("global_batch_size"), sequence_parallel)
        model = ModelSizes(**known, **sizes, tied_embeddings=not untie)
        batches = _batches(known.get("global_batch_size"), step_batch_size_schedule, seq_length)
        planned = check_schedule(build_schedule(source, partly=True), model, launch, world, *times, batches=batches)
    padded = _padded(vocab_size, make_vocab_size_divisible_by, launch, planned)
    start = Clock(iteration=start_iteration, samples=batches.samples_after(0, start_iteration), batches=batches)
    _show_schedule(file, launch, planned, start, padded, as_json)


def _batches(size: int | None, steps: str | None, seq_length: int | None) -> BatchSchedule:
    return parse_batches(steps, seq_length) if steps is not None else BatchSchedule.constant(size or 1)


def _launch(
    world_size: int, axes: Mapping[str, int | None], micro_batch: int, global_batch: int | None, sequence_parallel: bool
) -> Target:
    """Return what a job is launched on; an axis that isn't given follows its default."""
    given = {name: size for name, size in axes.items() if size is not None}
    layout = ParallelLayout.for_world(world_size, sequence_parallel=sequence_parallel, **given)
    return Target(None, layout, micro_batch, "launch flags", global_batch)


def _padded(vocab_size: int | None, divisible_by: int, launch: Target, planned: Sequence[PlannedSwitch]) -> int | None:
    if vocab_size is None:
        return None
    targets = [launch, *(switch.target for switch in planned)]
    return pinned_padded_vocab_size(vocab_size, divisible_by, [target.layout.tp for target in targets])


def _show_schedule(
    file: Path,
    launch: Target,
    planned: Sequence[PlannedSwitch],
    start: Clock,
    padded: int | None,
    as_json: bool,
) -> None:
    rows = _rows(launch, planned, start)
    if as_json:
        typer.echo(json.dumps({"ok": True, "padded_vocab_size": padded, "layouts": rows, "problems": []}, indent=2))
        return
    _show_rows(f"{file}: every switch fits", rows)
    if padded is not None:
        Console().print(f"vocabulary padded to {padded} rows under every layout", highlight=False)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _only_a_file(**sizes: int | None) -> None:
    given = [_flag(name) for name, value in sizes.items() if value is not None]
    if given:
        raise typer.BadParameter(f"a recipe has its sizes among its own flags: leave out {', '.join(given)}")


def _all_given(*, world_size: int | None, **sizes: int | None) -> tuple[int, dict[str, int]]:
    """Return the sizes that a schedule can't be checked without."""
    known = {name: value for name, value in sizes.items() if value is not None}
    if world_size is None or len(known) < len(sizes):
        missing = [_flag(name) for name in sizes if name not in known]
        missing += ["--world-size"] if world_size is None else []
        raise typer.BadParameter(f"a schedule says nothing of its job: give {', '.join(missing)}")
    return world_size, known


@contextmanager
def _refusals(file: Path, as_json: bool) -> Iterator[None]:
    """Show what is refused inside the block, and exit."""
    try:
        yield
    except DynaTrainError as error:
        _show_refusal(file, error, as_json)
        raise typer.Exit(REFUSED) from None


def _rows(launch: Target, planned: Sequence[PlannedSwitch], start: Clock | None) -> list[dict[str, Any]]:
    """Return launch and switches as JSON values; without a start nobody knows the iteration of an `at_samples`."""
    rows = [{"iteration": None, "trigger": "launch", **_sizes(launch, start)}]
    clocks = [None] * len(planned) if start is None else walk(start, planned)
    for switch, clock in zip(planned, clocks, strict=True):
        iteration = switch.trigger.value if switch.trigger.kind == "at_iteration" else None
        iteration = iteration if clock is None else clock.iteration
        rows.append({"iteration": iteration, "trigger": str(switch.trigger), **_sizes(switch.target, clock)})
    return rows


def _sizes(target: Target, clock: Clock | None) -> dict[str, Any]:
    """Return what a reader wants to know of a layout and its first iteration, as JSON values."""
    layout = target.layout
    batch = target.global_batch_size if clock is None else clock.global_batch_size
    return {
        "name": target.name,
        "layout": layout.describe(),
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "dp": layout.dp,
        "sequence_parallel": layout.sequence_parallel,
        "micro_batch_size": target.micro_batch_size,
        "global_batch_size": batch,
        "micro_batches": None if batch is None else batch // (target.micro_batch_size * layout.dp),
        "where": target.where,
    }


def _show_recipe(file: Path, phases: Sequence[CheckedPhase], as_json: bool) -> None:
    shown = []
    for phase in phases:
        start = Clock(iteration=0, samples=0, batches=phase.batches) if phase.starts_anew else None
        shown.append((phase.phase.name, _rows(phase.launch, phase.switches, start)))
    if as_json:
        found = [{"name": name, "layouts": rows} for name, rows in shown]
        typer.echo(json.dumps({"ok": True, "phases": found, "problems": []}, indent=2))
        return
    for name, rows in shown:
        _show_rows(f"{file}, phase {name}: every switch fits", rows)


@app.command()
def unpack(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A recipe.")],
    output: Annotated[Path, typer.Option(file_okay=False, help="Directory to write to.")],
    as_json: Json = False,
) -> None:
    """Write each phase of a recipe as PHASE.args, the flags of its launch, and PHASE.yaml, its schedule."""
    with _refusals(file, as_json):
        recipe = load_recipe(file)
        check_recipe(recipe)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for phase in recipe.phases:
        schedule, flags = output / f"{phase.name}.yaml", output / f"{phase.name}.args"
        schedule.write_text(yaml.safe_dump(phase.schedule.source.data, sort_keys=False), encoding="utf-8")
        words = [*phase.words(), "--dynamic-parallelism", "--dynamic-parallelism-schedule", str(schedule)]
        flags.write_text(shlex.join(words).replace(" --", "\n--") + "\n", encoding="utf-8")
        written.append({"name": phase.name, "flags": str(flags), "schedule": str(schedule)})
    if as_json:
        typer.echo(json.dumps({"ok": True, "phases": written, "problems": []}, indent=2))
        return
    for files in written:
        typer.echo(f"{files['name']}: {files['flags']}, {files['schedule']}")


_COLUMNS = {
    "iteration": "after\niteration",
    "trigger": "trigger",
    "name": "name",
    "layout": "layout",
    "global_batch_size": "global\nbatch",
    "micro_batch_size": "micro\nbatch",
    "micro_batches": "per\nrank",
}
"""Keys of a row that are shown, with their headings."""


def _show_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table()
    for key, heading in _COLUMNS.items():
        table.add_column(heading, justify="left" if key in ("trigger", "name", "layout") else "right")
    for row in rows:
        table.add_row(*(Text("" if row[key] is None else str(row[key])) for key in _COLUMNS))
    console = Console()
    console.print(Text(title, style="italic"), soft_wrap=True)
    console.print(table)


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
