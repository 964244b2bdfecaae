"""All that knows torch's private names: their table, the registry, hooks, payloads, exceptions."""
