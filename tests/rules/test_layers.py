"""The layer rule: #include lines of csrc/ point to the same or a lower rank, and foreign headers
stay where they belong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.backend import ROOT

CSRC = ROOT / "csrc"
RANKS = {
    "base": 0,
    "wire": 1,
    "metrics": 1,
    "memory": 2,
    "cuda": 2,
    "crypto": 1,
    "transport": 3,
    "compat": 3,  # how torch is made inside; beside the transport, which may not include it
    "agent": 4,
    "bindings": 5,
}
#: Headers by their beginning -> the folders of csrc that may include them.
ONLY_IN = {
    "ucp/": ("transport/ucx",),
    "uct/": ("transport/ucx",),
    "ucs/": ("transport/ucx",),
    "uct.h": ("transport/ucx",),
    "openssl/": ("crypto",),
    # Nowhere: the package builds without CUDA; csrc/cuda declares what it uses of the driver.
    "cuda.h": (),
    "cuda_runtime": (),
    "torch/csrc/distributed/rpc/": ("compat", "agent", "bindings"),
    "torch/csrc/distributed/autograd/": ("compat", "agent", "bindings"),
    "Python.h": ("compat", "agent", "bindings"),
    "pybind11/": ("compat", "agent", "bindings"),
    "torch/python.h": ("compat", "agent", "bindings"),
    "torch/extension.h": ("compat", "agent", "bindings"),
}
#: The transport moves opaque bytes: it can be tested without torch and without our wire format.
NOT_IN_TRANSPORT = ("torch/", "ATen/", "c10/", "wire/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def sources(root: Path = CSRC) -> list[Path]:
    return sorted(path for kind in ("*.h", "*.cpp", "*.cc", "*.cu") for path in root.rglob(kind))


def includes(source: Path) -> list[str]:
    return INCLUDE.findall(source.read_text())


def broken_rules(source: str, included: str) -> list[str]:
    """What is wrong with one #include line; both paths as seen from csrc/."""
    wrong = []
    layer, target = source.split("/")[0], included.split("/")[0]
    if "/" not in source:
        return [f"{source} is in no layer"]
    if layer not in RANKS:
        return [f"{source}: {layer}/ has no rank"]
    if ".." in included.split("/"):
        wrong.append(f"{source} includes {included}: write the path from csrc/")
    if target in RANKS and "/" in included:
        if RANKS[target] > RANKS[layer]:
            wrong.append(
                f"{source} (rank {RANKS[layer]}) includes {included} (rank {RANKS[target]})"
            )
        if RANKS[target] == RANKS[layer] and target != layer:
            wrong.append(f"{source} includes {included}: a neighbour of the same rank")
    for beginning, places in ONLY_IN.items():
        if included.startswith(beginning) and not any(
            source.startswith(place + "/") for place in places
        ):
            allowed = ", ".join(places) or "no folder"
            wrong.append(f"{source} includes {included}: only in {allowed}")
    if layer == "transport" and included.startswith(NOT_IN_TRANSPORT):
        wrong.append(f"{source} includes {included}: the transport moves opaque bytes")
    if (
        source.startswith("transport/")
        and source.count("/") > 1
        and included.startswith("transport/")
    ):
        own = source.split("/")[1]
        if included.count("/") > 1 and included.split("/")[1] != own:
            wrong.append(f"{source} includes {included}: transports do not know each other")
    return wrong


def test_includes_point_downwards() -> None:
    found = sources()
    assert len(found) > 10, f"no sources under {CSRC}"
    wrong = [
        text
        for source in found
        for included in includes(source)
        for text in broken_rules(str(source.relative_to(CSRC)), included)
    ]
    assert not wrong, "\n".join(wrong)


def test_quoted_includes_are_there() -> None:
    missing = [
        f"{source.relative_to(CSRC)}: {name}"
        for source in sources()
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', source.read_text(), re.MULTILINE)
        if not (CSRC / name).exists() and not (source.parent / name).exists()
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("source", "included"),
    [
        ("base/error.h", "wire/limits.h"),
        ("wire/frame.h", "metrics/counter.h"),
        ("wire/frame.h", "agent/codec.h"),
        ("transport/transport.h", "wire/limits.h"),
        ("transport/loopback/pair.cpp", "ucp/api/ucp.h"),
        ("transport/loopback/pair.cpp", "transport/ucx/worker.h"),
        ("transport/ucx/worker.h", "ATen/ATen.h"),
        ("agent/agent.cpp", "ucp/api/ucp.h"),
        ("memory/pool.h", "torch/csrc/distributed/rpc/message.h"),
        ("agent/agent.cpp", "cuda.h"),
        ("cuda/driver.cpp", "cuda.h"),
        ("cuda/driver.cpp", "memory/buffer_cache.h"),
        ("agent/agent.cpp", "../base/error.h"),
        ("odds/ends.h", "base/error.h"),
    ],
)
def test_the_rule_would_notice(source: str, included: str) -> None:
    assert broken_rules(source, included)


@pytest.mark.parametrize(
    ("source", "included"),
    [
        ("agent/agent.cpp", "transport/transport.h"),
        ("transport/ucx/worker.cpp", "ucp/api/ucp.h"),
        ("transport/fault/faulty.h", "transport/transport.h"),
        ("bindings/module.cpp", "pybind11/pybind11.h"),
        ("wire/frame.cpp", "wire/limits.h"),
        ("base/error.cpp", "string"),
    ],
)
def test_the_rule_allows(source: str, included: str) -> None:
    assert not broken_rules(source, included)
