"""Our client and `Trainer.fit` on a real SkyRL 0.3.0 server with its JAX backend. Run it with `tox -e skyrl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers import skyrl_passes
from tests.helpers.peer_suite import BATCH, PeerSuite, Server, linear
from tests.helpers.real_servers import skyrl, write_tiny_qwen
from tinker_lightning import AdamParams, SamplingParams
from tinker_lightning.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.client import TrainingClient

# The packages of this environment warn of each other.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_tiny_qwen(tmp_path_factory.mktemp("model"))
    with skyrl(tmp_path_factory.mktemp("skyrl"), model) as url:
        yield Server(url, str(model), step=1500.0, learning_rate=2e-3)


class TestSkyRL(PeerSuite):
    def send_alone(self, client: TrainingClient, server: Server, i: int) -> None:
        skyrl_passes.send_alone(client, server, i)

    def test_what_the_server_cannot_do_is_named(self, client: TrainingClient) -> None:
        with pytest.raises(Unsupported, match="grad_clip_norm"):
            client.optim_step(AdamParams(grad_clip_norm=1.0))
        with pytest.raises(Unsupported, match="stays on the server"):
            client.delete_checkpoint(client.save_state("kept").result().path)

    def test_sampling_does_not_replace_the_model(self, client: TrainingClient) -> None:
        sampler = client.save_weights_and_get_sampling_client()
        prompt = BATCH[0].model_input
        assert len(sampler.sample(prompt, 2, SamplingParams(max_tokens=4)).result().sequences) == 2
        assert len(sampler.compute_logprobs(prompt).result()) == prompt.length
        client.forward_backward_custom(BATCH, linear([0, 1, 2]))
        client.optim_step(AdamParams(learning_rate=1e-3)).result()
        with pytest.raises(Unsupported, match="would replace the weights"):
            sampler.sample(prompt, 1, SamplingParams(max_tokens=1))
