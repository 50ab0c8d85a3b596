"""A quantised weight is read-only: a write to it is an error, and never a change that vanishes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import write_tiny_gguf
from torch import Tensor, nn

import acclimate
from acclimate.errors import QuantizationError
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.loading.packed_modules import FewRowLinear, PackedLinear

FORMS = ["int8", "int4", "gguf"]


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "gguf":
        return acclimate.init_inference(
            write_tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "tiny.gguf")
        )
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return acclimate.init_inference(LlamaForCausalLM(config).eval(), quantize=request.param)


def modules_of(model: Any) -> list[Any]:
    """A linear module, the embedding, and the output head, which may share the embedding's table."""
    return [
        model.model.layers[1].mlp.down_proj, model.get_input_embeddings(), model.get_output_embeddings()
    ]  # fmt: skip


def change(like: Tensor) -> Tensor:
    return torch.ones(like.shape, dtype=like.dtype)


def assign_data(layer: Any) -> None:  # as PEFT's safe merge
    layer.weight.data = layer.weight.data + change(layer.weight)


def add_to_data(layer: Any) -> None:  # as PEFT's merge
    layer.weight.data += change(layer.weight)


def set_weight(layer: Any) -> None:
    layer.weight = nn.Parameter(change(layer.weight))


def set_tensor(layer: Any) -> None:
    layer.weight = change(layer.weight)


def add_without_gradient(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.add_(change(layer.weight))


def set_row(layer: Any) -> None:
    layer.weight[0] = 0


def set_where(layer: Any) -> None:
    layer.weight[layer.weight > 0] = 0


def set_a_view_of_a_view(layer: Any) -> None:
    layer.weight.data.t()[1, 2:3].zero_()


def write_as_output(layer: Any) -> None:
    torch.add(change(layer.weight), 1, out=layer.weight)


def multiply_a_list(layer: Any) -> None:
    torch._foreach_mul_([layer.weight], 2.0)


def same_device_and_dtype(layer: Any) -> None:
    layer.weight.cpu().to(layer.weight.dtype).zero_()


def vector(layer: Any) -> None:
    nn.utils.vector_to_parameters(torch.zeros(layer.weight.numel()), [layer.weight])


def train(layer: Any) -> None:
    layer.weight.requires_grad_()


def train_by_attribute(layer: Any) -> None:
    layer.weight.requires_grad = True


def set_gradient(layer: Any) -> None:
    layer.weight.grad = change(layer.weight)


def share_memory(layer: Any) -> None:
    layer.weight.share_memory_()


def resize_storage(layer: Any) -> None:
    layer.weight.untyped_storage().resize_(0)


def through_dlpack(layer: Any) -> None:
    torch.from_dlpack(layer.weight).zero_()


def apply_a_function(layer: Any) -> None:
    layer.weight.apply_(lambda value: value + 1)


WRITES: list[Callable[[Any], Any]] = [
    assign_data, add_to_data, set_weight, set_tensor, add_without_gradient, set_row, set_where,
    set_a_view_of_a_view, write_as_output, multiply_a_list, same_device_and_dtype, vector, train,
    train_by_attribute, set_gradient, share_memory, resize_storage, through_dlpack, apply_a_function,
]  # fmt: skip
INPLACE: list[Callable[[Tensor], Any]] = [
    lambda weight: weight.data.copy_(change(weight)),
    lambda weight: weight.mul_(2),
    lambda weight: weight.data.zero_(),
    lambda weight: weight.view(-1)[3:4].fill_(1),
    lambda weight: [row.zero_() for row in weight.unbind()],
    lambda weight: weight.scatter_(0, torch.zeros(1, 1, dtype=torch.long), 1.0),
    nn.init.zeros_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_uniform_,
    nn.init.trunc_normal_,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_to_a_quantised_weight_is_an_error_and_changes_nothing(
    model: Any, write: Callable[[Any], Any]
) -> None:
    for layer in modules_of(model):
        before = layer.weight.clone()
        with pytest.raises(QuantizationError, match="read-only"):
            write(layer)
        assert torch.equal(layer.weight.clone(), before), layer


def test_an_in_place_operation_on_a_quantised_weight_is_an_error(model: Any) -> None:
    for layer, operation in itertools.product(modules_of(model), INPLACE):
        with pytest.raises(QuantizationError, match=r"weight.clone\(\)"):
            operation(layer.weight)


def test_swapping_a_quantised_weight_with_a_tensor_is_an_error(model: Any) -> None:
    for layer in modules_of(model):
        for pair in ((layer.weight, change(layer.weight)), (change(layer.weight), layer.weight)):
            with pytest.raises(RuntimeError, match="Cannot swap"):
                torch.utils.swap_tensors(*pair)


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}])
def test_loading_other_values_into_a_quantised_module_is_an_error(
    model: Any, options: dict[str, bool]
) -> None:
    for layer in modules_of(model):
        with pytest.raises(RuntimeError, match="quantised"):
            layer.load_state_dict({"weight": change(layer.weight)}, **options)


