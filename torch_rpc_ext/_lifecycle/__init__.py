"""The life of a worker, from init_rpc to the end of its process."""
