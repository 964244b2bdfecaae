"""Nothing breaks, and nothing may grow."""
