from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acclimate import get_accelerator

acc = get_accelerator()


def small_llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def both(net: nn.Module, *inputs: torch.Tensor) -> None:
    """Outputs and all gradients are the host's."""
    results = []
    for device in ("cpu", "sim"):
        module = copy.deepcopy(net).to(device)
        leaves = [value.clone().to(device).requires_grad_() for value in inputs]
        output = module(*leaves)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        results.append([output, *(leaf.grad for leaf in (*leaves, *module.parameters()))])
    for host, device in zip(*results, strict=True):
        assert device.device.type == "sim"
        torch.testing.assert_close(device.cpu(), host)


@pytest.mark.parametrize(
    "net",
    [
        nn.LSTM(5, 7, 2, bidirectional=True),
        nn.LSTM(5, 7, bias=False, proj_size=3),
        nn.GRU(5, 7, 2, batch_first=True),
        nn.GRU(5, 7, bias=False),
        nn.RNN(5, 7),
        nn.MultiheadAttention(5, 1),
        nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0),
    ],
    ids=lambda net: type(net).__name__,
)
def test_recurrent_and_attention_layers_train_as_on_the_host(net: nn.Module) -> None:
    value = torch.randn(6, 3, 5)
    both(net, *([value] * 3 if isinstance(net, nn.MultiheadAttention) else [value]))


def test_packed_sequences_keep_their_batch_sizes_on_the_host() -> None:
    net, value = nn.LSTM(5, 7), torch.randn(6, 3, 5)
    results = []
    for device in ("cpu", "sim"):
        packed = nn.utils.rnn.pack_padded_sequence(value.to(device), [6, 4, 2])
        assert packed.batch_sizes.device.type == "cpu"
        output, _ = net.to(device)(packed)
        results.append(nn.utils.rnn.pad_packed_sequence(output)[0].cpu())
    torch.testing.assert_close(results[0], results[1])


def test_convolutional_nets_train_as_on_the_host() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 2, 2, bias=False),
    )
    both(net, torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_hosts(causal: bool) -> None:
    query = torch.randn(1, 2, 4, 8)
    expected = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
    moved = query.to("sim").requires_grad_()
    found = nn.functional.scaled_dot_product_attention(moved, moved, moved, is_causal=causal)
    assert found.cpu().equal(expected)
    found.sum().backward()


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_adamw_steps_as_on_the_host(how: dict[str, bool]) -> None:
    torch.manual_seed(0)
    host = nn.Linear(4, 4)
    device = copy.deepcopy(host).to("sim")
    for net, where in ((host, "cpu"), (device, "sim")):
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2, **how)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 4, device=where)).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(device.weight.cpu(), host.weight)


def test_autocast_follows_cudas_rules() -> None:
    layer, value = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
    with acc.amp.autocast(dtype=torch.bfloat16):
        low = layer(value)
        assert low.dtype == torch.bfloat16
        assert low.softmax(-1).dtype == low.sum().dtype == torch.float32
        assert nn.functional.layer_norm(low, (4,)).dtype == torch.float32
        assert torch.dot(low[0], value[0]).dtype == torch.float32
        assert (low + low).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(low.sigmoid(), torch.ones_like(low))
    low.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_grad_scaler_skips_a_step_with_infinite_gradients() -> None:
    layer = nn.Linear(4, 1).to("sim")
    before = layer.weight.detach().clone()
    optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), acc.amp.GradScaler()
    scaler.scale(layer(torch.full((1, 4), float("inf"), device="sim")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert layer.weight.equal(before)
    assert scaler.get_scale() == 2.0**15


def test_a_captured_training_step_replays() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 1).to("sim")
    eager = copy.deepcopy(layer)
    value, target = torch.randn(8, 4, device="sim"), torch.randn(8, 1, device="sim")

    def step(net: nn.Module) -> torch.Tensor:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = (net(value) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = acc.create_graph()
    with acc.capture_to_graph(graph):
        assert acc.is_current_stream_capturing()
        loss = step(layer)
    assert not acc.is_current_stream_capturing()
    step(eager)
    for _ in range(3):
        value.copy_(torch.randn(8, 4))
        acc.replay_graph(graph)
        assert step(eager).equal(loss)
    assert layer.weight.equal(eager.weight)


def test_torch_compile_runs_as_it_is_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    net, value = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("sim"), torch.randn(2, 4, device="sim")
    with caplog.at_level("WARNING", "acclimate"):
        for compiled in (torch.compile(net), torch.compile(net, backend=acc.get_compile_backend())):
            torch._dynamo.reset()
            output = compiled(value)
            output.sum().backward()
            assert output.equal(net(value))
    assert [record for record in caplog.records if "does not generate code" in record.message][1:] == []
    assert torch.compile(net, backend="aot_eager")(value).equal(net(value))


def test_torch_save_keeps_devices() -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3, device="sim:1")}, buffer)
    for where, expected in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0")):
        buffer.seek(0)
        assert str(torch.load(buffer, map_location=where)["a"].device) == expected


