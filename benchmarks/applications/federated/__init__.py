"""Federated learning: a server and clients that keep their data, over links of a network."""
