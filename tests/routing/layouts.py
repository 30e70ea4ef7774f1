"""Random pairs of real placements of small models, for properties."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_dynatrain.errors import LayoutError
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.vps.flat_buffer import BufferPolicy
from megatron_dynatrain.vps.placement import Placement
from megatron_dynatrain.vps.tensor import ModelDescription
from tests.pure.models import dense_model, moe_model

DENSE = dense_model(layers=4, hidden=12, ffn=24, vocab=24, tied=True)
HALF = dense_model(layers=4, hidden=12, ffn=24, vocab=24, tied=False, dtype="bfloat16")
EXPERTS = moe_model(layers=4, experts=4, hidden=8, ffn=8, dtype="bfloat16")
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-ep-dp-pp-cp")


@st.composite
def layouts(draw: st.DrawFn, model: ModelDescription, pool: int = 16) -> ParallelLayout:
    """A layout of the model on any of `pool` ranks, in any order."""
    moe = model.num_experts is not None
    tp = draw(st.sampled_from((1, 2, 4) if moe else (1, 2, 3, 4, 6)))
    pp = draw(st.sampled_from((1, 2, 4)))
    rest = list(range(1, pool // (tp * pp) + 1)) or [1]
    dp = draw(st.sampled_from(rest))
    world = tp * pp * dp
    ranks = tuple(draw(st.permutations(range(max(pool, world))))[:world])
    sizes: dict[str, object] = {"order": draw(st.sampled_from(ORDERS))}
    if pp == 2:
        sizes["vpp"] = draw(st.sampled_from((None, 2)))
    if moe:
        grids = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if (tp * dp) % (ep * etp) == 0]
        sizes["ep"], sizes["etp"] = draw(st.sampled_from(grids))
    elif dp % 2 == 0:
        sizes["instances"] = draw(st.sampled_from((1, 2)))
    return ParallelLayout.for_world(ranks, tp=tp, pp=pp, **sizes)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, Placement]:
    """Source and target placements of one model."""
    model = draw(st.sampled_from((DENSE, HALF, EXPERTS)))
    policy = BufferPolicy(bucket_size=draw(st.sampled_from((None, 300))), param_align=draw(st.sampled_from((1, 64))))
    found = []
    while len(found) < 2:
        try:
            found.append(Placement(model, draw(layouts(model)), policy))
        except LayoutError:  # grids that Megatron would mix up; the next draw is another one
            continue
    return found[0], found[1]
