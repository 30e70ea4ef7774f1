"""What Megatron does beside the steps goes on after switches: checks at intervals, saving, dropout."""

from __future__ import annotations

import pytest

from tests.ranks.context import RankContext
from tests.ranks.dynamic import all_steps, layout_keys, run_switched
from tests.ranks.gpt_args import checkpoint_args
from tests.ranks.hooks import mend_checkpoints
from tests.ranks.pool import RankFailure, RankPool
from tests.states import watch
from tests.states.switched import FIRST, FP32, SECOND, STEPS, assert_trains_on, run_twice_switched, small_args

AT_INTERVALS = (
    "--manual-gc --manual-gc-interval 2 --check-weight-hash-across-dp-replicas-interval 2"
    " --rerun-mode validate_results --timing-log-level 2 --log-interval 4 --exit-interval 5"
)


def test_checks_and_collections_at_intervals_and_the_exit(ranks: RankPool) -> None:
    run = assert_trains_on(ranks, small_args(AT_INTERVALS), {"tp": 2}, {}, within=FP32, hooks=(watch.calls,))
    for record in run.ranks:
        assert record.exit_code in (0, None)
        assert len(record.steps) == 5
        assert record.extra["calls"]["check_param_hashes_across_dp_replicas"] >= 2  # after 2 and 4 steps
        assert record.extra["calls"]["gc.collect"] >= 2


def test_asynchronous_saves_around_switches(ranks: RankPool) -> None:
    """A save is still being written when the layout changes; it, and the save after it, are loaded as they were."""
    directory = ranks.scratch("async")
    saves = [*checkpoint_args(save=directory, interval=1), "--async-save", "--async-strategy", "mcore"]
    run = run_switched(
        ranks,
        2,
        [*small_args(tp=2), *saves],
        {FIRST: layout_keys(pp=2), SECOND: layout_keys()},
        hooks=(mend_checkpoints,),
    )
    assert [switch.outcome for switch in run.switches] == ["committed", "committed"]
    saved = sorted(path.name for path in directory.glob("iter_*"))
    assert saved == [f"iter_{iteration:07d}" for iteration in range(1, STEPS + 1)]
    assert all((directory / name / "metadata.json").exists() for name in saved)
    for iteration, layout, steps in ((FIRST, {"pp": 2}, SECOND - FIRST), (SECOND + 1, {}, 1)):
        (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        argv = [*small_args(**layout), *checkpoint_args(load=directory)]
        loaded = all_steps(ranks.pretrain(2, argv, hooks=(mend_checkpoints,)))
        assert loaded[:steps] == list(run.steps[iteration:][:steps])  # in all bits


DROPOUT = "--check-weight-hash-across-dp-replicas-interval 1"


def _with_dropout(argv: list[str]) -> list[str]:
    for flag in ("--attention-dropout", "--hidden-dropout"):
        argv[argv.index(flag) + 1] = "0.1"
    return argv


def test_dropout_keeps_replicas_equal_and_tensor_ranks_apart(ranks: RankPool) -> None:
    """Each switch proves that the tensor ranks' replicas are equal; the hashes prove it of the data-parallel ones."""
    argv = _with_dropout(small_args(DROPOUT, tp=2))
    run = run_twice_switched(ranks, argv, {}, {"tp": 2}, hooks=(watch.streams, watch.calls))
    first, second = (record.extra["streams"] for record in run.ranks)
    for step in range(STEPS):
        tracked = [streams[step]["tracker/model-parallel-rng"] for streams in (first, second)]
        assert (len(set(tracked)) == 2) == (step < FIRST or step >= SECOND), step
        assert first[step]["torch"] == second[step]["torch"]
    digests = [streams["tracker/model-parallel-rng"] for streams in first]
    assert len(set(digests)) == STEPS  # it moves on in each step: dropout draws from it
    assert all(record.extra["calls"]["check_param_hashes_across_dp_replicas"] >= 2 for record in run.ranks)
    never = [step.loss for step in ranks.pretrain(2, argv)[0].steps]
    losses = [step.loss for step in run.steps]
    assert losses[:FIRST] == never[:FIRST]
    assert losses[FIRST:] != never[FIRST:]  # other streams, other masks


def test_multi_token_prediction(ranks: RankPool) -> None:
    """Its stage keeps a copy of the embedding."""
    argv = small_args("--mtp-num-layers 1", swiglu=True, tied=False)
    run = assert_trains_on(ranks, argv, {"pp": 2}, {"tp": 2}, within=FP32)
    assert "mtp.layers.0.eh_proj.weight" in {key for key, _ in run.ranks[0].extra["after"].bits}


def test_multi_token_prediction_with_tied_embeddings_is_refused_on_another_stage_before_step_1(ranks: RankPool) -> None:
    argv = small_args("--mtp-num-layers 1", swiglu=True)
    with pytest.raises(RankFailure) as caught:
        run_switched(ranks, 2, argv, {FIRST: layout_keys(pp=2), SECOND: layout_keys(tp=2)})
    text = str(caught.value)
    assert "ScheduleProblemsError" in text
    assert "switches[0].to.pp; expected: pp 1 (--pipeline-model-parallel-size 1), or --untie-embeddings-and" in text
    assert "got: pp 2 with --mtp-num-layers 1 and tied embeddings; hint: launch with --untie-embeddings" in text
    assert "iteration        1/" not in text
    run = run_switched(ranks, 2, argv, {FIRST: layout_keys(tp=2), SECOND: layout_keys()})
    assert [switch.outcome for switch in run.switches] == ["committed", "committed"]


def _tied_prediction(context: RankContext) -> str:
    """Return what a Switcher says of such a stage, which nobody asked for the sizes of its model."""
    import types

    from megatron_dynatrain.errors import UnsupportedError
    from megatron_dynatrain.mcore import describe

    del context
    stage = types.SimpleNamespace(share_embeddings_and_output_weights=True, mtp_process=True, pre_process=True)
    stage.config = types.SimpleNamespace(pipeline_model_parallel_size=2)
    describe._refuse_tied_mtp(stage)
    stage.pre_process = False
    with pytest.raises(UnsupportedError) as refused:
        describe._refuse_tied_mtp(stage)
    return str(refused.value)


def test_a_stage_of_tied_multi_token_prediction_is_not_described(ranks: RankPool) -> None:
    (text,) = ranks.run(1, _tied_prediction)
    assert "subject: --mtp-num-layers; expected: pp 1, or --untie-embeddings" in text


def test_multi_token_prediction_with_experts(ranks: RankPool) -> None:
    """The experts of its layer come from two ranks and lie beside those of the other layers."""
    argv = small_args("--mtp-num-layers 1", swiglu=True, tied=False, experts=4, ep=2)
    assert_trains_on(ranks, argv, {"pp": 2, "ep": 1}, {"ep": 1}, within=FP32)
