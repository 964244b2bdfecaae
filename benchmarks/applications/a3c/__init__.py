"""A3C: actors play, and send their gradients to the learner of the global network."""
