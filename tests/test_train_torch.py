"""The trainer on torch modules: the same options, and all stages equal bit for bit."""

from __future__ import annotations

import functools

import models
import numpy as np
import pytest

import collectives as cc
from collectives.array import native
from collectives.train import SGD, AdamW, LossScale, Trainer, WarmUp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

MODES = [(0, None), (1, None), (2, None), (3, None), (3, "node")]
NODES = {1: [0], 2: [0, 1], 3: [0, 0, 1], 4: [0, 0, 1, 1], 5: [0, 0, 1, 1, 1]}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(torch.nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width, bias=bias)
        self.up = torch.nn.Linear(width, 2 * width, bias=bias)
        self.down = torch.nn.Linear(2 * width, width, bias=bias)

    def forward(self, x):
        return x + self.down(torch.nn.functional.relu(self.up(self.norm(x)), inplace=True))


class Net(torch.nn.Module):
    """An embedding that is tied to the last layer, a parameter of its own, a frozen one, a buffer,
    and blocks that may be checkpointed.
    """

    def __init__(self, checkpointing=None, width=24, blocks=3, bias=True):
        super().__init__()
        self.embed = torch.nn.Embedding(40, width)
        self.place = torch.nn.Parameter(torch.randn(6, width) * 0.1)
        self.blocks = torch.nn.ModuleList(Block(width, bias) for _ in range(blocks))
        self.fixed = torch.nn.Linear(width, width)
        self.fixed.requires_grad_(False)
        self.out = torch.nn.Linear(width, 40, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(width))
        self.checkpointing = checkpointing

    def forward(self, tokens):
        x = self.embed(tokens) + self.place + self.shift.to(self.place.dtype)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                reentrant = self.checkpointing == "reentrant"
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        return self.out(self.fixed(x))


def loss(net, batch):
    tokens, target = batch
    return torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), target.flatten())


@functools.cache
def data(step, size=12):
    random = np.random.default_rng(step)
    tokens = torch.from_numpy(random.integers(0, 40, (size, 7)))
    return tokens[:, :-1], tokens[:, 1:]


def make(comm, mode=(0, None), net=None, **more):
    torch.manual_seed(comm.rank)  # the ranks begin differently, and become like rank 0
    net = net or Net(more.pop("checkpointing", None))
    settings = {"bucket_bytes": 9000, "first_bucket_bytes": 2000, **more}
    optimizer = settings.pop("optimizer", AdamW(lr=1e-2))
    return Trainer(
        net, optimizer, comm, loss=loss, sharding=mode[0], shard_group=mode[1], **settings
    )


SEEDED = {}


def train(comm, mode, steps, *, size=12, small=False, checkpointing=None, **more):
    """Losses, gradient norms and what was skipped; and the bits of parameters as they are kept, of
    the optimizer's state, and of all that this rank's forward uses.
    """
    trainer = make(comm, mode, net=seeded(checkpointing, small), **more)
    told = []
    for step in range(steps):
        metrics = trainer.step(models.part_of_tensors(data(step, size), comm.rank, comm.size))
        told.append((metrics.loss, metrics.grad_norm, metrics.skipped))
    found = {key: models.bits(trainer.whole(key)) for key in ("master", *trainer.slots)}
    with trainer.gathered() as net:
        found["used"] = models.bits({k: native(v) for k, v in net.state_dict().items()})
    return told, found


def seeded(checkpointing=None, small=False):
    """The same module again; made once, since ranks that are threads share torch's generator.

    small  for long trainings: ranks that are threads have one GIL, under which each parameter and
           bucket takes time, whatever its size
    """
    sizes = {"blocks": 1, "bias": False} if small else {}
    if small not in SEEDED:
        torch.manual_seed(5)
        SEEDED[small] = Net(**sizes).state_dict()
    net = Net(checkpointing, **sizes)
    net.load_state_dict(SEEDED[small])
    return net


