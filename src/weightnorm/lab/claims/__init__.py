"""The paper's claims about weight normalization, each measured and given a verdict."""
