"""Agreed boundaries in threads: whatever the delays, all ranks do the same at the same boundary, or none does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from megatron_dynatrain.elastic.boundary import BoundaryAgreement, BoundaryGate, Proposal
from megatron_dynatrain.errors import DeadlineError

_SHORT = 40
"""Boundaries of a training that may end while something is proposed."""
_PATIENCE_S = 20


class Ranks:
    """Ranks as pairs of threads: one that trains in lock step with the others, one that votes."""

    def __init__(self, world: int, seed: int, *, actions: int, short: bool = False) -> None:
        self.store = HashStore()
        self.world = world
        self.seed = seed
        self.actions = actions
        self.short = short
        self.boundaries: list[int] = []
        self.skips = random.Random(seed)
        self.gates = [BoundaryGate(0) for _ in range(world)]
        self.agreements = [
            BoundaryAgreement(self.store, ranks=range(world), rank=rank, tag="t", gate=gate, seconds=_PATIENCE_S)
            for rank, gate in enumerate(self.gates)
        ]
        self.barrier = threading.Barrier(world, action=self.step)
        self.proposed = threading.Event()
        self.over = False
        self.did: list[list[tuple[int, object]]] = [[] for _ in range(world)]
        self.agreed: dict[object, int] = {}
        self.errors: list[BaseException] = []

    def step(self) -> None:
        """Decide once for all ranks what the next boundary is, or that the training is over."""
        last = self.boundaries[-1] if self.boundaries else 0
        self.over = len(self.boundaries) >= _SHORT if self.short else self.proposed.is_set() and self.settled()
        self.boundaries.append(last + self.skips.choice((1, 1, 1, 2, 3)))  # at some boundaries nobody stops

    def settled(self) -> bool:
        return all(at < self.boundaries[-1] for at in self.agreed.values())

    def train(self, rank: int) -> None:
        delays = random.Random(f"{self.seed} {rank}")
        while True:
            self.barrier.wait(_PATIENCE_S)  # a step has collectives: nobody is more than one ahead
            if self.over:
                break
            iteration = self.boundaries[-1]
            time.sleep(delays.choice((0, 0, 0.0002, 0.001)))
            action = self.gates[rank].arrive(iteration, _PATIENCE_S)
            if action is not None:
                self.did[rank].append((iteration, action))
        self.agreements[rank].leave(self.store)

    def watch(self, rank: int) -> None:
        delays = random.Random(f"watch {self.seed} {rank}")
        if rank == 0:
            for action in range(self.actions):
                time.sleep(delays.choice((0, 0.001, 0.003)))
                boundary = self.agreements[0].propose(action)
                if boundary is not None:
                    self.agreed[action] = boundary
            self.proposed.set()
        else:
            while self.agreements[rank].attend():
                time.sleep(delays.choice((0, 0, 0.001, 0.004)))

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._kept, args=(target, rank), daemon=True)
            for rank in range(self.world)
            for target in (self.train, self.watch)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
        assert [thread.name for thread in threads if thread.is_alive()] == []
        if self.errors:
            raise self.errors[0]
        for agreement in self.agreements:
            agreement.forget()

    def _kept(self, target: Callable[[int], None], rank: int) -> None:
        try:
            target(rank)
        except BaseException as error:
            self.errors.append(error)
            self.barrier.abort()


@settings(max_examples=12, deadline=None)
@given(world=st.integers(1, 4), seed=st.integers(0, 2**32), actions=st.integers(1, 6), short=st.booleans())
def test_all_ranks_act_at_the_same_boundary(world: int, seed: int, actions: int, short: bool) -> None:
    ranks = Ranks(world, seed, actions=actions, short=short)
    ranks.run()
    assert all(did == ranks.did[0] for did in ranks.did)
    reached = ranks.boundaries[:-1]  # at the last one the training was over
    stops = {action: next((i for i in reached if i >= at), None) for action, at in ranks.agreed.items()}
    assert ranks.did[0] == [(stop, action) for action, stop in stops.items() if stop is not None]
    assert short or [action for _, action in ranks.did[0]] == list(range(actions))


def test_keys_do_not_pile_up() -> None:
    ranks = Ranks(3, 0, actions=0)
    threads = [threading.Thread(target=ranks.watch, args=(rank,), daemon=True) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    counts = []
    for number in range(8):
        boundary = ranks.agreements[0].propose(number)
        assert boundary is not None
        assert [gate.arrive(boundary, _PATIENCE_S) for gate in ranks.gates] == [number] * 3
        counts.append(ranks.store.num_keys())
    for rank, agreement in enumerate(ranks.agreements):
        agreement.leave(ranks.store)
        if rank:
            threads[rank - 1].join(_PATIENCE_S)
        agreement.forget()
    assert max(counts) <= 2 * counts[1]
    assert ranks.store.num_keys() <= counts[1]  # what the last vote has left


def gate_at(reached: int, boundary: int | None = None) -> tuple[BoundaryGate, Proposal | None]:
    gate = BoundaryGate(reached)
    proposal = None if boundary is None else Proposal(0, boundary, "act")
    if proposal is not None:
        assert gate.promise(proposal)
    return gate, proposal


def test_a_rank_promises_only_what_is_still_to_come_and_one_thing_at_a_time() -> None:
    gate, _ = gate_at(5)
    assert not gate.promise(Proposal(0, 5, "passed"))
    kept = Proposal(1, 6, "kept")
    assert gate.promise(kept)
    assert not gate.promise(Proposal(2, 7, "second"))
    gate.settle(kept, False)
    assert gate.promise(Proposal(3, 7, "third"))
    gate.close()
    assert not gate.promise(Proposal(4, 9, "too late"))


@pytest.mark.parametrize(("agreed", "expected"), [(True, "act"), (False, None)])
def test_the_training_thread_waits_at_the_promised_boundary_for_the_verdict(agreed: bool, expected: Any) -> None:
    gate, proposal = gate_at(0, 2)
    assert proposal is not None
    assert gate.arrive(1, 0) is None  # not there yet: no wait
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(gate.arrive(2, _PATIENCE_S)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    gate.settle(proposal, agreed)
    thread.join(_PATIENCE_S)
    assert found == [expected]
    assert gate.wait_free(0)
    assert gate.arrive(3, 0) is None


def test_without_a_verdict_nothing_is_done_and_a_late_one_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gate, proposal = gate_at(0, 1)
    assert proposal is not None
    assert gate.arrive(1, 0.01) is None
    assert "no verdict" in caplog.text
    gate.settle(proposal, True)
    assert gate.arrive(2, 0) is None


def test_a_rank_that_does_not_answer_fails_the_proposal_within_the_deadline() -> None:
    store, gate = HashStore(), BoundaryGate(0)
    agreement = BoundaryAgreement(store, ranks=(0, 1), rank=0, tag="t", gate=gate, seconds=0.1)
    with pytest.raises(DeadlineError, match=r"missing ranks \[1\]"):
        agreement.propose("act")
    assert gate.arrive(10, 0) is None


def test_a_leader_that_leaves_does_not_wait_for_votes() -> None:
    store, gate = HashStore(), BoundaryGate(0)
    agreement = BoundaryAgreement(store, ranks=(0, 1), rank=0, tag="t", gate=gate, seconds=_PATIENCE_S)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(agreement.propose("act")), daemon=True)
    thread.start()
    while agreement._voting is None:
        time.sleep(0.001)
    agreement.leave(store)
    thread.join(_PATIENCE_S / 2)
    assert found == [None]
