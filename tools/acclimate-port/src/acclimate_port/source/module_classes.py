"""The classes and functions of libraries whose objects are modules of torch, by their full names."""

from __future__ import annotations

import re

_IN = r"\.([a-z_0-9]+\.)*"
_OTHERS = r"(?!\w*(Tokenizer|Processor|Config|Extractor|Pipeline|Scheduler|Collator|Output)|TF[A-Z]|Flax)"
"""What transformers and diffusers have besides models of torch."""
_CLASS = re.compile(
    r"torch\.nn\.(?!utils\.|\w*Parameter$)(\w+\.)*[A-Z]\w*$"
    rf"|(transformers|diffusers|peft|trl){_IN}{_OTHERS}"
    r"(\w*Model|\w*ModelMixin|\w*ModelWith[A-Z]\w*|\w*For[A-Z]\w*|Autoencoder[A-Z]\w*)$"
    rf"|(pytorch_lightning|lightning|lightning_fabric){_IN}LightningModule$"
    rf"|(pyro\.nn|torchaudio\.transforms|einops\.layers\.torch|torchmetrics){_IN}[A-Z]\w*$"
    rf"|(torch_geometric\.nn|monai\.networks\.nets|monai\.losses|mmengine\.model){_IN}[A-Z]\w*$"
    r"|(segmentation_models_pytorch|lpips)\.[A-Z]\w*$|sentence_transformers\.SentenceTransformer$"
)
_MAKER = re.compile(
    r"torchvision\.models\.([a-z_0-9]+\.)*(?!get_|list_|\w+_Weights)\w+$"
    r"|timm\.(models\.)?create_model$|open_clip\.create_model$"
    r"|peft\.(get_peft_model|prepare_model_for_kbit_training)$"
)
_BASE = re.compile(
    r"((torch\.)?nn\.(?!\w*Parameter$)|(\w+\.)*(?=Module$)|(\w+\.)*(?=(LightningModule|PyroModule)$)"
    r"|(\w+\.)*(?=\w*(PreTrainedModel|ModelMixin)$)|(\w+\.)*(?=\w+For(CausalLM|ConditionalGeneration)$))[A-Z]\w*$"
)


def is_module_class(full: str) -> bool:
    """Whether a full name is that of a library's class of modules."""
    return _CLASS.match(full) is not None


def makes_module(full: str) -> bool:
    """Whether a full name is that of a library's class of modules, or of a function that gives a module."""
    return _CLASS.match(full) is not None or _MAKER.match(full) is not None


def is_module_base(text: str) -> bool:
    """Whether a base of a class, as a file writes it, is by its name a library's class of modules."""
    return _BASE.match(text) is not None
