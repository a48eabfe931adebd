"""What fits on the devices: sizes, measurements, the plan, and why a plan is refused."""
