"""Making wheels, and trying them where a user would: `make wheel`, `make wheel-test`."""
