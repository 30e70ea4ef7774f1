"""Megatron's flags for the small GPT of the tests."""

from __future__ import annotations

_CPU = """
--transformer-impl local --distributed-backend gloo --no-masked-softmax-fusion --no-gradient-accumulation-fusion
--no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
"""
_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --num-workers 0"
_SCHEDULE = """
--micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 20
--weight-decay 0.01 --clip-grad 1.0 --use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0
"""
_LOG = "--log-interval 1 --eval-iters 0 --eval-interval 1000 --timing-log-level 0"
# 128 rows fit every layout up to TP 8, so that shapes don't depend on it.
_VOCABULARY = "--make-vocab-size-divisible-by 16"


def gpt_args(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    sp: bool = False,
    bf16: bool = False,
    tied: bool = True,
    gqa: int | None = None,
    swiglu: bool = False,
    experts: int | None = None,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    seq: int = 32,
    global_batch: int = 8,
    train_iters: int = 10,
    extra: str = "",
) -> list[str]:
    """Return the flags of one run.

    Args:
        vpp: Virtual stages per pipeline rank.
        etp: Expert tensor parallelism; 1 where `experts` is given and this isn't.
        sp: Sequence parallelism.
        tied: Input and output embeddings are one parameter.
        gqa: Number of query groups; None for as many as heads.
        swiglu: Gated MLP without biases, with RMSNorm and rotary positions, as in today's models.
        experts: Number of experts of every layer, top 2; None for a dense model.
        extra: More flags, separated by blanks.
    """
    shape = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {seq} "
        f"--max-position-embeddings {seq} --global-batch-size {global_batch} --train-iters {train_iters}"
    )
    words = [shape, _CPU, _DATA, _SCHEDULE, _LOG, _VOCABULARY, _layout(tp, pp, cp, vpp, layers, sp)]
    words.append(_model(bf16, tied, gqa, swiglu))
    if experts is not None:
        words.append(_moe(experts, ep, 1 if etp is None else etp))
    return " ".join([*words, extra]).split()


def checkpoint_args(*, save: object = None, load: object = None, interval: int = 1000) -> list[str]:
    """Return the flags of a checkpoint that another layout can load.

    Args:
        save: Directory to save to.
        load: Directory to load from.
        interval: Iterations between saves; there is a last one at the end.
    """
    words = ["--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
    if save is not None:
        words += ["--save", str(save), "--save-interval", str(interval)]
    if load is not None:
        words += ["--load", str(load)]
    return words


def _layout(tp: int, pp: int, cp: int, vpp: int | None, layers: int, sp: bool) -> str:
    words = ""
    if tp > 1:
        words += f" --tensor-model-parallel-size {tp}"
    if sp:
        words += " --sequence-parallel"
    if pp > 1:
        words += f" --pipeline-model-parallel-size {pp}"
    if vpp is not None:
        words += f" --num-layers-per-virtual-pipeline-stage {layers // pp // vpp}"
    if cp > 1:
        words += f" --context-parallel-size {cp}"
    return words


def _model(bf16: bool, tied: bool, gqa: int | None, swiglu: bool) -> str:
    words = ""
    if bf16:
        words += " --bf16"
    if not tied:
        words += " --untie-embeddings-and-output-weights"
    if gqa is not None:
        words += f" --group-query-attention --num-query-groups {gqa}"
    if swiglu:
        words += " --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    return words


def _moe(experts: int, ep: int, etp: int) -> str:
    return (
        f" --num-experts {experts} --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
        " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
        f" --expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp}"
    )