def same_in_all_modes(n, steps, modes=MODES, **more):
    seeded(small=more.get("small", False))

    def body(comm):
        return [train(comm, mode, steps, **more) for mode in modes]

    found = cc.run_threads(n, body, nodes=NODES[n], timeout=60)
    first = found[0][0]
    for rank, results in enumerate(found):
        for mode, (told, bits) in zip(modes, results, strict=True):
            assert told == first[0], (rank, mode)
            assert bits == first[1], (rank, mode)
    return first


@pytest.mark.parametrize(
    ("n", "precision"),
    [*((n, p) for n in (2, 3, 4, 5) for p in (None, "bf16")), (2, "fp16"), (3, "fp16")],
)
def test_stages_are_equal_bit_for_bit(n, precision):
    """100 steps with accumulation and clipping, on parts that are uneven at every world size."""
    more = {"loss_scale": LossScale(scale=2.0**24, interval=20)} if precision == "fp16" else {}
    more |= {"precision": precision, "accumulate": 2, "clip_norm": 0.4, "size": 13, "small": True}
    told, _ = same_in_all_modes(n, 100, **more)
    norms = [norm for _, norm, skipped in told if not skipped]
    assert sum(norm > 0.4 for norm in norms) > 50  # it did clip
    assert told[-1][0] < 0.9 * told[0][0]  # it did learn
    assert any(skipped for _, _, skipped in told) == (precision == "fp16")


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_activation_checkpointing(kind):
    """The same bits, under every stage, as without it."""
    plain = same_in_all_modes(2, 4, modes=[(0, None)])
    assert same_in_all_modes(2, 4, checkpointing=kind) == plain


def test_as_torch_alone():
    """Three ranks with uneven parts against a torch optimizer on the global batch."""
    net = seeded()
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01
    )
    losses = []
    for step in range(10):
        value = loss(net, data(step))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.4)
        optimizer.step()
        losses.append(float(value.detach()))

    def body(comm):
        trainer = make(comm, (2, None), net=seeded(), clip_norm=0.4, accumulate=2)
        cut = [0, 5, 9, 12]
        told = []
        for step in range(10):
            part = tuple(t[cut[comm.rank] : cut[comm.rank + 1]] for t in data(step))
            told.append(trainer.step(part).loss)
        return told, trainer.parameters()

    for told, parameters in cc.run_threads(3, body, timeout=60):
        assert told == pytest.approx(losses, rel=1e-5)
        for name, p in net.named_parameters():
            if p.requires_grad:
                exact = p.detach().numpy()
                error = np.linalg.norm(parameters[name] - exact)
                assert error <= 2e-5 * np.linalg.norm(exact), name


def test_rank_0_gives_parameters_frozen_ones_and_buffers():
    def body(comm):
        torch.manual_seed(comm.rank)
        net = Net()
        trainer = make(comm, (comm.size - 1, None), net=net)
        with trainer.gathered() as whole:
            state = {k: v.clone() for k, v in whole.state_dict().items()}
        return {k: v.numpy().tobytes() for k, v in state.items()}

    found = cc.run_threads(4, body, timeout=60)
    assert all(f == found[0] for f in found)


def test_stage_3_frees_what_it_does_not_need():
    """Between steps the module holds no parameters; in a step only some at a time."""

    def body(comm):
        net = Net(width=64, blocks=8)
        trainer = make(comm, (3, None), net=net, bucket_bytes=1 << 15)
        trainer.step(models.part_of_tensors(data(0), comm.rank, comm.size))
        with pytest.raises(RuntimeError):
            net(data(0)[0].float() @ torch.ones(3))  # not in a step
        held = sum(flat.untyped_storage().nbytes() for flat, *_ in trainer._model._flat.values())
        whole = sum(x.nbytes for x in trainer.parameters().values())
        trainer.step(models.part_of_tensors(data(1), comm.rank, comm.size))
        return held, trainer._gatherer.peak / whole

    for held, peak in cc.run_threads(2, body, timeout=60):
        assert held == 0
        assert peak < 0.5


