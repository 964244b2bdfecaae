"""Tests that need a GPU; each is skipped without one."""
