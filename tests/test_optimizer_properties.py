"""The optimizer form against its reference, through whatever may happen between two steps."""

import copy
import pickle

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from reference import WeightNormReference
from weightnorm import WeightNormOptimizer

INNER = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
OPTIONS = {
    "plain": {},
    "log": {"scale": "log"},
    "columns": {"dim": 1},
    "brake": {"retract": 0.5},
    "held": {"retract": 1.0, "train_g": False},
}
NAMES = ("0.weight", "1.weight")
name, inner, options = (st.sampled_from([*choice]) for choice in (NAMES, INNER, OPTIONS))


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()


def pair(inner, options):
    """(model, optimizer, the weights of a twin, its reference)."""
    model, twin, options = network(0), network(0), OPTIONS[options]
    arguments = {
        "kept": (options.get("dim", 0),),
        "log": "scale" in options,
        "train_g": options.get("train_g", True),
        "retract": options.get("retract", 0.0),
    }
    reference = WeightNormReference(dict(twin.named_parameters()), INNER[inner], **arguments)
    return model, WeightNormOptimizer(model, INNER[inner], **options), twin, reference


def set_gradients(model, twin, i, names=NAMES):
    """The gradients of a loss that changes from step to step."""
    for each in (model, twin):
        for key in names:
            p = each.get_parameter(key)
            p.grad = torch.cos(3 * twin.get_parameter(key).detach() + i)


class Training(RuleBasedStateMachine):
    @initialize(inner=inner, options=options)
    def build(self, inner, options):
        self.inner, self.options, self.count = inner, options, 0
        self.model, self.optimizer, self.twin, self.reference = pair(inner, options)

    @rule(names=st.sampled_from([NAMES, NAMES[:1], NAMES[1:]]))
    def step(self, names):
        self.count += 1
        set_gradients(self.model, self.twin, self.count, names)
        self.optimizer.step()
        self.reference.step()

    @rule(names=st.sampled_from([NAMES, NAMES[:1]]))
    def step_with_a_closure(self, names):
        self.count += 1
        set_gradients(self.model, self.twin, self.count, names)
        self.optimizer.step(lambda: None)
        self.reference.step()

    @rule(seed=st.integers(1, 3))
    def load_weights(self, seed):
        for each in (self.model, self.twin):
            each.load_state_dict(network(seed).state_dict())

    @rule(name=name)
    def replace_memory(self, name):
        for each in (self.model, self.twin):
            weight = each.get_parameter(name)
            weight.data = 2 * weight.data

    @rule()
    def swap_weights_and_read(self):
        """As an average of the weights does, evaluated between two steps."""
        before = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(network(4).state_dict())
        self.optimizer.parts()
        self.optimizer.state_dict()
        self.model.load_state_dict(before)

    @rule(name=name, by=st.sampled_from(["assignment", "clear", "pop", "del"]))
    def reset_state(self, name, by):
        state, weight = self.optimizer.state, self.model.get_parameter(name)
        if by == "assignment":
            state[weight] = {}
        elif by == "clear":
            state[weight].clear()
        elif by == "pop":
            state.pop(weight, None)
        elif weight in state:
            del state[weight]
        for part in (self.reference.v[name], self.reference.g[name]):
            self.reference.inner.state.pop(part, None)

    @rule(name=name, key=st.sampled_from(["exp_avg", "momentum_buffer"]))
    def write_state(self, name, key):
        state = self.optimizer.state.get(self.model.get_parameter(name), {})
        for part, mine in ((self.reference.v[name], key), (self.reference.g[name], f"g.{key}")):
            theirs = self.reference.inner.state.get(part, {})
            assert (state.get(mine) is None) == (theirs.get(key) is None)
            if theirs.get(key) is not None:
                theirs[key] = theirs[key] / 2
                state[mine] = state[mine] / 2

    @rule()
    def copy_or_pickle(self):
        both = self.model, self.optimizer
        self.model, self.optimizer = copy.deepcopy(both)
        self.model, self.optimizer = pickle.loads(pickle.dumps((self.model, self.optimizer)))

    @rule()
    def save_and_load(self):
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.model = network(5)
        self.optimizer = WeightNormOptimizer(self.model, INNER[self.inner], **OPTIONS[self.options])
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.reference.is_new = False
        self.reference.follow()

    @rule()
    def move_to_float32_and_back(self):
        for each in (self.model, self.twin):
            each.float().double()

    @invariant()
    def agrees_with_the_reference(self):
        if not hasattr(self, "optimizer"):
            return
        found = self.optimizer.parts()
        self.reference.follow()
        for name in NAMES:
            weight = self.model.get_parameter(name)
            near = {"rtol": 1e-6, "atol": 1e-9}
            torch.testing.assert_close(weight, self.twin.get_parameter(name), **near)
            torch.testing.assert_close(found[name].v, self.reference.v[name].detach(), **near)
            torch.testing.assert_close(found[name].g, self.reference.length(name), **near)


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


class CompiledTraining(Training):
    """The same with compiled steps among them."""

    @rule()
    def compiled_step(self):
        if self.inner == "adam":  # compiled, it counts steps in float32
            return
        self.count += 1
        set_gradients(self.model, self.twin, self.count)
        torch.compile(self.optimizer.step, backend="eager")()
        self.reference.step()


TestCompiledTraining = CompiledTraining.TestCase
TestCompiledTraining.settings = settings(max_examples=6, stateful_step_count=8, deadline=None)


def test_a_compiled_step_follows_memory_and_state():
    """Weights that are loaded, memory that is replaced, and state that is reset, between steps."""
    model, optimizer, twin, reference = pair("adam", "plain")
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    for i in range(8):
        set_gradients(model, twin, i)
        step()
        reference.step()
        if i == 2:
            for each in (model, twin):
                each.load_state_dict(network(1).state_dict())
        if i == 4:
            for each in (model, twin):
                each[0].weight.data = network(2)[0].weight.data
        if i == 6:
            optimizer.state[model[0].weight] = {}
            for part in (reference.v["0.weight"], reference.g["0.weight"]):
                del reference.inner.state[part]
    for key, value in twin.state_dict().items():  # a compiled Adam counts steps in float32
        torch.testing.assert_close(model.state_dict()[key], value, atol=1e-5, rtol=1e-4)
