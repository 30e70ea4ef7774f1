"""The models of the table of pairs, small enough for CPUs: what tells one from another, and Megatron's flags for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tests.states.local_mla import attend_with_other_widths

_MODERN: Mapping[str, Any] = {"tied": False, "swiglu": True}
_EXPERTS = "--moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 48"
_BIASED = (
    "--moe-token-dispatcher-type allgather --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-router-bias-update-rate 1e-2"
)
_LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model.

    Attributes:
        words: What it is, for the document.
        dtype: Of its parameters.
        keywords: Of `gpt_args`; the number of experts and of query groups is that of the sizes.
        moe: Whether it has experts.
        grouped: Whether it has fewer query groups than heads.
        extra: More of Megatron's flags.
        hooks: What every run of it needs.
    """

    words: str
    dtype: str
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moe: bool = False
    grouped: bool = False
    extra: str = ""
    hooks: tuple[Callable[..., None], ...] = ()


MODELS: Mapping[str, Model] = {
    "dense-fp32": Model(words="tied embeddings, learned positions, LayerNorm, GELU, biases", dtype="fp32"),
    "dense-bf16": Model(
        words="untied, rotary positions, RMSNorm, SwiGLU, grouped queries",
        dtype="bf16",
        keywords={"bf16": True, **_MODERN},
        grouped=True,
    ),
    "dense-fp16": Model(
        words="tied, LayerNorm, GELU, biases, dynamic loss scale",
        dtype="fp16",
        extra="--fp16 --initial-loss-scale 1024 --loss-scale-window 3",
    ),
    "moe-fp32": Model(
        words="experts with a shared one, all-to-all dispatcher, auxiliary loss, tied, LayerNorm, GELU",
        dtype="fp32",
        moe=True,
        extra=_EXPERTS + " --disable-bias-linear",
    ),
    "moe-bf16": Model(
        words="first layer dense, then experts with a shared one, all-gather dispatcher, router expert bias, "
        "untied, RMSNorm, SwiGLU, grouped queries",
        dtype="bf16",
        keywords={"bf16": True, **_MODERN},
        moe=True,
        grouped=True,
        extra=f"{_EXPERTS} {_BIASED} --moe-layer-freq [0]+[1]*3",
    ),
    "mla-fp32": Model(
        words="multi-latent attention, untied, rotary positions, RMSNorm, SwiGLU",
        dtype="fp32",
        keywords=_MODERN,
        extra=_LATENT,
        hooks=(attend_with_other_widths,),
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the models on some worlds.

    Attributes:
        gated: Flags of the models with a gated MLP; the width that Megatron gives it by itself may not be divisible.
    """

    layers: int = 4
    hidden: int = 32
    heads: int = 8
    groups: int = 4
    experts: int = 4
    seq: int = 16
    global_batch: int = 4
    gated: str = ""

    def keywords(self, model: Model) -> dict[str, Any]:
        """Return the keywords of `gpt_args` for a model of these sizes."""
        names = ("layers", "hidden", "heads", "seq", "global_batch")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        if model.grouped:
            found["gqa"] = self.groups
        if model.moe:
            found["experts"] = self.experts
        return {**found, **model.keywords}


TWOS = Sizes()
FIVE_LAYERS = Sizes(layers=5)
EIGHT = Sizes(global_batch=8, experts=8)
THREES = Sizes(layers=6, hidden=48, heads=6, groups=3, experts=6, seq=24, global_batch=6, gated="--ffn-hidden-size 96")
