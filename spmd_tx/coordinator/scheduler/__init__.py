"""Runs the requests on one generation of workers: moves lines on, sends commands, stores outcomes."""
