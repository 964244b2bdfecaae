"""Writes the pages and draws the figures that follow from the code.

The pages are docs/environment.md and docs/options.md; the figures are those of docs/figures.py.
With --check the script writes nothing: it compares, and exits with status 1 where a file is not up
to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from figures import FIGURES, PICTURES  # noqa: E402  the path comes first

from torch_rpc_ext._base.environment import VARIABLES  # noqa: E402

_NOTE = "<!-- Written by docs/generate.py from {source}: change that file, then run the script. -->"


def environment() -> str:
    """Return the text of environment.md."""
    variables = VARIABLES
    ours = [variable for variable in variables if variable.preset is None]
    presets = [variable for variable in variables if variable.preset is not None]
    return "\n".join(
        [
            _NOTE.format(source="torch_rpc_ext/_base/environment.py"),
            "",
            "# Environment variables",
            "",
            "## Read",
            "",
            *_table(
                ("variable", "values", "meaning"),
                ((f"`{v.name}`", v.values, v.meaning) for v in ours),
            ),
            "",
            "## Set",
            "",
            "UCX reads these while its libraries are loaded. They are set just before that, and "
            "only where you have not set them. Processes that are started later inherit them.",
            "",
            *_table(
                ("variable", "set to", "values", "meaning"),
                ((f"`{v.name}`", f"`{v.preset}`", v.values, v.meaning) for v in presets),
            ),
            "",
            "All other `UCX_*` variables are UCX's own. One that you set wins over the option of "
            "`UcxRpcBackendOptions` that stands for the same thing.",
            "",
            "`python -m torch_rpc_ext info` shows which of all these are in force.",
            "",
        ]
    )


def options() -> str:
    """Return the text of options.md."""
    from torch_rpc_ext.options import OPTIONS, public

    return "\n".join(
        [
            _NOTE.format(source="torch_rpc_ext/options.py"),
            "",
            "# Options",
            "",
            "Keywords of `torch_rpc_ext.UcxRpcBackendOptions`. Each is checked where it is given: "
            "a wrong type raises `TypeError`, a wrong value `ValueError`, an unknown keyword "
            "`TypeError`. What depends on the host or the group (a secret and its file, names in "
            "the allow-list, an interface) is checked by `init_rpc`. All can be set later as "
            "attributes, with the same checks; an unknown attribute raises `AttributeError`.",
            "",
            *_table(
                ("option", "default", "meaning"),
                (_row(option) for name, option in OPTIONS.items() if name in public()),
            ),
            "",
            "## For tests only",
            "",
            "They inject faults.",
            "",
            *_table(
                ("keyword", "default", "meaning"),
                (_row(option) for name, option in OPTIONS.items() if name not in public()),
            ),
            "",
        ]
    )


def _row(option: Any) -> tuple[str, ...]:
    about = option.metadata["about"]
    shown = about.default or f"`{option.default!r}` {about.unit}".rstrip()
    return (f"`{option.name}`", shown, about.doc)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


FILES: dict[str, Callable[[], str]] = {
    "docs/environment.md": environment,
    "docs/options.md": options,
    **{f"docs/design/{name}.svg": figure.svg for name, figure in FIGURES.items()},
    **{f"tutorials/pictures/{name}.svg": picture.svg for name, picture in PICTURES.items()},
}


def stale() -> list[str]:
    """Return the names of the files that are not what the code says."""
    wrong = []
    for name, text in FILES.items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text():
            wrong.append(name)
    return wrong


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the files that are made from the code.")
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        wrong = stale()
        for name in wrong:
            print(f"{name} is not up to date: run `python docs/generate.py`", file=sys.stderr)
        return 1 if wrong else 0
    for name, text in FILES.items():
        (ROOT / name).write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
