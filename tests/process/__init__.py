"""Our own tests through real processes: what a user of the back end sees."""
