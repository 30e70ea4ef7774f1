"""The document that te-check writes, docs/te_check.md: what was switched, what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.te.cases import MODELS, OPTIMIZERS, Case, Keys

_HEAD = """\
# Transformer Engine's layers and optimizer

Written by `make te-check`, not by hand. Last run: {date}, commit {commit}{dirty}, {versions}.

GPU jobs train layers of Transformer Engine with its FusedAdam. Both can be built without a GPU, with `torch.cuda`
answering as if there was one, so their states can be moved and compared here; no step of training can run. Each row is
one switch between gloo ranks by the `Switcher`, of a real Megatron model in DDP with the distributed optimizer:

- Before it every element of every state has bits that are a function of (key, coordinate, state), where the coordinate
  comes from the model's own `sharded_state_dict`; after it every rank of the target compares every bit with the same
  function. Moments and remainders have any bits, NaNs among them.
- `step` is 7 in every parameter group of FusedAdam, also in those without parameters on a rank, and Megatron's
  `state_dict()` says so; learning rates are the changed ones; Megatron's accessor reads what is stored.
- Every `_extra_state` of Transformer Engine's modules is there and empty. One that isn't is refused by name.
- Bytes that crossed between ranks are the fewest possible.
- "not started" is a switch before the optimizer's first step, when FusedAdam has no states yet.

What a GPU would add and this can't show: that training goes on after the switch.
"""
_FAULTS = """
## Faults

Put into the target's memory on one rank. "found" is the plugin's own check before the commit, which aborts; "witness"
is the comparison above, with the plugin's check turned off.

"""


@dataclass(frozen=True)
class Result:
    """One row: the switch, elements compared over all ranks, kinds of state, and what was wrong ("" for nothing)."""

    case: Case
    elements: int
    states: tuple[str, ...]
    wrong: str


_TRAINING = """
## Inside `pretrain()`

The plugin and a schedule in Megatron's own `pretrain()`, from the flags to the last step. There is one step in each
layout; the first fills, all compare, and none of them trains.

"""


def layout_text(sizes: Keys) -> str:
    """Return a layout as a row shows it."""
    words = ["sp" if value is True else f"{key}{value}" for key, value in sizes.items() if value is True or value > 1]
    return " ".join(words) or "dp"


def render(
    results: Sequence[Result],
    faults: Iterable[Sequence[str]],
    training: Iterable[Sequence[str]],
    stamp: Mapping[str, str],
) -> str:
    """Return the document.

    Args:
        results: Rows of the table of switches.
        faults: (fault, switch, found, witness) each.
        training: (model, layouts, result) of the runs of `pretrain()`.
        stamp: `date`, `commit`, `dirty` and `versions`.
    """
    good = sum(not result.wrong for result in results)
    parts = [_HEAD.format(**stamp), f"\n{good} of {len(results)} switches kept every bit.\n\n## Models\n\n"]
    parts.append(_table(("model", "what", "switches"), _models(results)))
    parts.append("\n## Kinds of optimizer\n\n")
    parts.append(_table(("optimizer", "what", "states", "switches"), _optimizers(results)))
    parts.append("\n## Switches\n\n")
    head = ("model", "optimizer", "ranks", "from", "to", "elements", "result")
    parts.append(_table(head, map(_row, results)))
    parts += [_TRAINING, _table(("model", "layouts", "result"), training)]
    parts += [_FAULTS, _table(("fault", "switch", "found", "witness"), faults)]
    return "".join(parts)


def _row(result: Result) -> tuple[object, ...]:
    case = result.case
    optimizer = case.optimizer if case.started else f"{case.optimizer}, not started"
    ends = (f"`{layout_text(sizes)}`" for sizes in (case.source, case.target))
    return case.model, optimizer, case.world, *ends, result.elements, result.wrong or "equal"


def _models(results: Sequence[Result]) -> Iterable[tuple[object, ...]]:
    for name, model in MODELS.items():
        pattern = f", `{model.pattern}`" if model.pattern else ""
        yield name, model.words + pattern, sum(result.case.model == name for result in results)


def _optimizers(results: Sequence[Result]) -> Iterable[tuple[object, ...]]:
    for name, (words, _) in OPTIMIZERS.items():
        rows = [result for result in results if result.case.optimizer == name]
        states = sorted({state for result in rows for state in result.states})
        yield name, words, ", ".join(states), len(rows)


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in (head, *lines)]
    rows.insert(1, "|" + "---|" * len(head))
    return "\n".join(rows) + "\n"
