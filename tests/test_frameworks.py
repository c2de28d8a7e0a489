"""Training, resuming, folding and the traps of docs/frameworks.md, in the real packages."""

import copy
import dataclasses
from collections import OrderedDict
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from frameworks import IGNORED_WARNINGS, need
from weightnorm import (
    WeightNormOptimizer,
    data_dependent_init,
    folded,
    normalized_weights,
    remove_weight_norm,
    unnormalized_weights,
    weight_norm,
    weight_norm_model,
)
from weightnorm.diagnostics import TrainingMonitor, check

pytestmark = [
    pytest.mark.xdist_group("transformers"),  # slow to import: on one worker
    pytest.mark.filterwarnings(*IGNORED_WARNINGS),
]

both_forms = pytest.mark.parametrize("form", ["module", "optimizer"])
DECAY_OF_AVERAGE = 0.5


def examples():
    torch.manual_seed(5)
    return torch.randn(64, 8), torch.randint(3, (64,))


def batches(**options):
    return DataLoader(TensorDataset(*examples()), batch_size=16, **options)


def network(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    if form == "module":
        weight_norm_model(model)
    return model


def optimizer_of(model, form, inner=torch.optim.Adam, **options):
    if form == "optimizer":
        return WeightNormOptimizer(model, inner, lr=0.01, **options)
    return inner(model.parameters(), lr=0.01, **options)


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY_OF_AVERAGE))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def loss_of(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


# ---- Lightning


@pytest.fixture
def lightning():
    need("lightning")
    import lightning

    return lightning


def lightning_module(form):
    from lightning import LightningModule

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network(form)

        def training_step(self, batch, _):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            optimizer = optimizer_of(self, form)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    module = Classifier()
    data_dependent_init(module.net, examples()[0])
    return module


def fit(lightning, module, epochs, folder, checkpoint=None, callbacks=(), **options):
    saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[*callbacks, saves],
        accelerator="cpu",
        logger=False,
        gradient_clip_val=0.5,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, batches(), ckpt_path=checkpoint)


@both_forms
def test_lightning_resumes_bit_for_bit_with_its_average(lightning, form, tmp_path):
    def run(epochs, name, checkpoint=None):
        module = lightning_module(form)
        average = lightning.pytorch.callbacks.EMAWeightAveraging(decay=DECAY_OF_AVERAGE)
        fit(lightning, module, epochs, tmp_path / name, checkpoint, [average])
        return module

    whole = run(3, "whole")
    run(2, "half")
    resumed = run(3, "resumed", tmp_path / "half" / "last.ckpt")
    assert same(resumed.state_dict(), whole.state_dict())
    saved = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=True)
    assert same(saved["state_dict"], whole.state_dict())  # the average
    assert not same(saved["current_model_state"], whole.state_dict())
    output = whole.net(examples()[0])
    assert not normalized_weights(remove_weight_norm(whole))
    torch.testing.assert_close(whole.net(examples()[0]), output)


@pytest.mark.parametrize(
    ("form", "precision"),
    [("module", "bf16-mixed"), ("optimizer", "bf16-true"), ("module", "64-true")],
)
def test_lightning_trains_in_other_precisions(lightning, form, precision, tmp_path):
    module = lightning_module(form)
    before = loss_of(module.net, examples())
    fit(lightning, module, 3, tmp_path, precision=precision, accumulate_grad_batches=2)
    assert loss_of(module.net.float(), examples()) < before - 0.01


# ---- accelerate


@both_forms
def test_accelerate_resumes_bit_for_bit_with_its_average(form, tmp_path):
    need("accelerate")
    from accelerate import Accelerator

    def build():
        accelerator, model = Accelerator(cpu=True), network(form)
        data_dependent_init(model, examples()[0])
        average = averaged(model)
        accelerator.register_for_checkpointing(average)
        loader = batches(shuffle=True)
        prepared = accelerator.prepare(model, optimizer_of(model, form), loader)
        return accelerator, average, *prepared

    def train(accelerator, average, model, optimizer, data):
        for batch in data:
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))

    whole = accelerator, average, model, optimizer, _ = build()
    train(*whole)
    accelerator.save_state(tmp_path / "state")
    train(*whole)
    resumed = build()
    resumed[0].load_state(tmp_path / "state")
    train(*resumed)
    assert same(resumed[2].state_dict(), model.state_dict())
    assert same(resumed[1].state_dict(), average.state_dict())

    assert check(model, optimizer) == []
    if form == "module":
        logged = []
        with TrainingMonitor(model, optimizer, lambda *row: logged.append(row), every=4):
            train(*whole)
        assert "0.weight/v_norm" in {tag for tag, *_ in logged}
    with folded(average.module):
        accelerator.save_model(average.module, tmp_path / "published")
    from safetensors.torch import load_file

    plain = network("plain")
    plain.load_state_dict(load_file(tmp_path / "published" / "model.safetensors"))
    x = examples()[0]
    torch.testing.assert_close(plain(x), average.module(x))


