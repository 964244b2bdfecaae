"""The picture of a profile, where calls reach beyond the time that was profiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_rpc_ext.profiler.clocks import Clock, Sample
from torch_rpc_ext.profiler.records import Call, Recording

MS = 1_000_000


@pytest.mark.filterwarnings("error")
def test_names_stay_within_the_picture(tmp_path: Path) -> None:
    """A name that was in the middle of its call lay far beside the picture, which then had no room
    for its axes."""
    pytest.importorskip("matplotlib")
    from torch_rpc_ext.profiler import picture

    times = {"before": (-9000, 10), "after": (40, 9000), "over": (-9000, 9000), "past": (600, 9000)}
    calls = [
        Call(number, 0, "sync", f"a.{name}", "worker1", begin * MS, end * MS, 0, "")
        for number, (name, (begin, end)) in enumerate(times.items(), start=1)
    ]
    recording = Recording("worker0", "host", 1, calls, [], 0, 0, b"", [], [])
    clock = Clock(Sample(0, 0, 0), Sample(500 * MS, 0, 0))
    figure = picture.draw({"worker0": recording}, {"worker0": clock}, 0, 500 * MS)
    figure.savefig(tmp_path / "picture.png")
    places = {text.get_text(): text.get_position()[0] for text in figure.axes[0].texts}
    assert places == {"after": 270, "over": 250}  # ms
