"""Checks of samplers, and of the deletion of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinker_lightning.client.dialects import measure
from tinker_lightning.doctor.probe import Check, Finding, NotOffered, reason
from tinker_lightning.errors import InvalidInput, NotFound, OperationFailed, Unsupported
from tinker_lightning.types import AdamParams, Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tinker_lightning.client.dialects.measure import Scratch
    from tinker_lightning.client.sampling import SamplingClient
    from tinker_lightning.client.training import TrainingClient
    from tinker_lightning.doctor.probe import Probe

# The adapter is trained until log-probabilities have changed by this much, so that a sampler without it is seen.
_TRAINED = 0.5
_STEPS = 6
_SAMPLED = 8
# The largest mean difference between sampler and trainer, which may compute in another precision.
_AGREEMENT = 0.05


def _agreement(probe: Probe) -> Finding:
    client = probe.model()
    scratch = probe.measured(client)
    for i in range(_STEPS):
        _train(client, scratch, 1e-2 * 2**i)
        if np.abs(scratch.flat() - scratch.start_flat).mean() > _TRAINED:
            break
    sampler = _sampler(client)
    difference = float(np.abs(_prompt_logprobs(sampler, scratch) - scratch.logprobs()[1]).mean())
    if not difference <= _AGREEMENT:
        return Finding(f"log-probabilities of a prompt differ by {difference:.3g} on average")
    tokens = scratch.tokens
    settings = SamplingParams(max_tokens=_SAMPLED, temperature=1.0, seed=0)
    (sequence,) = sampler.sample(ModelInput.from_ints(tokens), 1, settings).result().sequences
    if not sequence.tokens or sequence.logprobs is None:
        return Finding(detail="the sampler returns no log-probabilities of samples")
    whole = [*tokens, *map(int, sequence.tokens)]
    datum = Datum(ModelInput.from_ints(whole[:-1]), {"target_tokens": np.array(whole[1:])})
    trained = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    gaps = np.asarray(sequence.logprobs, np.float64) - trained[len(tokens) - 1 :]
    divergence, largest = float(gaps.mean()), float(np.abs(gaps).mean())
    measured = f"KL divergence {divergence:.2g} from {len(gaps)} sampled tokens"
    return Finding(f"log-probabilities of samples differ: {measured}" if not largest <= _AGREEMENT else None, measured)


def _live(probe: Probe) -> Finding:
    client = probe.model()
    scratch = probe.measured(client)
    sampler = _sampler(client)
    _train(client, scratch, 1e-2)
    trained = scratch.flat()
    sampled = _prompt_logprobs(sampler, scratch)
    moved = np.abs(scratch.flat() - trained).max()
    if not moved <= 0.1 * np.abs(trained - scratch.start_flat).max():
        return Finding("sampling from saved weights replaces those in training", dialect={"samples_old_weights": False})
    to_saved, to_trained = (
        np.abs(sampled - each[-measure.LENGTHS[1] :]).mean() for each in (scratch.start_flat, trained)
    )
    if not to_saved < to_trained:
        return Finding(
            "a sampler of saved weights samples from those in training", dialect={"samples_old_weights": False}
        )
    return Finding(dialect={"samples_old_weights": True})


def _train(client: TrainingClient, scratch: Scratch, rate: float) -> None:
    call = measure.weighted(1, np.ones(measure.LENGTHS[1], np.float32))
    client.forward_backward(scratch.datums(call), "cross_entropy")
    client.optim_step(AdamParams(learning_rate=rate)).result()


def _sampler(client: TrainingClient) -> SamplingClient:
    try:
        return client.save_weights_and_get_sampling_client()
    except (NotFound, InvalidInput, OperationFailed) as error:
        raise NotOffered(f"no sampler can be created: {reason(error)}") from error


def _prompt_logprobs(sampler: SamplingClient, scratch: Scratch) -> NDArray[np.float64]:
    """Returns the log-probabilities of the longest datum's targets."""
    logprobs = sampler.compute_logprobs(ModelInput.from_ints(scratch.tokens)).result()
    return np.array([np.nan if each is None else each for each in logprobs[1:]], np.float64)


def _deletion(probe: Probe) -> Finding:
    client = probe.model()
    path = probe.save(client)
    try:
        client.delete_checkpoint(path)
    except (Unsupported, InvalidInput) as error:  # there is no endpoint, or paths are not those of the protocol
        raise NotOffered("states stay on the server", deletes_checkpoints=False) from error
    if client.checkpoint_exists(path):
        return Finding("a deleted checkpoint is still there", dialect={"deletes_checkpoints": False})
    probe.forget(path)
    return Finding(dialect={"deletes_checkpoints": True})


AGREEMENT = Check(
    "sampler",
    "the sampler and the trainer agree on log-probabilities",
    "Samples come from another policy than the one in training. Use losses that correct for it (importance_sampling, "
    "ppo), and check that the sampler loads the adapter.",
    _agreement,
)
LIVE = Check(
    "weights in training",
    "sampling uses the weights that were saved, and leaves those in training alone",
    "Sample only from the present weights: save_weights_and_get_sampling_client() after each step.",
    _live,
)
DELETION = Check(
    "deletion",
    "a checkpoint can be deleted",
    "States stay on the server, also those of ModelCheckpoint(save_top_k=...). Delete them there.",
    _deletion,
)