def test_safetensors_loads_to_the_device(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file({"a": torch.arange(4.0, device="sim:1")}, tmp_path / "a.safetensors")
    for device in ("sim", "sim:1", "cpu"):
        loaded = safetensors.load_file(tmp_path / "a.safetensors", device=device)["a"]
        assert loaded.device == torch.empty(0, device=device).device
        assert loaded.cpu().equal(torch.arange(4.0))


@pytest.mark.slow
def test_transformers_places_a_model_with_device_map(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="device_map needs the accelerate package")
    host = small_llama(transformers)
    host.save_pretrained(tmp_path)
    prompt = torch.tensor([[1, 2, 3]])
    expected = host.generate(prompt, max_new_tokens=8, do_sample=False)
    for place in ("sim", "sim:1", {"": "sim:1"}):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=place)
        assert model.device.type == "sim"
        assert (
            model.generate(prompt.to(model.device), max_new_tokens=8, do_sample=False).cpu().equal(expected)
        )


def test_transformers_generates_the_hosts_tokens() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, prompt = small_llama(transformers), torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert model.to("sim").generate(prompt.to("sim"), max_new_tokens=8, do_sample=False).cpu().equal(expected)


def test_ranks_draw_on_the_device_of_their_layer_and_keep_the_random_numbers_of_all_devices() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from acclimate.llm.split.layers.randomness import RankRandomness
    from acclimate.llm.split.planning.make_plan import make_plan

    with torch.device("meta"):
        model = small_llama(transformers)
    acc.manual_seed_all(5)
    places = range(acc.device_count())
    assert len(places) > 1
    layers = [nn.Linear(2, 2, device=acc.device_name(place)) for place in places]
    before = [acc.get_rng_state(place) for place in places]
    make_plan(model, 2)
    after_the_plan = [acc.get_rng_state(place) for place in places]
    for place, layer in enumerate(layers):
        randomness = RankRandomness(layer, 1)
        randomness.enter(layer, "a region")
        inside = [acc.get_rng_state(other).equal(state) for other, state in enumerate(before)]
        assert inside == [other != place for other in places]
        randomness.leave("a region")
        after_the_step = [acc.get_rng_state(other) for other in places]
        for states in (after_the_plan, after_the_step):
            assert all(map(torch.equal, before, states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_own_op_is_built_from_its_own_folder(dtype: torch.dtype) -> None:
    builder = acc.create_op_builder("RMSNormBuilder")
    assert builder is not None
    assert builder.is_compatible()
    module = builder.load()
    value, weight = torch.randn(3, 5, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    expected = module.rms_norm(value, weight)  # plain torch: the kernel is for sim only
    found = module.rms_norm(value.to("sim"), weight.to("sim"))
    assert found.device.type == "sim"
    torch.testing.assert_close(found.cpu(), expected)
    with pytest.raises(RuntimeError, match="on one device"):
        module.rms_norm(value.to("sim:0"), weight.to("sim:1"))
