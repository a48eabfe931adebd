"""Plans device memory: sizes, measurements, the plan, and the reasons when nothing fits."""
