"""Checkpoints of architectures whose published weights use weight norm.

The models are built, normalized, saved and loaded by their own public classes and by torch; only
the conversion is this library's. Random weights, no network.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import weightnorm
from weightnorm import (
    convert_state_dict,
    folded,
    is_weight_normed,
    normalized_weights,
    remove_weight_norm,
)
from weightnorm.checkpoints import FORMATS
from weightnorm.lab.cli import main

pytestmark = [
    pytest.mark.xdist_group("transformers"),  # slow to import: on one worker
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@dataclass(frozen=True)
class Architecture:
    kind: type[transformers.PreTrainedModel]
    config: transformers.PreTrainedConfig
    inputs: Callable[[], Tensor]
    output: Callable[..., Tensor]
    expects: str = "parametrize"
    """The format that ``from_pretrained`` expects, given by how the class builds itself."""
    dim: int = 0
    """The kept axis."""


WAVE = {"upsample_rates": (2, 2), "upsample_kernel_sizes": (4, 4), "upsample_initial_channel": 16}
BLOCKS = {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 3),)}
ARCHITECTURES = {
    "wav2vec2": Architecture(
        transformers.Wav2Vec2Model,
        transformers.Wav2Vec2Config(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
        ),
        lambda: torch.randn(2, 400),
        lambda model, x: model(x).last_hidden_state,
        dim=2,
    ),
    "encodec": Architecture(
        transformers.EncodecModel,
        transformers.EncodecConfig(
            hidden_size=8, num_filters=4, upsampling_ratios=(2, 2), codebook_size=16
        ),
        lambda: torch.randn(2, 1, 64),
        lambda model, x: model(x, bandwidth=24.0).audio_values,
    ),
    "dac": Architecture(
        transformers.DacModel,
        transformers.DacConfig(
            encoder_hidden_size=4, downsampling_ratios=(2, 2), decoder_hidden_size=16,
            n_codebooks=2, codebook_size=16, codebook_dim=4,
        ),
        lambda: torch.randn(2, 1, 64),
        lambda model, x: model(x).audio_values,
        expects="folded",
    ),
    "hifi-gan": Architecture(
        transformers.SpeechT5HifiGan,
        transformers.SpeechT5HifiGanConfig(model_in_dim=8, **WAVE, **BLOCKS),
        lambda: torch.randn(2, 9, 8),
        lambda model, x: model(x),
        expects="folded",
    ),
    "vits": Architecture(
        transformers.VitsModel,
        transformers.VitsConfig(
            hidden_size=8, num_hidden_layers=1, ffn_dim=8, flow_size=8, spectrogram_bins=9,
            num_speakers=2, speaker_embedding_size=4, prior_encoder_num_flows=1,
            prior_encoder_num_wavenet_layers=2, posterior_encoder_num_wavenet_layers=2,
            duration_predictor_num_flows=1, duration_predictor_filter_channels=8, **WAVE, **BLOCKS,
        ),
        lambda: torch.randint(0, 38, (2, 7)),
        lambda model, x: model(x, speaker_id=1).waveform,
    ),
}  # fmt: skip
IMPLEMENTATIONS = {
    "parametrize": parametrizations.weight_norm,
    "hook": nn.utils.weight_norm,
    "folded": lambda layer, *_, **__: layer,
    "ours": weightnorm.weight_norm,
}
TRANSPOSED = ("encodec", "dac", "hifi-gan")
"""Architectures with normalized transposed convolutions: torch keeps their input channels."""
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def built(name: str, implementation: str) -> transformers.PreTrainedModel:
    """Build the model with this implementation wherever its class applies weight norm.

    g is moved away from ‖v‖, as training does; in float64, so that no codebook entry changes.
    """
    with mock.patch.object(parametrizations, "weight_norm", IMPLEMENTATIONS[implementation]):
        model = ARCHITECTURES[name].kind(ARCHITECTURES[name].config)
        if hasattr(model, "apply_weight_norm"):
            model.apply_weight_norm()
    model.double().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def output_of(name: str, model: nn.Module) -> Tensor:
    """The output for a fixed input, with fixed noise."""
    torch.manual_seed(1)
    x = ARCHITECTURES[name].inputs()
    with torch.no_grad():
        return ARCHITECTURES[name].output(model, x.double() if x.is_floating_point() else x)


@cache
def names_of(name: str) -> tuple[str, ...]:
    return tuple(normalized_weights(built(name, "parametrize")))


@pytest.mark.parametrize("saved", IMPLEMENTATIONS)
@every_architecture
def test_every_checkpoint_loads_into_a_normalized_model(name, saved):
    """Folded, where torch keeps the input channels of transposed convolutions."""
    source, target = built(name, saved), built(name, "ours")
    expected, state = output_of(name, source), source.state_dict()
    assert not torch.equal(output_of(name, target), expected)
    if saved in ("parametrize", "hook") and name in TRANSPOSED:
        with pytest.raises(RuntimeError, match="its units lie along another axis"):
            target.load_state_dict(state)
        state = convert_state_dict(state, "folded")
    target.load_state_dict(state)
    torch.testing.assert_close(output_of(name, target), expected)


@every_architecture
def test_converted_state_dict_has_the_keys_of_the_target(name):
    options = {"weights": names_of(name), "dim": ARCHITECTURES[name].dim}
    for start, to in permutations(FORMATS, 2):
        source, target = built(name, start), built(name, to)
        state = source.state_dict()
        there = convert_state_dict(state, to, **options)
        target.load_state_dict(there, strict=True)
        torch.testing.assert_close(output_of(name, target), output_of(name, source))
        if to != "folded":
            back = convert_state_dict(there, start, **options)
            assert back.keys() == state.keys()
            assert all(torch.equal(back[key], state[key]) for key in back)


FILES = (
    ("folded", "model.safetensors"),
    ("hook", "model.safetensors.index.json"),
    ("parametrize", "pytorch_model.bin"),
)


@pytest.mark.parametrize(
    ("name", "start", "file"),
    [(name, *FILES[i % 3]) for i, name in enumerate(ARCHITECTURES)] + [("wav2vec2", *FILES[1])],
)
def test_converted_files_load_by_from_pretrained(tmp_path, name, start, file):
    """With the class's own loader, which must report no missing and no unexpected keys."""
    this, source, out = ARCHITECTURES[name], built(name, start), tmp_path / "out"
    source.save_pretrained(tmp_path, max_shard_size="2KB" if "index" in file else "1GB")
    if file.endswith(".bin"):
        torch.save(source.state_dict(), tmp_path / file)
    source.config.save_pretrained(out)
    command = ["convert", str(tmp_path / file), str(out / file), "--to", this.expects]
    if start == "folded":
        command += ["--weights", *names_of(name), "--dim", str(this.dim)]
    assert main(command) == 0
    model, report = this.kind.from_pretrained(out, output_loading_info=True, local_files_only=True)
    assert not any(report.values()), report
    torch.testing.assert_close(output_of(name, model.eval()), output_of(name, source))


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*zip(ARCHITECTURES, 2 * ["parametrize", "hook"] + ["hook"], strict=True)],
)
def test_removal_equals_removal_by_torch(name, implementation):
    torch.manual_seed(0)
    model = built(name, implementation)
    expected = output_of(name, model)
    torch.manual_seed(0)
    theirs = built(name, implementation)
    for layer in filter(is_weight_normed, [*theirs.modules()]):
        if implementation == "hook":
            nn.utils.remove_weight_norm(layer)
        else:
            parametrize.remove_parametrizations(layer, "weight")
    with folded(model):
        torch.testing.assert_close(output_of(name, model), expected)
        assert set(model.state_dict()) == set(theirs.state_dict())
    assert remove_weight_norm(model) is model
    assert not normalized_weights(model)
    torch.testing.assert_close(dict(model.state_dict()), dict(theirs.state_dict()))
    torch.testing.assert_close(output_of(name, model), expected)


def test_document_lists_the_architectures():
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    rows = re.findall(r"\| `(\w+)` \| (\d) \| `(\w+)` \|", page)
    assert rows == [(a.kind.__name__, str(a.dim), a.expects) for a in ARCHITECTURES.values()]
