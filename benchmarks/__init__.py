"""Benchmarks: back ends side by side, in one run, taking turns.

``python -m benchmarks`` measures, ``compare REV`` does so with two revisions of this project,
``report FILE`` makes docs/benchmarks.md and the README's figures; ``--help`` says what can be
chosen.

- backends/: one file a kind of back end, behind interface.py.
- cases/: what is measured, one file a kind of case; each case names the targets it must reach.
- commands.py: the command line; trees.py: revisions to compare.
- processes.py, group.py: the worker processes; runner.py: rounds and turns.
- results.py: medians, ratios, targets; records.py: these as JSON lines; table.py, page.py,
  summary.py, plots.py: what people see of them, made from the records alone.
- applications/: whole programs, those of the paper; ``python -m benchmarks.applications``.
"""
