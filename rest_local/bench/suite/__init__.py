"""`bench suite`: every measurement of a report, each by its own command, with what is measured already kept."""
