"""Runs of `pretrain()` with the plugin and a schedule on Transformer Engine's layers; a step fills or compares."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.ranks.dynamic import layout_keys, run_switched
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun

Keys = Mapping[str, Any]
STEP = 7
AWARE = "--use-precision-aware-optimizer"
BF16 = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
_MODERN: dict[str, Any] = {"bf16": True, "tied": False, "swiglu": True, "gqa": 4, "heads": 8, "layers": 8}
_DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 8"
    " --linear-value-head-dim 8 --linear-num-key-heads 4 --linear-num-value-heads 8"
)
_MAMBA = "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-state-dim 16 --mamba-num-groups 4"


@dataclass(frozen=True)
class Run:
    """A run: the layouts one after the other, a switch after each step; arguments of `gpt_args` and more flags."""

    words: str
    layouts: tuple[Keys, ...]
    model: Keys
    flags: str
    remainders: bool
    pattern: str | None = None
    world: int = 2


_SP = {"tp": 2, "sp": True}
RUNS = (
    Run("GPTModel, FusedAdam", ({"tp": 2}, {"pp": 2, "vpp": 2}, {}), _MODERN, "", False),
    Run("GPTModel, int16 remainders", ({"tp": 2}, {"pp": 2}, {}), _MODERN, AWARE, True),
    Run("GPTModel, remainders, bf16 moments", ({"pp": 2}, _SP, {}), _MODERN, f"{AWARE} {BF16}", True),
    Run(
        "GPTModel, grouped experts, remainders",
        ({"ep": 2}, {"ep": 1}, {"ep": 1, "pp": 2}),
        {**_MODERN, "experts": 4},
        f"{AWARE} --moe-grouped-gemm",
        True,
    ),
    Run("HybridModel, FusedAdam", ({"tp": 2}, {"pp": 2}, {}), _MODERN, "", False, "*-*-*-*-"),
    Run("HybridModel, remainders", ({"pp": 2}, {}, {"tp": 2}), _MODERN, AWARE, True, "*-*-*-*-"),
    Run(
        "HybridModel, grouped experts, remainders",
        ({"ep": 2}, {"ep": 1, "pp": 2}, {"ep": 1, **_SP}),
        {**_MODERN, "experts": 4},
        f"{AWARE} {BF16} --moe-grouped-gemm",
        True,
        "*E*-*E*-",
    ),
    Run(
        "HybridModel, multi-token prediction, remainders",
        ({"tp": 2}, {"pp": 2}, {}),
        _MODERN,
        AWARE,
        True,
        "*-*-*-*-/*-",
    ),
    Run("GPTModel, gated delta net, remainders", ({"tp": 2}, {"pp": 2}, {}), _MODERN, f"{AWARE} {_DELTA}", True),
    Run("HybridModel, Mamba", ({}, {"tp": 2}, {"pp": 2}), _MODERN, f"{AWARE} {_MAMBA}", True, "M*M-MMM-"),
)


def compared(pool: RankPool, run: Run) -> list[str]:
    """Run it; return what is not as it must be."""
    first, *then = run.layouts
    argv = gpt_args(**{**run.model, **first}, global_batch=4, train_iters=len(run.layouts), extra=run.flags)
    argv[argv.index("local")] = "transformer_engine"
    if run.pattern is not None:
        argv += ["--hybrid-layer-pattern", run.pattern]
    switches = {number: layout_keys(**sizes) for number, sizes in enumerate(then, 1)}
    found = run_switched(pool, run.world, argv, switches, hooks=(functools.partial(on_te, run=run),), limit=120)
    wrong = [f"{switch.outcome}: {switch.error}" for switch in found.switches if switch.outcome != "committed"]
    if len(found.switches) != len(then):
        wrong.append(f"{len(found.switches)} switches")
    for record in found.ranks:
        if len(record.extra["compared"]) != len(run.layouts):
            wrong.append("steps without a comparison")
        wrong += [text for texts in record.extra["compared"] for text in texts]
    return wrong


def on_te(run_: PretrainRun, *, run: Run) -> None:
    """Let the run build Transformer Engine's layers, and replace its step (a hook of the pool's `pretrain`)."""
    import megatron.training.training as training
    from megatron.training import get_args

    from tests.te.warm import from_now_on_a_gpu

    from_now_on_a_gpu()
    compared_: list[list[str]] = run_.record.extra.setdefault("compared", [])

    def train_step(
        forward: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any, *_: Any, **__: Any
    ) -> tuple[Any, ...]:
        from tests.te import job, witness

        cast = not run.remainders
        if not compared_:
            job.make_states(optimizer)
            witness.fill(model, optimizer, cast=cast)
        wrong = witness.wrong_states(model, optimizer, cast=cast)
        steps = set().union(*map(job.steps_of, job.inner_optimizers(optimizer)))
        compared_.append([*wrong, *([f"step {steps}"] if steps != {STEP} else [])])
        scheduler.step(increment=get_args().global_batch_size)
        return {}, 0, False, False, 0, None, None, 0

    training.train_step = train_step
    if run.pattern is not None:
        run_.main = _hybrid_main


def _hybrid_main() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from tests.ranks.pretrain import script

    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    provider = script.train_valid_test_datasets_provider
    pretrain(container, provider, ModelType.encoder_or_decoder, script.forward_step)
