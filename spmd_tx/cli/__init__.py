"""The command line: reads options and calls the part of the program that does the work."""
