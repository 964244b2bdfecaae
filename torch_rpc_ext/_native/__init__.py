"""Building the C++, and finding and loading it and UCX."""
