"""Upstream's own suites, from the torch wheel, on our back end."""
