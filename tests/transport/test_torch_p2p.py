"""Plans executed by real processes over gloo: every case, agreement, and peers that fail."""

from __future__ import annotations

import os
import time

import pytest

from tests.ranks.context import RankContext
from tests.ranks.pool import RankPool
from tests.transport.cases import CASES

NAMES = [name for name in CASES if name != "one-rank"]


def switch_there_and_back(context: RankContext, name: str) -> dict[str, object]:
    """Run a case and its way back; every check is on the rank itself."""
    import torch.distributed as dist

    from megatron_dynatrain.routing.windows import plan_rank
    from megatron_dynatrain.transport.base import Deadline
    from megatron_dynatrain.transport.execute import run_plan
    from megatron_dynatrain.transport.torch_p2p import TorchTransport, agree_on_pairs
    from megatron_dynatrain.transport.write_once import WriteCounter
    from tests.transport.witness import differences, empty, filled

    case = CASES[name]
    source, target = case.placements()
    transport = TorchTransport(dist.group.WORLD, rank=context.rank, ranks=range(context.world), max_ops=16)
    if case.messages == 0:
        transport.exchange = None  # any use of the network fails
    memory = filled(source, context.rank) if context.rank in source.layout.ranks else {}
    record = {}
    for here, there in ((source, target), (target, source)):
        known = sorted({*here.layout.ranks, *there.layout.ranks})
        if context.rank in known:
            plan = plan_rank(here, there, context.rank, budget=case.budget)
        deadline = Deadline(20)
        agree_on_pairs(plan, transport, deadline=deadline)
        arrived = empty(there, context.rank)
        writes = WriteCounter(arrived, context.rank)
        windows: list[int] = []
        report = run_plan(plan, memory, arrived, transport, deadline=deadline, on_window=windows.append, writes=writes)
        expected = filled(there, context.rank) if context.rank in there.layout.ranks else {}
        assert [*differences(arrived, expected)] == []
        assert report.received_bytes == plan.minimum_received_bytes
        assert windows == list(range(len(plan.windows)))
        record.setdefault("sent", report.sent_bytes)
        record.setdefault("messages", report.messages)
        memory = arrived
    return record


