"""Tests of torch_rpc_ext, in folders by what they need; tests/README.md is the map."""
