"""Calls: remote functions, calls to several workers, attempts, the call that is being served."""
