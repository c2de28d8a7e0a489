"""What the paper says about weight normalization, claim by claim, each a function that measures."""
