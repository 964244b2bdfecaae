"""The commands of ``python -m torch_rpc_ext``."""
