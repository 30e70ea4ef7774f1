"""What pydantic finds wrong, in the words of the schedule: place, key, expected, got, nearest valid key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron_dynatrain.schedule.problems import Problem, nearest, say
from megatron_dynatrain.schedule.source import Path, Source

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TAGS = ("name", "inline")
"""Parts of a pydantic location that say which form `to` had, and aren't in the file."""

_EXPECTED = {
    "int_type": "an integer",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "union_tag_not_found": "the name of a layout, or a mapping with its sizes",
}

_REMOVE = {
    "dp": "dp is what is left of the world after the other sizes: remove it",
    "data_parallel_size": "dp is what is left of the world after the other sizes: remove it",
    "world_size": "the world is what the job was launched on: remove it",
    "<<": "merge keys are not supported: write the keys out",
}
"""Keys a reader may well try that have no place in a schedule, and what to do about each."""

_FLAG_NAMES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "num_distributed_optimizer_instances": "instances",
    "decoder_first_pipeline_num_layers": "first",
    "decoder_last_pipeline_num_layers": "last",
    "account_for_embedding_in_pipeline_split": "account_for_embedding",
    "account_for_loss_in_pipeline_split": "account_for_loss",
    "pipeline_model_parallel_layout": "layout",
    "sp": "sequence_parallel",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
}
"""Megatron's names of what a layout calls by a shorter one."""


def complain(error: ValidationError, source: Source, keys_at: Callable[[Path], tuple[str, ...]]) -> list[Problem]:
    """Turn a validation error into problems placed in the file.

    Args:
        error: What pydantic found.
        source: The file.
        keys_at: The keys that are valid in the mapping at a path.
    """
    return [_problem(detail, source, keys_at) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails, source: Source, keys_at: Callable[[Path], tuple[str, ...]]) -> Problem:
    path = _file_path(detail["loc"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, source, keys_at(path[:-1]))
    if kind == "missing":
        return source.problem(path, f"missing key {path[-1]!r}", expected=f"{path[-1]}: ...", got="nothing")
    subject = repr(path[-1]) if path else "the schedule"
    if isinstance(path[-1] if path else "", int):
        subject = "an item of the list"
    return source.problem(
        path, f"wrong value for {subject}", expected=_expected(kind, detail.get("ctx", {})), got=_got(detail)
    )


def _file_path(location: tuple[str | int, ...]) -> Path:
    """Drop the tag after `to` of a switch."""
    is_tagged = len(location) > 3 and location[0] == "switches" and location[2] == "to" and location[3] in _TAGS
    return (*location[:3], *location[4:]) if is_tagged else location


def _unknown_key(path: Path, source: Source, valid: tuple[str, ...]) -> Problem:
    key = str(path[-1])
    known = _FLAG_NAMES.get(key.replace("-", "_"))
    near = known if known in valid else nearest(key, valid)
    hint = _REMOVE.get(key) or (f"did you mean {near!r}?" if near else None)
    return source.problem(path, f"unknown key {key!r}", expected=f"one of {', '.join(valid)}", got=repr(key), hint=hint)


def _expected(kind: str, context: dict[str, Any]) -> str:
    if kind == "greater_than_equal":
        return f"an integer, at least {context['ge']}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "too_short":
        return f"a list of at least {context['min_length']} item"
    return _EXPECTED.get(kind, kind.replace("_", " "))


def _got(detail: ErrorDetails) -> str:
    return say(detail["input"])