def test_a_copy_of_a_quantised_weight_can_be_changed(model: Any) -> None:
    weight = modules_of(model)[0].weight
    copied = weight.detach().clone()
    assert type(copied) is Tensor
    assert torch.equal(copied.mul_(2), weight * 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: nn.functional.linear(torch.ones(3, weight.shape[1], dtype=weight.dtype), weight),
        lambda weight: torch.ones(3, weight.shape[1], dtype=weight.dtype) @ weight.t(),
        lambda weight: weight[3:5].double(),
        lambda weight: weight.view(-1).sum(),
        lambda weight: weight.T.contiguous(),
        lambda weight: weight.data.split(3)[1] + 0,
        lambda weight: torch.einsum("oi,bi->bo", weight, torch.ones(2, weight.shape[1], dtype=weight.dtype)),
    ],
)
def test_views_of_a_quantised_weight_have_its_values(model: Any, read: Callable[[Tensor], Tensor]) -> None:
    weight = modules_of(model)[0].weight
    assert torch.equal(read(weight), read(weight.clone()))


def test_a_quantised_weight_can_be_that_of_another_module(model: Any) -> None:
    one, other = (copy.deepcopy(model).model.layers[i].mlp.up_proj for i in (0, 1))
    one.weight = other.weight
    assert one.packed is other.packed
    assert isinstance(one, PackedLinear)


@pytest.mark.slow
@pytest.mark.parametrize("model", FORMS, indirect=True)
def test_a_text_follows_a_quantised_weight_that_becomes_that_of_another_module(model: Any) -> None:
    made = copy.deepcopy(model)
    before = lean_decoder(made)
    assert before is not None
    assert lean_decoder(made) is before
    made.model.layers[0].mlp.down_proj.weight = made.model.layers[1].mlp.down_proj.weight
    after = lean_decoder(made)
    assert after is not None
    assert after is not before


def test_resizing_a_quantised_vocabulary_is_an_error(model: Any) -> None:
    made = copy.deepcopy(model)
    with pytest.raises(QuantizationError, match="read-only"):
        made.resize_token_embeddings(400, mean_resizing=False)


def test_a_linear_module_follows_a_weight_that_becomes_a_part_of_itself() -> None:
    layer: Any = nn.Linear(32, 64, bias=False)
    layer.__class__ = FewRowLinear
    x = torch.randn(1, 32)
    with torch.no_grad():
        whole = layer(x)
        layer.weight.data = layer.weight.data[:40]
        assert torch.allclose(layer(x), whole[:, :40], atol=1e-5)


def test_a_linear_module_follows_changes_of_a_transposed_weight() -> None:
    layer: Any = nn.Linear(32, 64, bias=False)
    layer.weight = nn.Parameter(torch.randn(32, 64).t())
    layer.__class__ = FewRowLinear
    x = torch.randn(1, 32)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        assert torch.allclose(layer(x), before * 2, atol=1e-4)
