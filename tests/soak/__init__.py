"""A long run without faults: every call must be right, and no process may grow."""
