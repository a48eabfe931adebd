"""One coordinator process: checks the machine, builds the parts, serves, drains and ends."""
