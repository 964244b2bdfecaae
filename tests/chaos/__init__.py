"""Groups under load while workers are killed, stopped, delayed, restarted, cut off at random."""
