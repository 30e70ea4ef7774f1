"""Megatron on CPU and gloo: what the patches promise, on forked ranks."""

from __future__ import annotations

import functools
from typing import Any

from tests.ranks.context import RankContext
from tests.ranks.gpt_args import gpt_args
from tests.ranks.pool import RankPool
from tests.ranks.records import StepRecord, losses, steps_with_loss


def install_cases(context: RankContext) -> dict[str, object]:
    import torch

    from megatron_dynatrain.errors import StateError
    from megatron_dynatrain.patches import cpu

    again = (cpu.install(), cpu.installed(), torch.zeros)
    cpu._installed = False  # as in a process that imported Megatron without them
    try:
        cpu.install()
        late: object = None
    except StateError as error:
        late = error.subject
    torch.cuda.is_available = lambda: True  # type: ignore[method-assign]
    return {
        "again": again[:2],
        "untouched": torch.zeros is again[2],
        "late": late,
        "with a GPU": (cpu.install(), cpu.installed()),
    }


def test_install_once_in_time_and_never_beside_a_gpu(ranks: RankPool) -> None:
    (record,) = ranks.run(1, install_cases, init_group=False)
    assert record == {
        "again": (True, True),
        "untouched": True,
        "late": "megatron.core",
        "with a GPU": (False, False),
    }


def devices(context: RankContext) -> dict[str, str]:
    import torch

    made = {
        "int": torch.empty(2, device=torch.cuda.current_device()),
        "str": torch.zeros(2, device="cuda:0", pin_memory=True),
        "device": torch.ones(2).to(torch.device("cuda"), non_blocking=True),
        "new": torch.ones(2).new_zeros(2, device="cuda"),
        "cuda": torch.nn.Linear(2, 2).cuda().weight,
        "meta": torch.empty(2, device="meta"),
        "to meta": torch.ones(2).to("meta"),
    }
    return {name: tensor.device.type for name, tensor in made.items()} | {"type": torch.ones(2).type()}


def test_cuda_is_the_cpu_and_meta_stays_meta(ranks: RankPool) -> None:
    (record,) = ranks.run(1, devices, init_group=False)
    assert {name: device for name, device in record.items() if device != "cpu"} == {
        "meta": "meta",
        "to meta": "meta",
        "type": "torch.cuda.FloatTensor",
    }


def fork_of_the_tracker(context: RankContext) -> tuple[bool, bool]:
    import torch
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(4)
    restored = torch.equal(torch.get_rng_state(), before)
    with tracker.fork():
        second = torch.rand(4)
    return restored, bool(torch.equal(first, second))


def test_a_fork_of_the_random_tracker_restores_the_outer_state(ranks: RankPool) -> None:
    assert ranks.run(1, fork_of_the_tracker) == [(True, False)]


def uneven(context: RankContext) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    mine = torch.full((context.rank + 1, 2), float(context.rank + 1))
    parts = [torch.zeros(rank + 1, 2) for rank in range(3)]
    dist.all_gather(parts, mine)
    reduced = torch.zeros(context.rank + 1)
    dist.reduce_scatter(reduced, [torch.full((rank + 1,), float(10 * rank + context.rank)) for rank in range(3)])
    swapped = torch.zeros(3 * (context.rank + 1))
    source = torch.cat([torch.full((rank + 1,), float(10 * context.rank + rank)) for rank in range(3)])
    splits = torch.full((3,), context.rank + 1), torch.arange(1, 4)
    dist.all_to_all_single(swapped, source, *splits)
    dist.barrier(device_ids=[0])
    return {"gathered": [part.tolist() for part in parts], "reduced": reduced.tolist(), "swapped": swapped.tolist()}


def test_uneven_collectives(ranks: RankPool) -> None:
    for rank, record in enumerate(ranks.run(3, uneven)):
        assert record["gathered"] == [[[float(r + 1)] * 2] * (r + 1) for r in range(3)]
        assert record["reduced"] == [30.0 * rank + 3] * (rank + 1)
        assert record["swapped"] == [float(10 * r + rank) for r in range(3) for _ in range(rank + 1)]


def masks(context: RankContext) -> list[list[list[bool]]]:
    from megatron_dynatrain.patches.cpu_modules import zigzag_mask

    return [zigzag_mask(2, rank, 2)[0, 0].tolist() for rank in range(2)]


def test_zigzag_mask_by_hand(ranks: RankPool) -> None:
    # 4 tokens in 4 chunks: rank 0 has 0 and 3, rank 1 has 1 and 2; keys come as 0 3 1 2.
    (record,) = ranks.run(1, masks, init_group=False)
    assert record[0] == [[False, True, True, True], [False, False, False, False]]
    assert record[1] == [[False, True, False, True], [False, True, False, False]]


def relative(steps: list[StepRecord], reference: list[StepRecord]) -> float:
    pairs = list(zip(steps, reference, strict=True))
    values = [(s.loss, r.loss) for s, r in pairs] + [(s.grad_norm, r.grad_norm) for s, r in pairs]
    return max(abs(a - b) / abs(b) for a, b in values if a is not None and b is not None)


# Rotary positions: learned ones are drawn from the default generator, from which Megatron's warm-up draws before, as
# many numbers as a rank has tokens.
tiny = functools.partial(gpt_args, layers=2, train_iters=4, swiglu=True)


def test_context_parallel_attention_is_the_same_function(ranks: RankPool) -> None:
    alone = ranks.pretrain(1, tiny())
    split = ranks.pretrain(2, tiny(cp=2))
    assert len(losses(split)) == 4
    assert relative(steps_with_loss(split), steps_with_loss(alone)) < 2e-6


def test_sequence_parallel_norms_are_the_same_function(ranks: RankPool) -> None:
    plain = ranks.pretrain(2, tiny(tp=2))
    split = ranks.pretrain(2, tiny(tp=2, sp=True))
    assert relative(steps_with_loss(split), steps_with_loss(plain)) < 2e-6
