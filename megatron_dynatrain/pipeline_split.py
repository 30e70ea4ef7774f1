"""How transformer layers are spread over pipeline stages and their model chunks (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_dynatrain.errors import LayoutError, UnsupportedError

LAYOUT_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """How layers are spread over stages; the default is an even split.

    Args:
        first: Layers of the first pipeline rank (`--decoder-first-pipeline-num-layers`).
        last: Layers of the last pipeline rank (`--decoder-last-pipeline-num-layers`).
        account_for_embedding: The embedding counts as a layer (`--account-for-embedding-in-pipeline-split`).
        account_for_loss: The loss counts as a layer (`--account-for-loss-in-pipeline-split`).
        layout: A written layout (`--pipeline-model-parallel-layout`), e.g. `Et*3|t*4|L`; stages in the order of the
            layers, so that stage `i` is model chunk `i // pp` of pipeline rank `i % pp`.

    Raises:
        LayoutError: Two ways of splitting at once, a size below 1, or a layout that can't be read.
        UnsupportedError: The layout has multi-token prediction layers (`m`).
    """

    first: int | None = None
    last: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: str | None = None

    def __post_init__(self) -> None:
        uneven = self.first is not None or self.last is not None
        counted = self.account_for_embedding or self.account_for_loss
        if uneven + counted + (self.layout is not None) > 1:
            raise LayoutError(
                "only one way of splitting the pipeline can be used at a time",
                subject="pipeline split",
                expected="first/last, or account_for_embedding/account_for_loss, or layout",
                got=self,
            )
        for name, value in (("first", self.first), ("last", self.last)):
            if value is not None and value < 1:
                raise LayoutError("a pipeline rank needs a layer", subject=name, expected="at least 1", got=value)
        if self.layout is not None:
            parse_stages(self.layout)

    def __str__(self) -> str:
        return " ".join(
            f"{name}={value}"
            for name, value in (
                ("first", self.first),
                ("last", self.last),
                ("account_for_embedding", self.account_for_embedding),
                ("account_for_loss", self.account_for_loss),
                ("layout", self.layout),
            )
            if value is not None and value is not False
        )


def spread_layers(
    split: PipelineSplit, num_layers: int, pp: int, chunks: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the global, zero-based layer numbers of each `[pipeline rank][model chunk]`.

    Every layer is in exactly one chunk. Same result as Megatron 0.19 (`get_num_layers_to_build`,
    `get_transformer_layer_offset`, `PipelineParallelLayerLayout`).

    Args:
        split: The way of splitting.
        num_layers: Transformer layers of the model.
        pp: Pipeline ranks.
        chunks: Model chunks per pipeline rank; 1 without a virtual pipeline.

    Raises:
        LayoutError: The layers can't be spread so.
    """
    if num_layers < 1:
        raise LayoutError("a model needs a layer", subject="num_layers", expected="at least 1", got=num_layers)
    if split.layout is not None:
        counts = _counts_written(split.layout, num_layers, pp, chunks)
    elif split.first is not None or split.last is not None:
        counts = _counts_uneven(split, num_layers, pp, chunks)
    else:
        counts = _counts_even(split, num_layers, pp, chunks)
    spread = _number(counts, pp, chunks)
    found = [layer for stage in spread for chunk in stage for layer in chunk]
    if sorted(found) != list(range(num_layers)):
        raise LayoutError(
            "the pipeline split doesn't hold every layer exactly once",
            subject="num_layers",
            expected=f"layers 0..{num_layers - 1}",
            got=sorted(found),
        )
    return spread


