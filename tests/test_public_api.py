"""Public names and signatures. A change here changes the library's interface."""

import inspect
import subprocess
import sys

import pytest

import weightnorm
from weightnorm.functional import Units

MEAN_ONLY = (
    "(num_features, momentum=0.1, bias=True, track_running_stats=True, *, group=None, "
    "device=None, dtype=None)"
)
PUBLIC = {
    "InitReport": "(layers)",
    "MeanOnlyBatchNorm1d": MEAN_ONLY,
    "MeanOnlyBatchNorm2d": MEAN_ONLY,
    "MeanOnlyBatchNorm3d": MEAN_ONLY,
    "Parameterization": None,
    "Parts": "(v, g)",
    "WeightNormOptimizer": (
        "(model, inner, params=None, *, lengths=None, others=None, where=None, dim='auto', "
        "g=None, scale='linear', train_g=True, retract=0.0, v_norm=None, project=True, "
        "normalize_update=False, weight_decay_on='auto', matrices=None, **options)"
    ),
    "convert_state_dict": "(state, to, *, weights=(), dim='infer')",
    "data_dependent_init": "(model, *batch, target_std=1.0, group=None, forward=None)",
    "diagnostics": None,
    "folded": "(model, *, include_torch=True)",
    "functional": None,
    "init_": "(module, fn, name='weight')",
    "is_weight_normed": "(module, name=None)",
    "mean_only_batch_norm": "(layer, momentum=0.1, *, group=None)",
    "normalized_weights": "(model)",
    "param_groups": "(model, *, v=None, g=None, others=None)",
    "parameterize": "(layer, how, *, group=None)",
    "parts": "(module, name='weight')",
    "remove_weight_norm": "(module, name=None, *, include_torch=True)",
    "robust_init": "(model, *, gain, residual=(), generator=None)",
    "unnormalized_weights": "(model)",
    "update_running_means": "(loader, model, device=None)",
    "weight_norm": (
        "(module, name=None, dim='auto', *, g=None, scale='linear', mask=None, train_g=True)"
    ),
    "weight_norm_model": (
        "(model, *, where=None, dim='auto', g=None, scale='linear', train_g=True)"
    ),
}

FUNCTIONAL = {
    "EPS": None,
    "Parts": "(v, g)",
    "Units": "(dim=0, groups=1)",
    "compose": f"(*, v, g, units={Units()}, mask=None)",
    "correct_torch_second_derivative": "(enabled=True)",
    "decompose": f"(w, units={Units()}, *, mask=None)",
    "fold": f"(*, v, g, units={Units()}, mask=None, eps=1e-12)",
    "gradients": f"(grad_w, *, v, g, units={Units()})",
    "norm": f"(v, units={Units()})",
    "project": f"(x, w, units={Units()})",
    "row_norm_low_rank": "(W, A, B, s=1.0)",
    "use_triton": "(enabled=True)",
}

DIAGNOSTICS = {
    "Finding": "(kind, weights, advice, details=())",
    "TrainingMonitor": "(model, optimizer, log, *, every=100, prefix='')",
    "check": "(model, optimizer=None)",
    "effective_step": "(model)",
    "v_norms": "(model)",
}

MODULES = {
    weightnorm: PUBLIC,
    weightnorm.functional: FUNCTIONAL,
    weightnorm.diagnostics: DIAGNOSTICS,
}


def signature(thing):
    parameters = inspect.signature(thing).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_public_names_and_signatures(module):
    assert sorted(module.__all__) == sorted(MODULES[module])
    for name, expected in MODULES[module].items():
        thing = getattr(module, name)
        if expected is not None:
            assert thing.__doc__, name
            assert signature(thing) == expected, name


def test_import_needs_only_torch():
    """In a new interpreter, importing weightnorm after torch loads nothing else."""
    code = (
        "import sys, torch; before = set(sys.modules); import weightnorm; "
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) - sys.stdlib_module_names - {"torch"} == {"weightnorm"}
