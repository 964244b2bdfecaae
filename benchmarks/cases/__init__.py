"""The cases, by name, in the order of the table."""

from __future__ import annotations

from benchmarks.cases import (
    autograd,
    calls,
    cuda_calls,
    cuda_many,
    cuda_model,
    fans,
    floods,
    hosts,
    mixed,
    paper,
    remote_functions,
    rrefs,
    startup,
    threads,
)
from benchmarks.cases.interface import Case

CASES: dict[str, Case] = {
    case.name: case
    for family in (
        calls,
        floods,
        threads,
        mixed,
        fans,
        remote_functions,
        rrefs,
        autograd,
        startup,
        hosts,
        paper,
        cuda_calls,
        cuda_many,
        cuda_model,
    )
    for case in family.CASES
}
