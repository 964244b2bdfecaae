"""Groups under load while workers are killed, stopped, delayed, restarted and cut off at random."""
