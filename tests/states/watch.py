"""Hooks that watch what a run does beside training: loss scales, checks, random streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.ranks.pretrain import PretrainRun


def loss_scales(run: PretrainRun) -> None:
    """Keep (scale, growth tracker) before each step in `extra["scales"]`, from any rank that has a scaler."""
    scales: list[tuple[float, int]] = run.record.extra.setdefault("scales", [])

    def keep(model: Any, optimizer: Any, scheduler: Any) -> None:
        for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
            state = inner.grad_scaler.state_dict()
            scales.append((float(state["scale"]), int(state["growth_tracker"])))

    run.before_step.append(keep)


def calls(run: PretrainRun) -> None:
    """Count the calls of what Megatron does at intervals, by name, in `extra["calls"]`."""
    import megatron.training.training as training

    counts: dict[str, int] = run.record.extra.setdefault("calls", {})

    def counted(name: str) -> None:
        stock = getattr(training, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return stock(*args, **kwargs)

        setattr(training, name, function)

    counted("check_param_hashes_across_dp_replicas")
    collect = training.gc.collect

    def collected(*args: Any, **kwargs: Any) -> Any:
        counts["gc.collect"] = counts.get("gc.collect", 0) + 1
        return collect(*args, **kwargs)

    training.gc = type("gc", (), {"collect": staticmethod(collected), "disable": staticmethod(lambda: None)})


def streams(run: PretrainRun) -> None:
    """Keep a digest of each random stream before each step in `extra["streams"]`."""
    kept: list[dict[str, str]] = run.record.extra.setdefault("streams", [])

    def keep(model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron_dynatrain.mcore.random_streams import RandomStreams

        kept.append(RandomStreams.capture().digests())

    run.before_step.append(keep)
