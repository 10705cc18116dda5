"""What needs a process of its own: Ctrl-C, a fork, the end of a script without `close()`."""

from __future__ import annotations

import re

from tests.helpers.scripts import run_scripts

IMPORTS = """
import os, signal, threading, time, warnings
from tinker_lightning import Datum
from tinker_lightning.client import connect
from tinker_lightning.errors import ClientForked
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.testing import embedded_service
import peft, transformers.models.llama.modeling_llama  # which a trainer would import in each script

data = [Datum.from_tokens([1, 2, 3])]
"""
INTERRUPTED = """
go_on, start_pass = threading.Event(), CausalLM.start_pass
CausalLM.start_pass = lambda *args, **options: (go_on.wait(), start_pass(*args, **options))[1]
with embedded_service() as service:
    model = service.create_lora_training_client("tiny", rank=2)
    plain = model.forward(data, "cross_entropy")
    custom = model.forward_backward_custom(data, lambda _, logprobs: logprobs[0].sum())
    for wait in (plain.result, custom.result, model.optim_step, lambda: model.save_state("a").result()):
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        timer.start()
        try:
            wait()
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - started < 10)
    go_on.set()
    print(plain.result().metrics["loss:sum"] > 0, custom.result().metrics["loss:sum"] < 0)
    print(model.optim_step().result().metrics["grad_norm"] > 0)
"""
FORKED = """
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads
with embedded_service() as service:
    model = service.create_lora_training_client("tiny", rank=2)
    sampler = service.create_sampling_client(base_model="tiny")
    waiting = model.forward_backward_custom(data, lambda _, logprobs: logprobs[0].sum())
    pid = os.fork()
    if pid == 0:
        uses = [
            lambda: model.forward(data, "cross_entropy"),
            lambda: service.create_lora_training_client("tiny"),
            lambda: service.get_server_capabilities(),
            lambda: sampler.compute_logprobs([1]),
            lambda: sampler.get_base_model(),
            lambda: waiting.result(),
        ]
        for use in uses:
            try:
                use()
            except ClientForked as error:
                print("Create a new one in" in str(error) or "create a new client" in str(error), flush=True)
        service.close()
        service.__exit__(ValueError, ValueError(), None)
        os._exit(0)
    print(os.waitpid(pid, 0)[1], waiting.result().metrics["loss:sum"] < 0)
"""
UNCLOSED = """
model = connect("embedded").create_lora_training_client("tiny", rank=2)
"""


def test_scripts_are_interrupted_fork_and_end_without_close() -> None:
    """All in one test, because the imports of a process take longer than all of them."""
    interrupted, forked, failed, never_evaluated, read = run_scripts(
        IMPORTS,
        INTERRUPTED,
        FORKED,
        f"{UNCLOSED}model.forward(data, 'no_such_loss')",
        f"{UNCLOSED}model.forward_backward_custom(data, lambda _, lp: lp[0].sum())",
        f"{UNCLOSED}model.forward_backward(data, 'cross_entropy')\nmodel.optim_step().result()",
    )
    # Ctrl-C interrupts every wait, and the client stays usable.
    assert interrupted.stdout.splitlines() == ["interrupted True"] * 4 + ["True True", "True"], interrupted
    # A fork cannot use the clients of its parent.
    assert forked.stdout.splitlines() == ["True"] * 6 + ["0 True"], forked
    # A script that ends without close() prints the failures that it did not read.
    assert (failed.returncode, never_evaluated.returncode, read.returncode) == (0, 0, 0)
    message = "unhandled failure: InvalidInput: forward: .*no_such_loss.*forward 1 of"
    assert len(re.findall(message, failed.stderr)) == 1, failed.stderr
    assert len(failed.stderr.splitlines()) == 1, failed.stderr  # not also as a request without a result
    message = "custom of .* was never evaluated, so nothing"
    assert len(re.findall(message, never_evaluated.stderr)) == 1, never_evaluated.stderr
    assert read.stderr == ""
