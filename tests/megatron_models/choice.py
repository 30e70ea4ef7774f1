"""Small Megatron models and layouts that fit them, and the strategies that draw both; without torch and Megatron.

Every draw is made to fit: sizes are divisors, grids are built from what is left. What `ParallelLayout` and
`check_model_fit` still refuse (orders that mix up the grids, mostly) is drawn again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from hypothesis import strategies as st

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import AXES, DEFAULT_ORDER, EVEN, ParallelLayout, PipelineSplit
from megatron_dynatrain.model_fit import check_model_fit
from megatron_dynatrain.vps.homes import check_expert_grid

WORLD = 16
"""Largest world, and the number of global ranks that layouts choose from."""

HEAD = 2
"""Width of an attention head."""

FROZEN = ("", "layernorm", "decoder.layers.0.", "word_embeddings", "experts", "linear_qkv")
"""What is frozen: parameters with this text in their name; none where it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """One small GPT, by what tells its parameters apart.

    Args:
        layers: Transformer layers.
        width: Attention heads, and the unit of what tensor parallelism splits.
        groups: Query groups.
        hidden: Width of the residual stream, which no axis splits; a small number, so that shards end inside of rows.
        ffn: Width of the MLP, in units of `width`.
        vocabulary: Rows of the embedding, in units of `width`.
        dtype: Dtype name of the parameters.
        gated: Whether fc1 is gate and up (SwiGLU).
        rms: RMSNorm instead of LayerNorm.
        bias: Biases of the linears.
        qk_norm: Norms of queries and keys.
        learned: Learned positions instead of rotary ones.
        tied: Whether the output layer is the embedding.
        latent: Multi-latent attention: 0 for none, 1 without and 2 with a low rank of the queries.
        experts: Routed experts of an MoE layer; 0 for a dense model.
        every: One layer in so many is an MoE layer.
        shared: Shared experts of an MoE layer.
        router: What the router keeps besides its weight: "", "expert_bias" or "global_aux_loss".
        frozen: One of `FROZEN`.
    """

    layers: int = 1
    width: int = 4
    groups: int = 4
    hidden: int = 4
    ffn: int = 1
    vocabulary: int = 1
    dtype: str = "float32"
    gated: bool = False
    rms: bool = False
    bias: bool = False
    qk_norm: bool = False
    learned: bool = False
    tied: bool = False
    latent: int = 0
    experts: int = 0
    every: int = 1
    shared: bool = False
    router: str = ""
    frozen: str = ""

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter, by its name with the layer's number in the whole model, is not trained."""
        if self.tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        return bool(self.frozen) and self.frozen in name

    def check_fit(self, layout: ParallelLayout) -> None:
        """Raise LayoutError where the model can't run on the layout."""
        check_model_fit(
            layout,
            num_layers=self.layers,
            num_attention_heads=self.width,
            num_query_groups=self.groups,
            ffn_hidden_size=self.ffn * self.width,
            hidden_size=self.hidden,
            padded_vocab_size=self.vocabulary * self.width,
            num_experts=self.experts or None,
            moe_ffn_hidden_size=self.ffn * self.width if self.experts else None,
            kv_channels=HEAD,
            add_bias_linear=self.bias,
        )
        if self.experts:
            check_expert_grid(layout)


@st.composite
def models(draw: st.DrawFn, *, moe: bool | None = None, latent: bool | None = None) -> ModelChoice:
    """A model; the first of each list is the simplest."""
    moe = draw(st.booleans()) if moe is None else moe
    latent = draw(st.booleans()) if latent is None else latent
    width = draw(st.sampled_from((4, 8, 12, 24)))
    model = ModelChoice(
        layers=draw(st.sampled_from((1, 1, 1, 2, 2, 3, 4, 8) if moe else (1, 1, 2, 2, 3, 4, 5, 6, 8))),
        width=width,
        groups=width if latent else draw(st.sampled_from([g for g in (width, 1, 2, 4) if width % g == 0])),
        hidden=draw(st.sampled_from((4, 6, 10))),
        ffn=draw(st.integers(1, 2)),
        vocabulary=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16"))),
        gated=draw(st.booleans()),
        rms=draw(st.booleans()),
        bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        learned=draw(st.booleans()),
        tied=draw(st.booleans()),
        latent=draw(st.integers(1, 2)) if latent else 0,
        frozen=draw(st.sampled_from(FROZEN)) if draw(st.integers(0, 3)) == 3 else "",
    )
    if not moe:
        return model
    shared = draw(st.booleans())
    return replace(
        model,
        bias=model.bias and not shared,  # Megatron refuses biases in shared experts
        experts=draw(st.sampled_from((2, 4, 6))),
        every=draw(st.sampled_from((1, 1, 2))),
        shared=shared,
        router=draw(st.sampled_from(("", "expert_bias", "global_aux_loss"))),
    )


