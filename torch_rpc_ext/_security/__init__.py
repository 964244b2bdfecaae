"""What a peer may do here: the allow-list and what reads pickles by it, the group's secret."""
