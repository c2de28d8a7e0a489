"""pytest plugin: the kernels for accelerators run on CPU tensors, in Triton's interpreter.

Needs TRITON_INTERPRET=1 before triton is imported, so the tests run in a process of their own,
which test_triton.py starts.
"""

from weightnorm._kernels import triton


def pytest_configure(config):
    # The interpreter computes with numpy, which warns of what a GPU does silently.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
    triton._LIBRARY.impl("compose", triton._launch_compose, "CPU")
    triton._LIBRARY.impl("compose_backward", triton._launch_backward, "CPU")
