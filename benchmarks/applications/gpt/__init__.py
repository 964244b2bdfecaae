"""GPT: a decoder whose layers are on several workers, plainly or as a pipeline."""
