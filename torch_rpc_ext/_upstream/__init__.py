"""All code that uses private names of torch, and the table of these names (torch_names.py)."""
