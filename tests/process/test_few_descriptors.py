"""A process that may open few files: init_rpc says so, before UCX ends the process."""

from __future__ import annotations

import os
import resource

import pytest
from torch.distributed import rpc

from tests.process.group import Group
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("says what it likes")


def leave_free(count: int) -> None:
    """Limit this process to so many more file descriptors than it has."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, highest + 1 + count))


# Without the look UCX said "No resources are available", or ended the process, or failed later.
@pytest.mark.parametrize("free", [4, 12, 16])
def test_too_few_file_descriptors_are_named(free: int) -> None:
    with Group(2, init=False) as group:
        group[1].run(leave_free, free)
        calls = [worker.init(2) for worker in group]
        for call in calls:
            with pytest.raises(RuntimeError, match="init_rpc needs .* file descriptors.*ulimit -n"):
                call.result()
        assert not any(group.run_all(rpc.api._is_current_rpc_agent_set))
