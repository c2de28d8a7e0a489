"""Test any implementation of weight normalization in PyTorch: every layer type × every feature.

``python -m conformance`` runs it; docs/conformance.md describes how to test another one.
"""
