"""Deadlines."""

from __future__ import annotations

from datetime import timedelta

import pytest

from megatron_dynatrain.errors import DeadlineError
from megatron_dynatrain.transport.base import Deadline


def test_a_deadline_passes_once() -> None:
    now = [100.0]
    deadline = Deadline(5, clock=lambda: now[0])
    assert deadline.remaining() == 5
    deadline.check("transfer", "window 1")
    now[0] = 104.5
    assert deadline.wait_limit() == timedelta(seconds=0.5)
    assert not deadline.passed()
    now[0] = 104.9995
    assert deadline.passed()
    now[0] = 105.0
    # 0 would be no limit at all for torch.distributed.
    assert deadline.wait_limit() == timedelta(milliseconds=1)
    with pytest.raises(DeadlineError, match=r"rank 3, phase transfer.*window 1.*within 5 s"):
        deadline.check("transfer", "window 1", rank=3)
