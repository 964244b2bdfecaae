"""What everything else stands on: version, environment variables, the table of options."""
