"""The group: its members, how they meet in the store, who comes, leaves, dies and returns."""
