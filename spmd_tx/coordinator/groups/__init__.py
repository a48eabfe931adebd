"""Groups of workers beside each other: one mesh and one base model each, behind one address."""