@st.composite
def layouts(draw: st.DrawFn, model: ModelChoice, *, pool: int = WORLD) -> ParallelLayout:
    """A layout of the model on some of `pool` ranks."""
    tp, pp = draw(st.sampled_from(_tp_pp(model, pool)))
    cp = draw(st.sampled_from([n for n in (1, 1, 1, 1, 2, 2, 3, 4) if tp * pp * n <= pool]))
    dp = draw(st.sampled_from([n for n in (1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 6, 8, 12, 16) if tp * pp * cp * n <= pool]))
    each = tp * cp * dp
    sizes: dict[str, object] = {"tp": tp, "pp": pp, "cp": cp}
    sizes["vpp"], sizes["split"] = draw(_splits(model.layers, pp))
    if model.experts:
        sizes["ep"], sizes["etp"] = draw(st.sampled_from(_expert_grids(model, each, tp)))
        sizes["sequence_parallel"] = True
    else:
        sizes["sequence_parallel"] = draw(st.booleans())
    rest = each // (int(str(sizes["ep"])) * int(str(sizes["etp"]))) if model.experts else dp * cp
    counts = [n for n in (1, 1, 1, 2, 3) if (dp * cp) % n == 0 and rest % n == 0 and each // tp % n == 0]
    sizes["instances"] = draw(st.sampled_from(counts))
    ranks = tuple(range(each * pp))
    if draw(st.integers(0, 3)) == 3:
        ranks = tuple(draw(st.permutations(range(pool)))[: each * pp])
    orders = _orders(model, each * pp, tuple(sorted(sizes.items(), key=lambda item: item[0])))
    sizes["order"] = draw(st.sampled_from(orders)) if draw(st.booleans()) else orders[0]
    return ParallelLayout.for_world(ranks, **sizes)


@st.composite
def pairs(
    draw: st.DrawFn, *, moe: bool | None = None, latent: bool | None = None
) -> tuple[ModelChoice, ParallelLayout, ParallelLayout]:
    """A model and two different layouts of it."""
    model = draw(models(moe=moe, latent=latent))
    source = draw(layouts(model))
    target = draw(layouts(model).filter(lambda layout: layout != source))
    return model, source, target


@lru_cache(maxsize=512)
def _tp_pp(model: ModelChoice, pool: int) -> list[tuple[int, int]]:
    """The sizes of tp and pp that fit the model, small ones first; pp up to one stage for embedding and loss each."""
    found = []
    for tp, pp in itertools.product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 5, 6, 8)):
        if (
            tp * pp <= pool
            and _fits(model, ParallelLayout(tp=tp, etp=1, dp=1, sequence_parallel=True))
            and pp <= model.layers + 2
        ):
            found.append((tp, pp))
    found.sort(key=lambda sizes: (sizes[0] * sizes[1], sizes))
    return found[: len(found) // 2] * 4 + found  # small ones more often: they cost less, and most faults show on them


def _fits(model: ModelChoice, layout: ParallelLayout) -> bool:
    try:
        model.check_fit(layout)
    except LayoutError:
        return False
    return True


@lru_cache(maxsize=512)
def _pipelines(layers: int, pp: int) -> list[tuple[int | None, PipelineSplit]]:
    """The ways to spread the layers without a written layout, (vpp, split), that are possible."""
    splits = [EVEN, PipelineSplit(account_for_embedding=True), PipelineSplit(account_for_loss=True)]
    splits.append(PipelineSplit(account_for_embedding=True, account_for_loss=True))
    ends = [None, *range(1, layers)]
    splits += [PipelineSplit(first=a, last=b) for a in ends for b in ends if (a, b) != (None, None)]
    found: list[tuple[int | None, PipelineSplit]] = []
    for vpp, split in itertools.product((None, 2, 3) if pp > 1 else (None,), splits if pp > 1 else splits[:1]):
        try:
            layout = ParallelLayout(dp=1, pp=pp, vpp=vpp, split=split)
            layout.stage_layers(layers)
        except LayoutError:
            continue
        found.append((vpp, split))
    return found or [(None, _evenly_written(layers, pp))]


def _evenly_written(layers: int, pp: int) -> PipelineSplit:
    """A written layout, for layers that can't be spread by numbers."""
    counts = [layers // pp + (stage < layers % pp) for stage in range(pp)]
    return PipelineSplit(layout="E" + "|".join("t" * count for count in counts) + "L")


def _splits(layers: int, pp: int) -> st.SearchStrategy[tuple[int | None, PipelineSplit]]:
    spread = st.sampled_from(_pipelines(layers, pp))
    return spread if pp == 1 else spread | spread | _written(layers, pp)


@st.composite
def _written(draw: st.DrawFn, layers: int, pp: int) -> tuple[int | None, PipelineSplit]:
    """A written pipeline layout: any stage may be without layers, also those of the embedding and of the loss."""
    vpp = draw(st.sampled_from((None, None, 2)))
    stages = pp * (vpp or 1)
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    counts = [b - a for a, b in itertools.pairwise([0, *cuts, layers])]
    return vpp, PipelineSplit(layout="E" + "|".join("t" * count for count in counts) + "L")


def _expert_grids(model: ModelChoice, each: int, tp: int) -> list[tuple[int, int]]:
    """The sizes of ep and etp that fit the model and `each` ranks per stage; (1, tp) is the first where it does."""
    sizes = (1, 2, 3, 4, 6, 8)
    found = [
        (ep, etp)
        for ep, etp in itertools.product(sizes, (1,) if model.bias else sizes)  # Megatron's rule for experts' biases
        if model.experts % ep == 0 and model.width % etp == 0 and each % (ep * etp) == 0
    ]
    return sorted(found, key=lambda grid: grid != (1, tp))


@lru_cache(maxsize=1024)
def _orders(model: ModelChoice, world: int, sizes: tuple[tuple[str, object], ...]) -> list[str]:
    """The orders of the axes that the layout and Megatron's groups allow, the default first."""
    found = []
    for axes in itertools.permutations(AXES):
        try:
            layout = ParallelLayout.for_world(world, order="-".join(axes), **dict(sizes))
            model.check_fit(layout)
        except LayoutError:
            continue
        found.append(layout.order)
    return sorted(found, key=lambda order: order != DEFAULT_ORDER)
