"""DLRM: trainers look up rows of tables on a server, and send the rows' gradients back."""
