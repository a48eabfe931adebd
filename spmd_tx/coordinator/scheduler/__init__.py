"""One generation of workers at work: lines move, commands go out, outcomes are stored."""
