"""Time, side by side with peers. Measured, never asserted in a test."""
