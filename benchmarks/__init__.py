"""Benchmarks: back ends side by side, in one run, taking turns.

``python -m benchmarks`` measures; ``python -m benchmarks --help`` says what can be chosen.

- backends/: one file a kind of back end, behind interface.py.
- cases/: what is measured, one file a kind of case; each case names the floor it must hold.
- processes.py, group.py: the worker processes; runner.py: rounds and turns;
  results.py: medians and ratios; report.py: table and JSON lines.
"""