def _number(counts: list[list[int]], pp: int, chunks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Hand out layer numbers in the order a token passes the stages: all ranks of chunk 0, then of chunk 1, ..."""
    spread: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    layer = 0
    for chunk in range(chunks):
        for stage in range(pp):
            count = counts[stage][chunk]
            spread[stage].append(tuple(range(layer, layer + count)))
            layer += count
    return tuple(tuple(stage) for stage in spread)


def _counts_even(split: PipelineSplit, num_layers: int, pp: int, chunks: int) -> list[list[int]]:
    units = num_layers + split.account_for_embedding + split.account_for_loss
    counted = f"{num_layers} layers"
    if split.account_for_embedding:
        counted += " + embedding"
    if split.account_for_loss:
        counted += " + loss"
    if units % (pp * chunks):
        raise LayoutError(
            f"{counted} can't be spread evenly over pp {pp}" + (f" x vpp {chunks}" if chunks > 1 else ""),
            subject="num_layers",
            expected=f"a multiple of {pp * chunks}",
            got=units,
            hint="set the layers of the first or last pipeline rank, or write the layout out",
        )
    counts = [[units // (pp * chunks)] * chunks for _ in range(pp)]
    counts[0][0] -= split.account_for_embedding
    counts[-1][-1] -= split.account_for_loss
    return counts


def _counts_uneven(split: PipelineSplit, num_layers: int, pp: int, chunks: int) -> list[list[int]]:
    middle_ranks = pp - (split.first is not None) - (split.last is not None)
    middle = num_layers - (split.first or 0) - (split.last or 0)
    _check_middle(middle, middle_ranks, chunks, f"{num_layers} layers, pp {pp}, {split}")
    per_rank = [middle // middle_ranks if middle_ranks else 0] * pp
    if split.first is not None:
        per_rank[0] = split.first
    if split.last is not None:
        per_rank[-1] = split.last
    for rank, count in enumerate(per_rank):
        if count % chunks:
            raise LayoutError(
                f"the {count} layers of pipeline rank {rank} can't be spread evenly over vpp {chunks}",
                subject="vpp",
                expected=f"a divisor of {count}",
                got=chunks,
            )
    return [[count // chunks] * chunks for count in per_rank]


def _check_middle(middle: int, ranks: int, chunks: int, given: str) -> None:
    """Check the layers and pipeline ranks that first and last leave over."""
    if ranks < 0 or middle < 0 or bool(middle) != bool(ranks):
        raise LayoutError(
            f"the first and last pipeline ranks don't fit the model: {middle} layers are left for {ranks} ranks",
            subject="num_layers",
            expected="layers left exactly where there are ranks left",
            got=given,
        )
    if chunks > 1 and not ranks:
        # Megatron 0.19 divides by the number of middle ranks there (`get_transformer_layer_offset`).
        raise LayoutError(
            "a virtual pipeline with first and last set needs a pipeline rank between them",
            subject="pp",
            expected="at least 3",
            got=given,
            hint="write the layout out",
        )
    if ranks and middle % ranks:
        raise LayoutError(
            f"the {middle} layers left can't be spread evenly over {ranks} pipeline ranks",
            subject="num_layers",
            expected=f"a multiple of {ranks} left",
            got=given,
        )


def _counts_written(layout: str, num_layers: int, pp: int, chunks: int) -> list[list[int]]:
    stages = parse_stages(layout)
    if len(stages) != pp * chunks:
        raise LayoutError(
            "the written pipeline layout has another number of stages",
            subject=f"{LAYOUT_FLAG} {layout}",
            expected=f"pp {pp} x vpp {chunks} = {pp * chunks} stages",
            got=len(stages),
        )
    found = sum(stage.count("t") for stage in stages)
    if found != num_layers:
        raise LayoutError(
            "the written pipeline layout has another number of layers",
            subject=f"{LAYOUT_FLAG} {layout}",
            expected=f"{num_layers} layers",
            got=found,
        )
    return [[stages[chunk * pp + stage].count("t") for chunk in range(chunks)] for stage in range(pp)]


@lru_cache(maxsize=64)
def parse_stages(layout: str) -> tuple[str, ...]:
    """Read a written layout and return one string of `E`, `t` and `L` per stage.

    `E` is the embedding, `t` a transformer layer, `L` the loss, `|` ends a stage, `x*3` repeats a letter or `|`,
    `(...)*3` repeats a part, commas are ignored.

    Raises:
        LayoutError: A character or a repeat that can't be read, or the embedding (loss) not first (last), once.
        UnsupportedError: It has multi-token prediction layers.
    """
    flat = "".join(_expand(layout.replace(",", ""), layout))
    if "m" in flat:
        raise UnsupportedError(
            "multi-token prediction layers can't be moved between pipeline stages",
            subject=f"{LAYOUT_FLAG} {layout}",
            expected="a layout without `m`",
        )
    letters = flat.replace("|", "")
    if not (letters.startswith("E") and letters.endswith("L")) or letters.count("E") != 1 or letters.count("L") != 1:
        raise LayoutError(
            "a written pipeline layout starts with one embedding `E` and ends with one loss `L`",
            subject=f"{LAYOUT_FLAG} {layout}",
            expected="E...L",
            got=letters,
        )
    return tuple(flat.split("|"))


def _expand(text: str, layout: str) -> Iterator[str]:
    """Yield the parts of a layout with every repeat written out; parentheses don't nest."""
    at = 0
    while at < len(text):
        part, at = _part(text, at, layout)
        if at < len(text) and text[at] == "*":
            digits = at + 1
            while digits < len(text) and text[digits].isdigit():
                digits += 1
            if digits == at + 1:
                raise _unreadable(layout, "a number after `*`", text[at:])
            part, at = part * int(text[at + 1 : digits]), digits
        elif text[at - 1] == ")":
            raise _unreadable(layout, "`*` and a number after `)`", text[at:])
        yield part


def _part(text: str, at: int, layout: str) -> tuple[str, int]:
    """Return the letter or the parenthesised part at a place, and where it ends."""
    if text[at] == "(":
        close = text.find(")", at)
        if close <= at + 1 or "(" in text[at + 1 : close]:
            raise _unreadable(layout, "a part in parentheses that don't nest", text[at:])
        return "".join(_expand(text[at + 1 : close], layout)), close + 1
    if text[at] not in "EtmL|":
        raise _unreadable(layout, "E, t, m, L, | or (...)*n", text[at:])
    return text[at], at + 1


def _unreadable(layout: str, expected: str, got: str) -> LayoutError:
    return LayoutError(
        "the written pipeline layout can't be read", subject=f"{LAYOUT_FLAG} {layout}", expected=expected, got=got
    )
