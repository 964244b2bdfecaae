"""What the tests share: starting processes, choosing the back end."""
