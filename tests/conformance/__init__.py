"""A suite for weight normalizations of PyTorch layers: every layer × every feature.

``python -m conformance`` runs it; docs/conformance.md says how to run it on one of your own.
"""
