"""The applications of the paper "PyTorch RPC" (MLSys 2023): ``python -m benchmarks.applications``.

Each has a folder: model.py computes, with_rpc.py, with_grpc.py and with_pipelining.py communicate,
application.py says what is run. interface.py: what an application is; runner.py: processes and
turns; lines.py: counts lines of communication; report.py: table, page and plots from what was
stored.
"""

from __future__ import annotations

from benchmarks.applications.a3c.application import A3c
from benchmarks.applications.dlrm.application import Dlrm
from benchmarks.applications.federated.application import Federated
from benchmarks.applications.gpt.application import Gpt
from benchmarks.applications.interface import Application

APPLICATIONS: dict[str, Application] = {
    one.name: one for one in (A3c(), Federated(), Gpt(), Dlrm())
}
