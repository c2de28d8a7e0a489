"""Checkpoint files of every kind, for tests."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations

SHARDED = "model.safetensors.index.json"
KINDS = ["model.pt", "model.bin", "model.safetensors", SHARDED]


def plain_vocoder():
    """A stack of convolutions as in vocoders, whose published weights use weight norm."""
    return nn.Sequential(
        nn.Conv1d(4, 8, 7), nn.ConvTranspose1d(8, 6, 4, stride=2), nn.Conv1d(6, 1, 3)
    )


def vocoder(format):
    """The same network weight-normalized by torch, with changed parts."""
    normalize = {"hook": nn.utils.weight_norm, "parametrize": parametrizations.weight_norm}[format]
    torch.manual_seed(3)
    model = plain_vocoder()
    for i, layer in enumerate(model):
        normalize(layer, dim=int(i == 1))
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return model


def state_of(format):
    return {k: v.detach().clone() for k, v in vocoder(format).state_dict().items()}


def save(state, path):
    """Write a file of the kind that its name says; in pickles the state is ``generator``."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(state, path, {"format": "pt"})
    elif path.name.endswith(".index.json"):
        weight_map = {}
        for i in range(2):  # g and v in different shards
            name = f"model-0000{i + 1}-of-00002.safetensors"
            half = dict([*state.items()][i::2])
            save_file(half, path.parent / name)
            weight_map |= dict.fromkeys(half, name)
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        torch.save({"generator": state, "steps": 7}, path)
    return path


def read(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.name.endswith(".index.json"):
        weight_map = json.loads(path.read_text())["weight_map"]
        whole = {}
        for name in set(weight_map.values()):
            whole |= load_file(path.parent / name)
        assert set(whole) == set(weight_map)
        return whole
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["steps"] == 7
    return checkpoint["generator"]


def tree(folder):
    """Return the content of every file below a folder."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