def test_a_module_that_is_used_twice_and_a_branch_that_is_not():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(30, 30)
            self.b = torch.nn.Linear(30, 30)
            self.never = torch.nn.Linear(3, 3)

        def forward(self, x):
            return {"out": (self.a(self.b(self.a(x))), x)}

    def twice(net, batch):
        return net(batch)["out"][0].square().mean()

    torch.manual_seed(0)
    state = Twice().state_dict()

    def body(comm):
        results = []
        for stage in (0, 1, 2, 3):
            net = Twice()
            net.load_state_dict(state)
            trainer = Trainer(
                net, SGD(lr=0.1, weight_decay=0.1), comm, loss=twice, sharding=stage,
                find_unused=True, bucket_bytes=1, first_bucket_bytes=1,
            )  # fmt: skip
            for step in range(3):
                x = np.random.default_rng([step, comm.rank]).normal(size=(4, 30))
                trainer.step(torch.from_numpy(x.astype(np.float32)))
            results.append(models.bits(trainer.parameters()))
        return results

    for results in cc.run_threads(3, body, timeout=60):
        assert all(r == results[0] for r in results)
        assert results[0]["never.bias"] == state["never.bias"].numpy().tobytes()


def test_gradients_that_are_not_finite():
    def body(comm):
        trainer = make(comm, (2, None), net=seeded())
        tokens, target = models.part_of_tensors(data(0), comm.rank, comm.size)

        def spoil(grad):
            return grad * float("nan") if comm.rank == 1 else grad

        trainer._model._tensors["place"].register_hook(spoil)
        with pytest.raises(cc.CollectiveError) as told:
            trainer.step((tokens, target))
        return str(told.value)

    seeded()
    for words in cc.run_threads(2, body, timeout=60):
        assert "'place' (rank 1)" in words and "embed" not in words


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("AdamW", {"lr": 1e-2}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("RMSprop", {"lr": 1e-3})],
)
def test_optimizers_of_torch(kind, settings):
    """Under every stage as torch alone, with a group of its own for the biases."""

    def groups(net):
        named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        return [
            {"params": [p for n, p in named if "bias" not in n]},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.1},
        ]

    net = seeded()
    optimizer = getattr(torch.optim, kind)(groups(net), **settings)
    for step in range(5):
        optimizer.zero_grad()
        loss(net, data(step)).backward()
        optimizer.step()
    wanted = {n: p.detach().numpy() for n, p in net.named_parameters() if p.requires_grad}

    def body(comm):
        for mode in MODES:
            mine = seeded()
            theirs = getattr(torch.optim, kind)(groups(mine), **settings)
            trainer = make(comm, mode, net=mine, optimizer=theirs)
            for step in range(5):
                trainer.step(models.part_of_tensors(data(step), comm.rank, comm.size))
            for name, x in trainer.parameters().items():
                error = np.linalg.norm(x - wanted[name])
                assert error <= 1e-4 * np.linalg.norm(wanted[name]), (mode, name)

    cc.run_threads(3, body, nodes=NODES[3], timeout=60)


