"""One worker's way from init_rpc to the end of its process."""
