"""Rules about the source: layers, types, format."""
