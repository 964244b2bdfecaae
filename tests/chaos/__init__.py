"""Groups under load while workers are killed, stopped, delayed and restarted at random."""
