"""The cases of upstream's suites that we do not run: the only list, each with a reason that a
maintainer would accept."""

from __future__ import annotations

# "Suite.test_case" as in torch.testing._internal.distributed.rpc_utils -> reason.
SKIPS: dict[str, str] = {}