@pytest.mark.parametrize("mode", [(0, None), (2, None), (3, "node")])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("AdamW", {"lr": 1e-2, "amsgrad": True}),
        ("Adam", {"lr": torch.tensor(1e-2)}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("NAdam", {"lr": 1e-3}),
    ],
)
def test_resumed_runs_with_optimizers_of_torch(kind, settings, mode, tmp_path):
    """Bit for bit, also the schedule, or a rate that is a tensor; on other ranks, in stage 1, as
    far as torch rounds alike.
    """
    pytest.importorskip("safetensors")

    def fresh(comm, mode, seed):
        net = seeded()
        with torch.no_grad():
            net.place.add_(seed)
        optimizer = getattr(torch.optim, kind)(
            [p for p in net.parameters() if p.requires_grad], **settings
        )
        schedule = None if torch.is_tensor(settings["lr"]) else WarmUp(5)
        return make(comm, mode, net=net, optimizer=optimizer, schedule=schedule)

    def run(trainer, steps):
        comm = trainer.comm
        for step in steps:
            trainer.step(models.part_of_tensors(data(step), comm.rank, comm.size))
        return trainer.parameters()

    def unbroken(comm):
        trainer = fresh(comm, mode, 0.0)
        run(trainer, range(4))
        trainer.save(tmp_path / "run")
        return run(trainer, range(4, 8))

    def resumed(comm, mode):
        trainer = fresh(comm, mode, 1.0)
        trainer.load(tmp_path / "run")
        return run(trainer, range(4, 8))

    seeded()
    wanted = cc.run_threads(3, unbroken, nodes=NODES[3], timeout=60)
    same = cc.run_threads(3, lambda c: resumed(c, mode), nodes=NODES[3], timeout=60)
    assert [models.bits(x) for x in same] == [models.bits(x) for x in wanted]
    for found in cc.run_threads(2, lambda c: resumed(c, (1, None)), timeout=60):
        for name, x in found.items():
            np.testing.assert_allclose(x, wanted[0][name], rtol=1e-3, atol=2e-5)


def test_the_schedule_of_an_optimizer_of_torch():
    """The last factor of a warm-up is 1, and holds from then on."""

    def body(comm):
        net = seeded()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        trainer = make(comm, net=net, optimizer=optimizer, schedule=WarmUp(2))
        rates = []
        for step in range(4):
            told = trainer.step(data(step)).lr
            rates.append(optimizer.param_groups[0]["lr"])
            assert told == rates[-1]
        return rates

    seeded()
    wanted = [0.1 * WarmUp(2)(step) for step in range(4)]
    assert wanted[-1] == 0.1 != wanted[0]
    assert cc.run_threads(1, body, timeout=20) == [wanted]


def test_settings_of_an_optimizer_of_torch_that_numpy_calculated():
    """They are compared by what they are."""

    def body(comm):
        net = seeded()
        rate = np.float64(0.1) if comm.rank else 0.1
        make(comm, net=net, optimizer=torch.optim.SGD(net.parameters(), lr=rate))

    cc.run_threads(2, body, timeout=20)


def test_optimizers_of_torch_that_cannot_be_in_a_checkpoint(tmp_path):
    pytest.importorskip("safetensors")

    def body(comm):
        net = seeded()
        optimizer = torch.optim.Adafactor([p for p in net.parameters() if p.requires_grad])
        trainer = make(comm, net=net, optimizer=optimizer)
        trainer.step(data(0))
        with pytest.raises(cc.CollectiveError, match=r"Adafactor keeps '\w+' of "):
            trainer.save(tmp_path / "run")

    seeded()
    cc.run_threads(2, body, timeout=20)
    assert not (tmp_path / "run" / "checkpoint.json").exists()


def test_optimizers_of_torch_that_cannot_be_sharded():
    def body(comm, stage):
        net = seeded()
        optimizer = torch.optim.Adafactor([p for p in net.parameters() if p.requires_grad])
        trainer = make(comm, (stage, None), net=net, optimizer=optimizer)
        before = trainer.step(data(0)).loss
        return all(trainer.step(data(0)).loss < before for _ in range(3))

    assert cc.run_threads(2, body, 0, timeout=60) == [True, True]
    with pytest.raises(cc.UnsupportedError, match="Adafactor looks at whole parameters"):
        cc.run_threads(2, body, 1, timeout=60)
    with pytest.raises(ValueError, match="does not hold parameter"):
        net = seeded()
        optimizer = torch.optim.SGD([net.place], lr=1.0)
        cc.run_threads(1, lambda comm: make(comm, net=net, optimizer=optimizer))


def test_what_a_module_needs():
    with pytest.raises(TypeError, match="a torch module needs loss="):
        cc.run_threads(1, lambda comm: Trainer(torch.nn.Linear(2, 2), SGD(lr=1), comm))
