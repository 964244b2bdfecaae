"""Building, finding and loading UCX and the C++."""
