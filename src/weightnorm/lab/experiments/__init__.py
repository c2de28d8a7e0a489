"""The paper's experiments, one file each. Seeding, timing and records are in `lab.runs`."""
