"""Benchmarks: back ends side by side, in one run, taking turns.

``python -m benchmarks`` measures, ``compare REV`` measures two revisions of this project, ``report
FILE`` writes docs/benchmarks.md and the README's figures; ``--help`` lists the options.

- backends/: one file for each back end, behind interface.py.
- cases/: what is measured, one file for each kind of case; a case names the targets to reach.
- commands.py: the command line; trees.py: the revisions to compare.
- processes.py, group.py: the worker processes; runner.py: rounds and turns.
- results.py: medians, ratios, targets; records.py: the same as JSON lines; table.py, page.py,
  summary.py, plots.py: text and pictures, made from the records alone.
- applications/: the applications of the paper; ``python -m benchmarks.applications``.
"""
