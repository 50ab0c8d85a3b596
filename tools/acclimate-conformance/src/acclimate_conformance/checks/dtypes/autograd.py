"""Checks of gradients beyond one operator: sums of several, hooks, saved tensors, other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import equal, is_host, refused, require, shares_memory
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.arithmetic import numbers


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.detach().cpu().float(), wanted.detach().cpu().float(), rtol=4e-3, atol=1e-4)


def _model(device: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4)]
    return torch.nn.Sequential(*layers).to(device)


@check(
    "current_device_name",
    promise="Gradients add up over backward() calls, flow through views and in-place changes, and to other "
    "devices.",
    of="operators",
)
def gradients_flow(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()

    def run(place: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}

        def leaf(*shape: int) -> torch.Tensor:
            return numbers(*shape).float().to(place).requires_grad_()

        def grad(of: torch.Tensor) -> torch.Tensor:
            return torch.zeros(()) if of.grad is None else of.grad

        x = leaf(5, 7)
        for factor in (1.0, 2.0, 3.0):
            (x * factor).square().sum().backward()
        found["three calls of backward()"] = grad(x)
        x = leaf(5, 7)
        y = x * 2
        y[1:3] = y[1:3] * 3
        y[:, ::2].mul_(x[:, ::2])
        y.square().sum().backward()
        found["writes to parts"] = grad(x)
        x = leaf(5, 7)
        parts = x.split((3, 4), 1)
        (parts[0].t().reshape(-1)[::2].sum() * 5 + parts[1].flip(0)[2].sum()).backward()
        found["views of views"] = grad(x)
        x = leaf(4)
        (x.expand(3, 4) * leaf(3, 4).detach() + x[None, :].expand(3, 4)).sum().backward()
        found["an expanded tensor"] = grad(x)
        x = leaf(3, 3)
        middle = x @ x
        middle.retain_grad()
        loss = middle.sigmoid().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found["a middle tensor, twice"], found["a leaf, twice"] = grad(middle), grad(x)
        x = leaf(3, 3)
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        first.square().sum().backward()
        found["a gradient of a gradient"] = grad(x)
        x = leaf(6)
        there = (x * 2).to("cpu").square()
        there.to(place).sum().backward()
        found["a copy to the host and back"] = grad(x)
        x = leaf(6)
        with torch.no_grad():
            x.mul_(2)
        (x * x.detach()).sum().backward()
        found["a leaf that was changed"] = grad(x)
        x, w = leaf(5, 7), leaf(7)
        y = torch.where(x > 0, x * w, x.exp())
        y.masked_fill_(x > 1, 2.0)
        y.sum().backward()
        found["where and masked_fill_"], found["a row of weights"] = grad(x), grad(w)
        x = leaf(5, 7).detach().to(torch.float32).requires_grad_()
        torch.cat([x, x.t().reshape(5, 7)], 1).square().sum().backward()
        found["cat of a tensor and itself"] = grad(x)
        model = _model(place)
        for _ in range(2):
            model(numbers(3, 6).float().to(place)).square().mean().backward()
        for name, parameter in model.named_parameters():
            found[f"a parameter of a model, {name}"] = grad(parameter)
        return found

    wanted = run("cpu")
    for name, gradient in run(device).items():
        require(_close(gradient, wanted[name]), f"the gradient of {name} is wrong on {device}")
        require(
            gradient.device.type == accelerator.device_type, f"the gradient of {name} is on {gradient.device}"
        )


@check(
    "current_device_name",
    promise="Hooks of tensors and modules are called with gradients, in torch's order, and may replace them.",
    of="operators",
)
def hooks_are_called(accelerator: Accelerator) -> None:
    def run(place: str) -> list[Any]:
        seen: list[Any] = []
        model = _model(place)
        x = numbers(3, 6).float().to(place).requires_grad_()
        x.register_hook(lambda g: seen.append(("input", g.detach().cpu())))
        weight = model[0].get_parameter("weight")
        weight.register_hook(lambda g: g * 2)
        weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(("accumulated", p.grad.detach().cpu()))
        )
        model[0].register_forward_pre_hook(lambda m, a: seen.append(("before", a[0].detach().cpu())))
        model[1].register_forward_hook(lambda m, a, out: out * 0.5)

        def seen_backward(module: Any, inward: Any, outward: Any) -> None:
            seen.append(("backward", inward[0].detach().cpu(), outward[0].cpu()))

        model[2].register_full_backward_hook(seen_backward)
        handle = x.register_hook(lambda g: seen.append(("removed", g)))
        handle.remove()
        result = model(x)
        result.grad_fn.register_prehook(lambda g: seen.append(("node", g[0].cpu())))
        result.sum().backward()
        return [*seen, ("gradient", None if x.grad is None else x.grad.cpu())]

    wanted, found = run("cpu"), run(accelerator.current_device_name())
    order = [step[0] for step in found]
    require(order == [step[0] for step in wanted], f"hooks are called in the order {order}")
    for actual, expected in zip(found, wanted, strict=True):
        for ours, theirs in zip(actual[1:], expected[1:], strict=True):
            require(_close(ours, theirs), f'a hook sees another gradient at "{actual[0]}"')


@check(
    "current_device_name",
    "pin_memory",
    promise="Tensors that are saved for backward() are kept, moved and checked as torch says.",
    of="operators",
)
def saved_tensors_are_kept(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    inputs = numbers(3, 6).float().to(device)

    def gradients() -> list[torch.Tensor]:
        model = _model(device)
        model(inputs).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    for pinned in (False, True):
        if pinned and is_host(accelerator):
            continue
        try:
            with torch.autograd.graph.save_on_cpu(pin_memory=pinned, device_type=accelerator.device_type):
                found = gradients()
        except NotImplementedError:
            continue  # it has no pinned memory
        for ours, theirs in zip(found, plain, strict=True):
            require(_close(ours, theirs), f"save_on_cpu(pin_memory={pinned}) changes a gradient")
    kinds: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kinds.append(tensor.device.type)
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t * 1):
        found = gradients()
    require(len(kinds) > 2, f"saved_tensors_hooks see {len(kinds)} tensors of a model")
    require(set(kinds) == {accelerator.device_type}, f"saved tensors are on {', '.join(sorted(set(kinds)))}")
    for ours, theirs in zip(found, plain, strict=True):
        require(_close(ours, theirs), "saved_tensors_hooks that copy tensors change a gradient")
    changes: dict[str, Callable[[torch.Tensor], object]] = {
        "add_": lambda t: t.add_(1),
        "zero_": lambda t: t.zero_(),
        "copy_": lambda t: t.copy_(inputs[0]),
        "copy_ from the host": lambda t: t.copy_(torch.ones(6)),
        "a non-blocking copy_ from the host": lambda t: t.copy_(torch.ones(6), non_blocking=True),
        "copy_ of another dtype": lambda t: t.copy_(torch.arange(6)),
        "mul_ of lists": lambda t: torch._foreach_mul_([t, t[:2]], 2.0),
        "an index_put_": lambda t: t.index_put_((torch.tensor([1], device=t.device),), inputs[0][:1]),
        "normal_": lambda t: t.normal_(),
        "an assignment to a column": lambda t: t.view(2, 3)[:, 1].fill_(4),
        "masked_fill_": lambda t: t.masked_fill_(t > 1, 0.0),
        "relu_": torch.relu_,
        "a write to a part": lambda t: t[1:2].fill_(3),
        "mul_ of a view": lambda t: t.view(2, 3).mul_(2),
        "an index": lambda t: t.__setitem__(0, 1.0),
        "out=": lambda t: torch.add(inputs[0], 1, out=t),
    }
    for name, change in changes.items():
        leaf = torch.ones(6, device=device, requires_grad=True)
        saved = torch.full((6,), 2.0, device=device)
        product = (leaf * saved).sum()
        with torch.no_grad():
            change(saved)
        with refused(f"backward() after {name} has changed a tensor that it needs", RuntimeError):
            product.backward()
    kept = torch.ones(6, device=device, requires_grad=True)
    result = kept.exp().sum()
    result.backward()
    with refused("a second backward() without retain_graph", RuntimeError):
        result.backward()
    with refused("an in-place change of a leaf that requires gradients", RuntimeError):
        kept.add_(1)
    with torch.inference_mode():
        inference = torch.ones(3, device=device)
    require(inference.is_inference(), "a tensor that is made in inference_mode() is no inference tensor")
    with refused("saving an inference tensor for backward()", RuntimeError):
        (kept[:3] * inference).sum().backward()
    with torch.no_grad():
        require(not (kept * 2).requires_grad, "within no_grad() a result requires gradients")
        with torch.enable_grad():
            require((kept * 2).requires_grad, "within enable_grad() a result requires no gradients")
    detached = kept.detach()
    require(not detached.requires_grad, "detach() keeps requires_grad")
    require(shares_memory(detached, kept), "detach() copies")
    require(equal(detached, torch.ones(6)), "detach() changes numbers")


@check(
    "current_device_name",
    promise="torch.func computes on the device: vmap, jvp, vjp, Jacobians, Hessians.",
    once=True,
    of="operators",
)
def functions_are_transformed(accelerator: Accelerator) -> str | None:
    device = accelerator.current_device_name()
    func = torch.func

    def computed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w) * x.sum(-1, keepdim=True)).softmax(-1)

    def total(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return computed(x, w).square().sum()

    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "vmap": func.vmap(computed, (0, None)),
        "grad": func.grad(total, (0, 1)),
        "gradients of samples": lambda x, w: func.vmap(func.grad(total, 1), (0, None))(x[:, None], w),
        "vjp": lambda x, w: func.vjp(computed, x, w)[1](torch.ones_like(x[:, :3])),
        "jvp": lambda x, w: func.jvp(computed, (x, w), (torch.ones_like(x), torch.ones_like(w) / 2)),
        "jacrev": lambda x, w: func.jacrev(computed)(x[0:1], w),
        "jacfwd": lambda x, w: func.jacfwd(computed)(x[0:1], w),
        "hessian": lambda x, w: func.hessian(total)(x[0:1], w),
    }
    x, w = numbers(5, 4).float() / 2, numbers(4, 3, seed=1).float() / 2
    lacking = []
    for name, call in calls.items():
        wanted = call(x, w)
        try:
            found = call(x.to(device), w.to(device))
        except NotImplementedError:
            lacking.append(name)
            continue
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else ((found, wanted),)
        for ours, theirs in pairs:
            require(ours.shape == theirs.shape, f"{name} gives shape {tuple(ours.shape)}")
            require(_close(ours, theirs), f"{name} of torch.func gives other numbers on {device}")
    return f"it has no {', '.join(lacking)} of torch.func" if lacking else None
