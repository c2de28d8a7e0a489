"""Public names and signatures. A change here changes the library's interface."""

import inspect
import subprocess
import sys

import weightnorm

PUBLIC = {
    "InitReport": None,
    "MeanOnlyBatchNorm1d": None,
    "MeanOnlyBatchNorm2d": None,
    "MeanOnlyBatchNorm3d": None,
    "Parameterization": None,
    "Parts": None,
    "WeightNorm": None,
    "WeightNormOptimizer": None,
    "convert_state_dict": "(state, to, *, weights=(), dim='infer')",
    "data_dependent_init": "(model, *batch, target_std=1.0, group=None, forward=None)",
    "diagnostics": None,
    "folded": "(model, *, include_torch=True)",
    "functional": None,
    "init_": "(module, fn, name='weight')",
    "is_weight_normed": "(module, name=None)",
    "load_state_dict": "(model, state, strict=True)",
    "mean_only_batch_norm": "(layer, momentum=0.1, *, group=None)",
    "normalized_weights": "(model)",
    "parameterize": "(layer, how, *, group=None)",
    "parts": "(module, name='weight')",
    "remove_weight_norm": "(module, name=None, *, include_torch=True)",
    "robust_init": "(model, *, gain=None, residual=(), generator=None)",
    "unnormalized_weights": "(model)",
    "batched_weights": "(model)",
    "update_running_means": "(loader, model, device=None)",
    "weight_norm": (
        "(module, name=None, dim='auto', *, g=None, scale='linear', mask=None, eps=1e-12, "
        "train_g=True)"
    ),
    "weight_norm_model": (
        "(model, *, where=None, dim='auto', g=None, scale='linear', eps=1e-12, train_g=True)"
    ),
}


def signature(thing):
    parameters = inspect.signature(thing).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


def test_public_names_and_signatures():
    assert sorted(weightnorm.__all__) == sorted(PUBLIC)
    for name, expected in PUBLIC.items():
        thing = getattr(weightnorm, name)
        assert thing.__doc__, name
        if inspect.isfunction(thing):
            assert signature(thing) == expected, name


def test_import_needs_only_torch():
    """In a new interpreter, importing weightnorm loads only what importing torch loads."""
    code = "import sys; import {}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    loaded = [
        set(
            subprocess.run(
                [sys.executable, "-W", "error", "-c", code.format(package)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
        )
        for package in ("torch", "weightnorm")
    ]
    assert loaded[1] - loaded[0] - set(sys.stdlib_module_names) == {"weightnorm"}