@pytest.mark.parametrize("name", NAMES)
def test_case(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    records = ranks.run(case.world, switch_there_and_back, name, timeout=20.0)
    if case.messages is not None:
        assert sum(record["messages"] for record in records) == 2 * case.messages


def exchange_many(context: RankContext) -> bool:
    """Several messages per pair, some empty, of different counts per direction, with few in flight."""
    import torch
    import torch.distributed as dist

    from megatron_dynatrain.transport.base import Deadline
    from megatron_dynatrain.transport.torch_p2p import TorchTransport

    sizes = [3, 0, 70001, 1, 0, 5, 9, 2]

    def message(sender: int, receiver: int, index: int) -> torch.Tensor:
        value = (17 * sender + 5 * receiver + index) % 251
        return torch.full((sizes[index],), value, dtype=torch.uint8)

    for max_ops in (1, 2, 5, 256):
        transport = TorchTransport(dist.group.WORLD, rank=context.rank, ranks=range(context.world), max_ops=max_ops)
        peers = [peer for peer in range(context.world) if peer != context.rank]
        count = {(a, b): (a + 2 * b) % len(sizes) for a in range(5) for b in range(5)}
        sends = {p: [message(context.rank, p, i) for i in range(count[context.rank, p])] for p in peers}
        receives = {p: [torch.zeros(sizes[i], dtype=torch.uint8) for i in range(count[p, context.rank])] for p in peers}
        transport.exchange(sends, receives, deadline=Deadline(15))
        for peer, found in receives.items():
            for i, tensor in enumerate(found):
                assert torch.equal(tensor, message(peer, context.rank, i)), (peer, i)
    return True


@pytest.mark.parametrize("world", [2, 3, 5])
def test_many_messages(ranks: RankPool, world: int) -> None:
    assert ranks.run(world, exchange_many, timeout=20.0) == [True] * world


def disagree(context: RankContext, spoiled: int) -> str:
    import torch.distributed as dist

    from megatron_dynatrain.errors import AgreementError
    from megatron_dynatrain.routing.windows import plan_rank
    from megatron_dynatrain.transport.base import Deadline
    from megatron_dynatrain.transport.torch_p2p import TorchTransport, agree_on_pairs
    from tests.routing.test_windows import without_first_send

    source, target = CASES["c24-b-ring-in-slices"].placements()
    plan = plan_rank(source, target, context.rank)
    if context.rank == spoiled:
        plan = without_first_send(plan)
    transport = TorchTransport(dist.group.WORLD, rank=context.rank, ranks=range(context.world))
    try:
        agree_on_pairs(plan, transport, deadline=Deadline(10))
    except AgreementError as error:
        return str(error)
    return "agreed"


def test_every_rank_hears_of_a_pair_that_disagrees(ranks: RankPool) -> None:
    texts = ranks.run(4, disagree, 2, timeout=20.0)
    assert len(set(texts)) == 1
    assert "ranks 2 and 3 don't agree" in texts[0]
    assert "rank 2 to rank 3; expected: 0 bytes in 0 moves" in texts[0]
    assert "got: 8388608 bytes in 1 moves" in texts[0]


def wait_for_a_silent_rank(context: RankContext, what: str) -> str:
    import torch
    import torch.distributed as dist

    from megatron_dynatrain.errors import DynaTrainError
    from megatron_dynatrain.routing.windows import plan_rank
    from megatron_dynatrain.transport.base import Deadline
    from megatron_dynatrain.transport.torch_p2p import TorchTransport, agree_on_pairs

    dist.barrier()
    if context.rank == 1:
        if what == "dies":
            os._exit(0)
        time.sleep(3)
        return "silent"
    transport = TorchTransport(dist.group.WORLD, rank=0, ranks=range(2))
    message = torch.zeros(2**25, dtype=torch.uint8)  # too long to be sent into the void
    began = time.monotonic()
    try:
        if what == "agrees":
            agree_on_pairs(plan_rank(*CASES["tp2-to-pp2"].placements(), 0), transport, deadline=Deadline(1.0))
        elif what == "receives":
            transport.exchange({1: [message]}, {}, deadline=Deadline(1.0), label="window 3 of 7")
        else:
            transport.exchange({}, {1: [message]}, deadline=Deadline(1.0), label="window 3 of 7")
    except DynaTrainError as error:
        assert time.monotonic() - began < 5
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("sends", "DeadlineError", ("rank 0", "receiving from rank 1 took too long", "window 3 of 7", "destroy it")),
        ("receives", "DeadlineError", ("rank 0", "sending to rank 1 took too long", "window 3 of 7")),
        ("agrees", "DeadlineError", ("rank 0", "could not agree", "nothing has moved")),
        ("dies", "TransferError", ("rank 0", "receiving from rank 1 failed", "window 3 of 7")),
    ],
)
def test_a_peer_that_does_not_answer(ranks: RankPool, what: str, error: str, words: tuple[str, ...]) -> None:
    text = ranks.run(2, wait_for_a_silent_rank, what, timeout=30.0, may_die=(1,) if what == "dies" else ())[0]
    assert text.startswith(error)
    assert all(word in text for word in words), text


def strangers(context: RankContext) -> list[str]:
    import torch
    import torch.distributed as dist

    from megatron_dynatrain.errors import TransferError
    from megatron_dynatrain.transport.base import Deadline
    from megatron_dynatrain.transport.torch_p2p import TorchTransport

    transport = TorchTransport(dist.group.WORLD, rank=40 + context.rank, ranks=(40, 41))
    texts = []
    for peer in (7, 40 + context.rank):
        with pytest.raises(TransferError) as refusal:
            transport.exchange({peer: [torch.zeros(1, dtype=torch.uint8)]}, {}, deadline=Deadline(1))
        texts.append(str(refusal.value))
    return texts


def test_a_peer_outside_the_group_is_refused(ranks: RankPool) -> None:
    first, second = ranks.run(2, strangers, timeout=20.0)[1]
    assert "rank 7 is no peer" in first
    assert "(40, 41)" in first
    assert "rank 41 is no peer" in second
