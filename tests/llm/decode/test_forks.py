"""A process that has loaded a model forks, as a server with workers does, and its children generate."""

from __future__ import annotations

import os

import pytest

from fresh_process import FreshProcesses

_CODE = """
import os, signal, threading, time
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import acclimate

torch.set_num_threads(2)
torch.manual_seed(0)
config = LlamaConfig(vocab_size=40000, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
                     num_attention_heads=8, num_key_value_heads=4, eos_token_id=None, bos_token_id=None)
ids = torch.arange(2, 60)[None]

def generate(**options):
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, **options}
    torch.manual_seed(1)
    return model.generate(ids, pad_token_id=0, **options)[0, 58:].tolist()

def forked():
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            if os.fork() == 0:  # a worker's own child, which inherits no alarm
                signal.alarm(60)
                generate()
                os._exit(0)
            ended = os.wait()[1]
            os._exit(0 if generate() == expected and ended == 0 else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]

with torch.no_grad():
    source = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    source.save_pretrained("model")
del source
signal.alarm(240)
"""

_PARENTS = {
    "loads": "model = acclimate.init_inference('model', dtype='bfloat16'); statuses = []",
    "generates": """
model = acclimate.init_inference('model', dtype='bfloat16')
generate(); generate(do_sample=True, top_p=0.9); generate(num_beams=2)
statuses = []
""",
    "forks_while_a_thread_generates": """
model = acclimate.init_inference('model', dtype='bfloat16')
expected = generate()
stop = threading.Event()

def work():
    while not stop.is_set():
        generate()

thread = threading.Thread(target=work)
thread.start()
statuses = []
for _ in range(2):
    time.sleep(0.05)
    statuses.append(forked())
stop.set()
thread.join()
""",
    "forks_in_a_thread": """
model = acclimate.init_inference('model', dtype='bfloat16')
expected = generate()
statuses = []
thread = threading.Thread(target=lambda: statuses.append(forked()))
thread.start()
thread.join()
""",
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("parent", _PARENTS)
def test_a_forked_child_generates_after_its_parent(parent: str, fresh: FreshProcesses) -> None:
    # The expected tokens come from a thread, whose threads of torch end with it.
    code = """
found = []
thread = threading.Thread(target=lambda: found.append(generate()))
thread.start(); thread.join()
expected = found[0]
statuses.append(forked())
tell(statuses=statuses, same=generate() == expected)
"""
    told = fresh.check(_CODE + _PARENTS[parent] + code).told
    assert set(told["statuses"]) == {0}
    assert told["same"]
