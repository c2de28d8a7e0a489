import pytest
import torch

from weightnorm import normalized_weights, weight_norm_model
from weightnorm.lab.language import Transformer, rotate, rotations


def small(**options):
    torch.manual_seed(0)
    model = Transformer(**{"width": 12, "depth": 2, "heads": 2, "context": 16, **options})
    torch.nn.init.normal_(model.head.weight)
    return model


def test_size_of_the_cpu_preset():
    model = Transformer()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.87e6, rel=0.01)


def test_first_predictions_have_logits_of_std_1():
    torch.manual_seed(0)
    logits = Transformer(64, 2, 4, 32)(torch.randint(256, (8, 32), dtype=torch.uint8))
    assert 0.8 < logits.std().item() < 1.2


def test_predictions_depend_on_earlier_bytes_alone():
    model, text = small(), torch.randint(256, (3, 9), dtype=torch.uint8)
    changed = text.clone()
    changed[:, 5] += 1
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert ((before[:, 5:] - after[:, 5:]).abs().amax((0, 2)) > 1e-4).all()


def test_products_depend_on_the_difference_of_positions():
    angles = rotations(20, 6)
    q, k = torch.randn(6), torch.randn(6)
    products = rotate(q.expand(20, 6), angles) @ rotate(k.expand(20, 6), angles).T
    torch.testing.assert_close(products[3, 7], products[10, 14], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(q.expand(20, 6), angles).norm(dim=1), q.norm().expand(20))


def test_variance_of_the_residual_stream_is_bounded_in_depth():
    text = torch.randint(256, (4, 64), dtype=torch.uint8)
    model = Transformer(width=64, depth=12, heads=4, context=64)
    streams = []
    model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].std()))
    model(text)
    assert 0.8 < streams[0] < 1.7


def test_weight_norm_finds_every_matrix():
    assert len(normalized_weights(weight_norm_model(small()))) == 2 * 6 + 1