@torch.no_grad()
def test_accelerate_offloads_normalized_layers(tmp_path):
    need("accelerate")
    from accelerate import cpu_offload, disk_offload, load_checkpoint_and_dispatch

    model, x, cpu = network("module"), examples()[0], torch.device("cpu")
    expected = model(x)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        empty = network("module")
    offloaded = [
        cpu_offload(copy.deepcopy(model), execution_device=cpu),
        disk_offload(copy.deepcopy(model), str(tmp_path), execution_device=cpu),
        load_checkpoint_and_dispatch(empty, str(tmp_path / "model.pt"), device_map={"": "cpu"}),
    ]
    for other in offloaded:
        assert torch.equal(other(x), expected)
    assert [p.is_meta for p in offloaded[0].parameters()] == [True] * 6


# ---- transformers

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


@pytest.fixture
def transformers():
    need("transformers")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def classifier(transformers, form):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=3, max_position_embeddings=8)
    model = transformers.BertForSequenceClassification(config)
    if form == "module":
        weight_norm_model(model)
    return model


def trainer_of(transformers, model, folder, optimizer, **options):
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=8,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    torch.manual_seed(3)
    ids = torch.randint(20, (24, 4))
    data = [{"input_ids": row, "labels": int(row[0]) % 3} for row in ids]
    return transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))


@both_forms
def test_trainer_resumes_bit_for_bit(transformers, form, tmp_path):
    need("accelerate")

    def run(checkpoint=None):
        model = classifier(transformers, form)
        data_dependent_init(model, torch.randint(20, (24, 4)))
        optimizer = optimizer_of(model, form, torch.optim.AdamW, weight_decay=0.0)
        fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        renamed = {"gradient_checkpointing", "activation_checkpointing"} & fields
        options = {"gradient_accumulation_steps": 2, min(renamed): True, "bf16": True}
        trainer = trainer_of(transformers, model, tmp_path, optimizer, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return model

    whole = run()
    assert same(run(tmp_path / "checkpoint-2").state_dict(), whole.state_dict())
    trained = zip(whole.parameters(), classifier(transformers, form).parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in trained)


def test_from_pretrained_needs_the_keys_of_its_class(transformers, tmp_path):
    kind, ids = transformers.BertForSequenceClassification, torch.randint(20, (2, 4))
    model = classifier(transformers, "module").eval()
    expected = model(ids).logits

    def published(name):
        model.save_pretrained(tmp_path / name)
        loaded, report = kind.from_pretrained(tmp_path / name, output_loading_info=True)
        return len(report["missing_keys"]), torch.allclose(loaded.eval()(ids).logits, expected)

    assert published("normalized") == (8, False)
    with folded(model):
        assert published("folded") == (0, True)
    remove_weight_norm(model, include_torch=False)
    assert published("removed") == (0, True)


def test_class_that_normalizes_itself(transformers, tmp_path):
    class Model(transformers.PreTrainedModel):
        config_class = transformers.PreTrainedConfig
        options: ClassVar[dict] = {}

        def __init__(self, config):
            super().__init__(config)
            self.net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            weight_norm_model(self.net, **self.options)
            self.post_init()

        def forward(self, x):
            return self.net(x)

    x = torch.randn(4, 2)
    for Model.options in ({}, {"scale": "log"}):
        model = Model(transformers.PreTrainedConfig())
        model.save_pretrained(tmp_path)
        loaded, report = Model.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        assert torch.equal(loaded(x), model(x))
    Model.options = {"g": 1.0}
    with pytest.raises(ValueError, match="on the meta device, where g would lose its values"):
        Model.from_pretrained(tmp_path)


def test_tied_embeddings_cannot_be_saved_normalized(transformers, tmp_path):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(20, (2, 4))
    tied = weight_norm_model(copy.deepcopy(model))
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {*normalized_weights(tied)}
    with pytest.raises(RuntimeError, match="shared tensors"):
        tied.save_pretrained(tmp_path)

    def where(name, module):
        return isinstance(module, nn.Linear) and name != "lm_head.weight"

    weight_norm_model(model, where=where)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "checkpoint")
    model.tie_weights()
    with folded(model):
        model.save_pretrained(tmp_path / "published")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "published").eval()
    torch.testing.assert_close(loaded(ids).logits, expected)


def test_transformers_conv1d_is_normalized_along_axis_1(transformers):
    from transformers.pytorch_utils import Conv1D

    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, tie_word_embeddings=False
    )
    model = weight_norm_model(transformers.GPT2LMHeadModel(config))
    assert list(normalized_weights(model)) == ["lm_head.weight"]
    left_out = "transformer.h.0.attn.c_attn.weight"
    assert left_out in unnormalized_weights(model)
    weight_norm_model(model, where=lambda _, m: isinstance(m, Conv1D), dim=1)
    assert normalized_weights(model)[left_out].g.shape == (1, 24)


# ---- timm

TIMM_SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}


