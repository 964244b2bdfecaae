"""The group: its members, how they meet in the store, and how they join, leave and return."""
