"""What everything else stands on: version, environment variables, checks of options."""
