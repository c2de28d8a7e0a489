"""pytest plugin: the kernels for accelerators run on CPU tensors, in Triton's interpreter.

Needs TRITON_INTERPRET=1 before triton is imported, so the tests run in a process of their own,
which test_triton.py starts.
"""

from weightnorm._kernels import triton, triton_step


def pytest_configure(config):
    # The interpreter computes with numpy, which warns of what a GPU does silently.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
    both = {
        "compose": (triton._compose_by_operations, triton._launch_compose),
        "compose_backward": (triton._backward_by_operations, triton._launch_backward),
        **triton_step.IMPLEMENTATIONS,
    }
    for name, (operations, launch) in both.items():
        triton._LIBRARY.impl(name, triton.or_operations(launch, operations), "CPU")