def test_timm_optimizer_decays_g():
    need("timm")
    from timm.optim import create_optimizer_v2, param_groups_weight_decay

    model = network("module")
    names = [n for n, _ in model.named_parameters() if "parametrizations" in n]
    default = create_optimizer_v2(model, opt="adamw", weight_decay=0.1)
    (finding,) = check(model, default)
    assert finding.weights == ("0.weight", "2.weight")
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=names)
    assert check(model, create_optimizer_v2(groups, opt="adamw")) == []
    plain = network("optimizer")
    groups = param_groups_weight_decay(plain, 0.1)
    optimizer = WeightNormOptimizer(plain, torch.optim.AdamW, groups, weight_decay_on="w")
    assert check(plain, optimizer) == []
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1]


@both_forms
def test_timm_resumes_bit_for_bit_with_its_average(form, tmp_path):
    need("timm")
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    x, y = torch.randn(9, 3, 8, 8), torch.randint(4, (9,))

    def build():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **TIMM_SIZES)
        if form == "module":
            weight_norm_model(model)
        data_dependent_init(model, x)

        def lamb(params):
            return create_optimizer_v2(params, opt="lamb", lr=0.01)

        optimizer = WeightNormOptimizer(model, lamb) if form == "optimizer" else lamb(model)
        return model, optimizer, ModelEmaV3(model, decay=DECAY_OF_AVERAGE)

    def train(model, optimizer, average):
        for _ in range(2):
            loss_of(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)

    whole, resumed = build(), build()
    train(*whole)
    torch.save([part.state_dict() for part in whole], tmp_path / "checkpoint.pt")
    train(*whole)
    for part, state in zip(resumed, torch.load(tmp_path / "checkpoint.pt"), strict=True):
        part.load_state_dict(state)
    train(*resumed)
    assert same(resumed[0].state_dict(), whole[0].state_dict())
    assert same(resumed[2].state_dict(), whole[2].state_dict())


# ---- peft


@pytest.fixture
def peft():
    need("peft")
    import peft

    return peft


def layers(form):
    """The network with names: peft finds layers by the end of their names."""
    names = ("body", "activation", "head")
    return nn.Sequential(OrderedDict(zip(names, network(form), strict=True)))


def with_trained_adapters(peft, model, config):
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


ADAPTERS = {
    "LoRA": lambda peft: peft.LoraConfig(r=2),
    "rsLoRA": lambda peft: peft.LoraConfig(r=2, use_rslora=True),
    "DoRA": lambda peft: peft.LoraConfig(r=2, use_dora=True),
    "LoHa": lambda peft: peft.LoHaConfig(r=2, init_weights=False),
    "LoKr": lambda peft: peft.LoKrConfig(r=2, init_weights=False),
    "(IA)³": lambda peft: peft.IA3Config(feedforward_modules=[]),
    "OFT": lambda peft: peft.OFTConfig(r=0, oft_block_size=4),
    "VeRA": lambda peft: peft.VeraConfig(r=2),
}


@torch.no_grad()
@pytest.mark.parametrize("method", ADAPTERS)
def test_merging_loses_the_adapter_unless_weight_norm_is_removed_first(peft, method):
    config = ADAPTERS[method](peft)
    config.target_modules = {"body"}
    x, base = examples()[0], layers("module").eval()
    without = base(x)
    model = with_trained_adapters(peft, base, config)
    expected = model(x)
    assert not torch.allclose(expected, without, atol=0.01)
    lost = copy.deepcopy(model).merge_and_unload()
    safe = copy.deepcopy(model).merge_and_unload(safe_merge=True)
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    for other in (lost, safe, merged):
        assert not torch.allclose(other(x), expected, atol=0.01)
    remove_weight_norm(model)
    torch.testing.assert_close(model.merge_and_unload()(x), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_change_the_weight_need_a_plain_one(peft, init):
    x, base = examples()[0], layers("module").eval()
    expected = base(x)
    config = peft.LoraConfig(r=2, target_modules=["body"], init_lora_weights=init)
    wrong = peft.get_peft_model(copy.deepcopy(base), config).eval()
    assert not torch.allclose(wrong(x), expected, atol=0.1)
    remove_weight_norm(base)
    torch.testing.assert_close(peft.get_peft_model(base, config)(x), expected)


def test_normalized_head_in_modules_to_save(peft, tmp_path):
    x, base = examples()[0], layers("plain")
    weight_norm(base.head)
    config = peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"])
    model = with_trained_adapters(peft, copy.deepcopy(base), config)
    expected = model(x)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(loaded(x), expected)
    with folded(loaded):
        torch.testing.assert_close(loaded(x), expected)
    assert len(normalized_weights(loaded)) == 2  # the original and the trained head
    remove_weight_norm(loaded)
    torch.testing.assert_close(loaded.merge_and_unload()(x), expected)

    again = peft.get_peft_model(layers("optimizer"), config)
    optimizer = WeightNormOptimizer(
        again, torch.optim.Adam, where=lambda name, _: ".head." in name, lr=0.01
    )
    assert list(optimizer.parts()) == ["base_model.model.head.modules_to_save.default.weight"]
