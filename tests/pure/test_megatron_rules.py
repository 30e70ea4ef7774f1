"""Pipeline splits and buffer layouts are Megatron's own: compared with its functions, without a process group."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import ParallelLayout, PipelineSplit
from megatron_dynatrain.vps.flat_buffer import BufferPolicy, buffers_of, in_expert_buffer, needs_own_bucket, owned_run
from megatron_dynatrain.vps.homes import Homes, local_numel
from megatron_dynatrain.vps.tensor import ModelDescription, ParameterSpec
from tests.pure.models import dense_model, moe_model


@pytest.fixture(scope="module")
def megatron() -> types.SimpleNamespace:
    pytest.importorskip("megatron.core")
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return types.SimpleNamespace(
        torch=torch,
        optimizer=DistributedOptimizer,
        written=PipelineParallelLayerLayout,
        count=get_num_layers_to_build,
        config=TransformerConfig,
        offset=get_transformer_layer_offset,
    )


def real_spread(
    megatron: types.SimpleNamespace, num_layers: int, pp: int, vpp: int | None, split: PipelineSplit
) -> Any:
    """Layers per stage and chunk as Megatron builds them; its own errors pass through."""
    config = megatron.config(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=megatron.torch.float32,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        account_for_embedding_in_pipeline_split=split.account_for_embedding,
        account_for_loss_in_pipeline_split=split.account_for_loss,
    )
    spread = []
    for rank in range(pp):
        chunks = []
        for chunk in range(vpp or 1):
            stage = chunk if vpp else None
            offset = megatron.offset(config, vp_stage=stage, pp_rank=rank)
            chunks.append(tuple(range(offset, offset + megatron.count(config, vp_stage=stage, pp_rank=rank))))
        spread.append(tuple(chunks))
    return tuple(spread)


SPLITS = [
    PipelineSplit(),
    PipelineSplit(first=1),
    PipelineSplit(first=2, last=2),
    PipelineSplit(last=4),
    PipelineSplit(first=2, last=4),
    PipelineSplit(account_for_embedding=True),
    PipelineSplit(account_for_loss=True),
    PipelineSplit(account_for_embedding=True, account_for_loss=True),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_stage_layers_equal_megatron(megatron: types.SimpleNamespace, split: PipelineSplit) -> None:
    built = refused = 0
    for num_layers, pp, vpp in itertools.product(range(1, 13), range(1, 5), (None, 2, 3)):
        if pp == 1 and vpp is not None:
            continue
        layout = ParallelLayout(dp=1, pp=pp, vpp=vpp, split=split)
        try:
            real = real_spread(megatron, num_layers, pp, vpp, split)
        except (AssertionError, ValueError, ZeroDivisionError):
            real = None
        # With more layers on the first and last rank than there are, Megatron builds some twice and others never; with
        # both on one rank it drops the first.
        contradiction = pp == 1 and None not in (split.first, split.last)
        if (
            real is None
            or contradiction
            or sorted(n for stage in real for chunk in stage for n in chunk) != list(range(num_layers))
        ):
            refused += 1
            with pytest.raises(LayoutError):
                layout.stage_layers(num_layers)
            continue
        built += 1
        assert layout.stage_layers(num_layers) == real, (num_layers, pp, vpp)
    assert built >= 3
    assert refused >= 3


@pytest.mark.parametrize(
    ("written", "pp"),
    [
        ("Et*3|t*4|L", 3),
        ("Et|t|t|tL", 2),
        ("Ettt|t|tt|tL", 2),
        ("E|(tt|)*4t,t|L", 7),
        ("Ett|(t|)*2t|L", 5),
        ("E|t*|2L", 2),
        ("Et|*3tL", 2),
        ("E(t|t)*3L", 4),
        ("E(t|t)*3L", 2),
    ],
)
def test_written_layouts_equal_megatron(megatron: types.SimpleNamespace, written: str, pp: int) -> None:
    try:
        real = megatron.written(written, pp)
    except AssertionError:
        with pytest.raises(LayoutError):
            PipelineSplit(layout=written)
        return
    kind = next(kind for kind in real.flatten_layout if kind.name == "decoder")
    layout = ParallelLayout(dp=1, pp=pp, split=PipelineSplit(layout=written))
    spread = layout.stage_layers(real.flatten_layout.count(kind))
    assert layout.num_chunks == real.virtual_pipeline_model_parallel_size
    assert [[len(chunk) for chunk in stage] for stage in spread] == [
        [chunk.count(kind) for chunk in stage] for stage in real.layout
    ]


POLICIES = [BufferPolicy(), BufferPolicy(bucket_size=1500), BufferPolicy(bucket_size=1, pad_for_high_nccl_busbw=True)]
LAYOUTS = [
    ParallelLayout(dp=3),
    ParallelLayout(tp=2, dp=3, pp=2, cp=2),
    ParallelLayout(tp=2, dp=4, instances=2),
    ParallelLayout(dp=2, pp=2, vpp=2),
    ParallelLayout(dp=4, ep=2),
    ParallelLayout(tp=2, dp=2, ep=4, etp=1),
    ParallelLayout(tp=2, dp=2, ep=1, etp=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["one", "small", "busbw"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
@pytest.mark.parametrize(
    "description",
    [dense_model(dtype="bfloat16", tied=True), dense_model(), moe_model(dtype="bfloat16")],
    ids=["tied", "untied", "moe"],
)
def test_buffers_equal_megatron(
    megatron: types.SimpleNamespace, description: ModelDescription, layout: ParallelLayout, policy: BufferPolicy
) -> None:
    if layout.ep > 1 and description.num_experts is None:
        layout = layout.replace(ep=1)
    homes = Homes(description, layout)
    for rank in layout.ranks:
        pp, ep = layout.coordinate(rank)["pp"], layout.coordinate(rank, expert=True)["ep"]
        real = [
            buffer
            for chunk, specs in enumerate(homes.chunks(pp, ep))
            for buffer in real_buffers(megatron, specs, layout, policy if (pp, chunk) == (0, 0) else None, policy)
        ]
        ours = buffers_of(description, layout, rank, policy)
        assert [(b.dtype, b.expert, b.index, b.buckets, b.shards) for b in ours] == real
        for buffer in ours:
            check_runs(megatron, buffer, layout.shard_index(rank, expert=buffer.expert))


def real_buffers(
    megatron: types.SimpleNamespace,
    specs: tuple[ParameterSpec, ...],
    layout: ParallelLayout,
    bucketing: BufferPolicy | None,
    policy: BufferPolicy,
) -> list[tuple[Any, ...]]:
    """Megatron's own layout of parameters of these sizes, in the terms of `FlatBuffer`."""
    torch = megatron.torch
    names, params = {}, []
    for spec in specs:
        if not spec.trainable or spec.is_buffer:
            continue
        data = torch.empty(local_numel(spec, layout), dtype=getattr(torch, spec.dtype), device="meta")
        param = torch.nn.Parameter(data)
        param.allreduce = not in_expert_buffer(spec, layout)
        param.shared_embedding = needs_own_bucket(spec, layout)
        names[param] = spec.name
        params.append(param)
    full = megatron.optimizer.compute_full_param_layout(
        params,
        bucketing.bucket_size if bucketing else None,
        layout.dp * layout.cp // layout.instances,
        types.SimpleNamespace(grad_reduce_in_fp32=True, pad_buckets_for_high_nccl_busbw=policy.pad_for_high_nccl_busbw),
        expert_data_parallel_world_size=layout.edp // layout.instances,
    )
    return [
        (
            str(key.param_dtype).removeprefix("torch."),
            key.is_expert_parallel,
            tuple((names[param], *where) for param, where in found.param_index_map.items()),
            tuple(found.bucket_indices),
            found.num_optimizer_shards,
        )
        for key, found in full.layouts.items()
    ]


def check_runs(megatron: types.SimpleNamespace, buffer: Any, shard_rank: int) -> None:
    """What a shard owns of each parameter is what Megatron's range map says."""
    from megatron.core.optimizer.distrib_optimizer import Range

    index = {name: (start, end, bucket) for name, start, end, bucket in buffer.index}
    for bucket, (bucket_start, _) in enumerate(buffer.buckets):
        owned = Range(*buffer.shard(bucket, shard_rank))
        mapped = megatron.optimizer._build_model_gbuf_param_range_map(index, owned, bucket_start)
        real = {name: (ranges["param"].start, ranges["param"].end) for name, ranges in mapped.items()}
        ours = {name: owned_run(buffer, name, shard_rank) for name in index if index[name][2] == bucket}
        assert {name: run for name, run in ours.items() if run is not None} == real
