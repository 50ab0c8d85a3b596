"""Trains small networks with DeepSpeed, one process for each setting, and prints their losses as JSON.

    python deepspeed_program.py FOLDER SETTING...

A setting is "stage,offload,dtype", such as "3,nvme,bf16". "3,none,fp32,save,NAME" saves a checkpoint in
FOLDER/NAME and goes on, and "3,none,fp32,load,NAME" goes on from there; both print the losses after the
checkpoint.
"infer,none,fp32" computes with a language model that is split over the ranks. Started with a launcher,
rank 0 prints, and ranks meet at files in the folder that ``MEETING`` names, which must be empty.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

STEPS = 5
CHECKPOINT_AT = 4


def configuration(stage: int, offload: str, dtype: str, folder: Path) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload != "none":
        place = {"device": offload, "pin_memory": True, "nvme_path": str(folder)}
        zero["offload_optimizer"] = place
        if stage == 3:
            zero["offload_param"] = {**place, "buffer_size": 100_000}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bf16"},
        "aio": {"block_size": 262144, "queue_depth": 8},
        "steps_per_print": 10**9,
    }


def train(setting: str, folder: Path) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    stage, offload, dtype, *checkpoint = setting.split(",")
    torch.manual_seed(0)
    if stage == "infer":
        return infer(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]))
    layers = torch.nn
    model = layers.Sequential(layers.Linear(64, 128), layers.GELU(), layers.Linear(128, 8))
    config = configuration(int(stage), offload, dtype, folder)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    losses = []
    what, name = checkpoint or ("", "")
    if what == "load":
        engine.load_checkpoint(folder / name, f"stage{stage}")
    for step in range(STEPS if not checkpoint else 2 * CHECKPOINT_AT):
        x, y = (torch.randn(8, width, generator=generator).to(engine.device) for width in (64, 8))
        if what == "load" and step < CHECKPOINT_AT:
            continue  # these steps are in the checkpoint
        output = engine(x.to(torch.bfloat16 if dtype == "bf16" else torch.float32))
        loss = torch.nn.functional.mse_loss(output.float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if what == "save" and step == CHECKPOINT_AT - 1:
            engine.save_checkpoint(folder / name, f"stage{stage}")
            losses.clear()
    builder = get_accelerator().get_op_builder("CPUAdamBuilder")
    return {
        "losses": losses,
        "device": str(engine.device),
        "accelerator": type(get_accelerator()).__name__,
        "builder": builder.__mro__[1].__module__,
    }


def infer(dtype: Any) -> dict[str, Any]:
    """Returns some of the logits of a small random model, and the next tokens."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype).eval()
    ranks = int(os.environ["WORLD_SIZE"])
    engine = deepspeed.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": ranks})
    device = get_accelerator().current_device_name()
    with torch.no_grad():
        logits = engine(torch.arange(8).view(1, 8).to(device)).logits[0].float().cpu()
    return {
        "losses": [*logits[-1, :8].tolist(), *logits.argmax(-1).tolist()],
        "device": device,
        "accelerator": type(get_accelerator()).__name__,
        "builder": type(engine.module).__module__,
    }


def prepare(settings: list[str]) -> None:
    """Imports, builds and asks before the forks what each of them would anew."""
    import cpuinfo
    import deepspeed  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed's builders ask twice each, its optimizer too; each time a Python is started, for a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    ops = ["ShareMemCommBuilder"]
    if not all(setting.startswith("infer") for setting in settings):
        ops += ["CPUAdamBuilder", "FusedAdamBuilder"]
    if any("nvme" in setting for setting in settings):
        ops.append("AsyncIOBuilder")
    for op in ops:
        get_accelerator().create_op_builder(op).load()


def meet(file: Path) -> None:
    import deepspeed

    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    deepspeed.init_distributed(init_method=f"file://{file}", rank=rank, world_size=world_size)


def remove_buffer(port: int) -> None:
    """Removes this rank's shared memory, of which DeepSpeed leaves 69 MB for each group."""
    name = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{port}_{os.environ['RANK']}"
    Path("/dev/shm", f"deepspeed_allreduce_buffer_{name}").unlink(missing_ok=True)


def main() -> None:
    folder, *settings = sys.argv[1:]
    # No process of these asks a launcher; DeepSpeed wants the variables of one.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ["LOCAL_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    prepare(settings)
    # Ranks meet at a file for each setting: the launcher found one free port, not one for each. DeepSpeed
    # names its shared memory by the port.
    port = int(os.environ.setdefault("MASTER_PORT", "29533"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    meeting = Path(os.environ["MEETING"])
    failed = 0
    for number, setting in enumerate(settings):
        process = os.fork()
        if process == 0:
            os.environ["MASTER_PORT"] = str(port + number)
            meet(meeting / str(number))
            result = train(setting, Path(folder))
            if os.environ["RANK"] == "0":
                sys.stdout.write(f"RESULT {json.dumps({'setting': setting, **result})}\n")
                sys.stdout.flush()
            os._exit(0)
        failed |= os.waitpid(process, 0)[1]
        remove_buffer(port + number)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
