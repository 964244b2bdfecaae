"""What a peer may do: the allow-list, the reader of pickles that obeys it, the group's secret."""
